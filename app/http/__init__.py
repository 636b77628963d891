"""The HTTP interface, one concept per module."""
