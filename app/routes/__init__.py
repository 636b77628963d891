"""One module per resource; every router is included by ``app.main``."""
