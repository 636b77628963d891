"""The report of a model of several labels."""
