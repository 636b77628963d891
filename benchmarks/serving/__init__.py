"""How the service behaves under load."""
