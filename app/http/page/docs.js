// The page at "/docs": the OpenAPI document of this service, shown by Swagger UI.

window.SwaggerUIBundle({ url: "openapi.json", dom_id: "#interface", deepLinking: true, validatorUrl: null });
