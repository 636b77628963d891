"""Put together what a bundle records of its fit: the measurements of every stage, and the provenance, in JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psc_core.collapse.report import Candidate
from psc_core.fitting.parts import FittedParts
from psc_core.projection.fit.report import FittedProjection, ProjectionReport


def report_of(
    candidate: Candidate,
    projection: FittedProjection,
    parts: FittedParts,
    metrics: Mapping[str, Any],
    provenance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the record of a fit, JSON types; ``metrics`` were measured on the calibration split."""
    gates = {} if parts.gates is None else {"gates": parts.gates.choice.to_json()}
    of_map = {} if parts.map is None else {"map": parts.map.choice.to_json()}
    report = {
        "collapse": candidate.report and {**candidate.report.to_json(), "notes": list(candidate.notes)},
        "metrics": {**metrics, "projection": projection_metrics(projection.report), **gates, **of_map},
        "provenance": dict(provenance or {}),
    }
    recorded: dict[str, Any] = rounded(report)
    return recorded


def projection_metrics(report: ProjectionReport) -> dict[str, Any]:
    """Return the record of a projection, JSON types."""
    choice = report.choice
    return {
        "nc1": choice.nc1,
        "nc4": choice.nc4,
        "scaled_nc1": report.scaled_nc1,
        "scaled_nc4": report.scaled_nc4,
        "warning": choice.warning,
        "pooled": report.note,
        "positions": [{"d_proj": d, "made_up_auroc": value} for d, value in report.positions],
    }


def rounded(value: Any) -> Any:
    """Return ``value`` with floats to 9 digits, which the version hashes; the others depend on how sums are split."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
