"""The routes, one module per resource; :mod:`app.main` includes their routers."""
