"""The HTTP interface: one concept a module, one middleware a module."""
