"""One module for each resource; :mod:`app.main` includes their routers."""
