"""The command lines, each in a module of its own."""
