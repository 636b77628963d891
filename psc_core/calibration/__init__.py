"""Conformal p-values, prediction sets and thresholds from held-out images."""
