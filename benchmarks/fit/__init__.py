"""Benchmarks of fitting."""
