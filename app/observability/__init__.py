"""Metrics, drift, logs and traces."""
