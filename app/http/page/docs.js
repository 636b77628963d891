// The page at "/docs": an example, then the OpenAPI document of this service, shown by Swagger UI.

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

document.getElementById("origin").textContent = new URL(".", location.href).href;
window.SwaggerUIBundle({ url: "openapi.json", dom_id: "#interface", deepLinking: true, validatorUrl: null });
