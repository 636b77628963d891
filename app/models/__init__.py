"""The served models: load them, warm them up and swap them."""
