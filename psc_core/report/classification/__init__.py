"""The report of a classifier."""
