"""Measure neural collapse after every layer, and select the candidate layer(s) by it."""
