"""Run the stages of ``psc-fit`` in order, and print what each of them found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from psc_core.collapse.report import CollapseReport, to_text
from psc_core.fitting import stages
from psc_core.fitting.checkpoint import Checkpoint
from psc_core.fitting.job import FitJob
from psc_core.projection.fit.report import FittedProjection


def run_stages(
    net: nn.Module, job: FitJob, name: str, provenance: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[CollapseReport, FittedProjection, stages.FitResult]:
    """Fit stage by stage, except for those in the checkpoint; of several processes the first prints."""
    layer, is_first = job.settings.layer, job.compute.reducer.rank == 0
    report = checkpoint.load_collapse()
    if report is None:
        report = stages.collapse(net, job)
        checkpoint.save_collapse(report)
    candidate = report.candidate(None if layer == "auto" else layer)
    if is_first:
        print(to_text(report, candidate))

    projection = checkpoint.load_projection()
    if projection is None:
        projection = stages.project(net, candidate, job)
        checkpoint.save_projection(projection)
    if is_first:
        print(projection.report.summary(report.nc4_of(candidate)))

    fitted = stages.fit_model(net, candidate, projection, job, name=name, provenance=provenance)
    if is_first and fitted.gate_choice is not None:
        print(fitted.gate_choice.table())
    return report, projection, fitted
