"""The same model behind each peer; every module here runs in that peer's environment."""
