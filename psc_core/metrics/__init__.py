"""Metrics of classifiers and detectors, with intervals."""
