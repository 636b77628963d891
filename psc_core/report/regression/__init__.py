"""The report of a regression."""
