"""Standardisation and the interface that the fits of all tasks share."""
