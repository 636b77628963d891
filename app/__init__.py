"""The service: HTTP in front of one device thread per model. ``main.create_app`` is the only wiring."""
