"""Pure ASGI middleware, one concern per module (not ``BaseHTTPMiddleware``, which hides disconnects)."""
