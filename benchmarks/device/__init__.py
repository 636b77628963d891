"""Benchmarks of the device step."""
