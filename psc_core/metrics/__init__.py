"""Metrics of classifiers, regressions and detectors, with intervals."""
