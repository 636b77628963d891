"""The service: HTTP in front of the device threads of each model. ``main.create_app`` is the only wiring."""
