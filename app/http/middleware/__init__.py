"""Pure ASGI middleware, one concern a module (no ``BaseHTTPMiddleware``: it hides disconnects)."""
