"""Metrics, drift, logs and traces; told of what happens, asked by nobody else."""
