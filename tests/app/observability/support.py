"""A drift monitor as the tests use it."""

from __future__ import annotations

from app.drift import DriftMonitor


def monitor_of(
    calibration_count: int, alpha: float, *, false_alarm_probability: float = 0.01, window: int = 1000
) -> DriftMonitor:
    """A monitor."""
    return DriftMonitor(calibration_count, alpha, false_alarm_probability=false_alarm_probability, window=window)
