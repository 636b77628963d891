"""The command lines, one a module."""
