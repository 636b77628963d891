"""Selecting among variants without looking at the test images that are reported.

The variant reported for a setting has the best mean validation AUROC over all *other* settings; the default that a
user gets was selected on the validation pairs of all settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.runs import Json


def mean_auroc(setting: Json, detector: str, pair: str) -> float | None:
    """Mean AUROC of a detector over a setting's OOD sets; None if it was not run."""
    found = setting["detectors"].get(detector)
    return None if found is None else statistics.mean(entry["auroc"] for entry in found[pair].values())


def ranking(settings: Mapping[str, Json], family: str, *, without: str | None = None) -> list[tuple[str, float]]:
    """Detectors of a family that every setting has, best mean validation AUROC first."""
    names = set.intersection(*(_of_family(setting, family) for setting in settings.values()))
    used = [setting for name, setting in settings.items() if name != without]
    means = {name: statistics.mean(_known(setting, name) for setting in used) for name in sorted(names)}
    return sorted(means.items(), key=lambda item: -item[1])


def _of_family(setting: Json, family: str) -> set[str]:
    return {name for name, found in setting["detectors"].items() if found["family"] == family}


def _known(setting: Json, detector: str) -> float:
    value = mean_auroc(setting, detector, "validation")
    if value is None:
        raise KeyError(detector)
    return value


def selected_elsewhere(settings: Mapping[str, Json], family: str, name: str) -> str | None:
    """The variant selected on the other settings' validation pairs; None if ``name`` is the only setting."""
    if len(settings) == 1:
        return None
    ranked = ranking(settings, family, without=name)
    return ranked[0][0] if ranked else None
