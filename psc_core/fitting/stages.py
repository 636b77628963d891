"""From a trained network to a fitted model in three stages, each of which returns what the next one needs.

    :func:`collapse`    network, images                        → :class:`.CollapseReport`, which names the candidate
    :func:`project`     network, candidate, images             → :class:`.FittedProjection`, its features to z (B, D)
    :func:`fit_model`   network, candidate, projection, images → :class:`FitResult`, the calibrated model

Training images fit, the selection split chooses, and the calibration split only calibrates (:class:`.FitData`).
:mod:`.paper` has the same stages under the names of the paper's pseudo-code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from psc_core.collapse.measure import measure_layers
from psc_core.collapse.report import Candidate, CollapseReport
from psc_core.compute.device import own_state
from psc_core.data.scratch import temporary_folder
from psc_core.density import DENSITIES
from psc_core.errors import UsageError
from psc_core.fitting.calibrate import calibrate_scorer, trial_of
from psc_core.fitting.data import FitData
from psc_core.fitting.features import cut
from psc_core.fitting.job import FitJob
from psc_core.fitting.parts import fit_parts
from psc_core.fitting.positions import compare_positions, fewest_positions
from psc_core.fitting.record import report_of
from psc_core.gates.fit.choice import GateChoice
from psc_core.model.base import FittedModel
from psc_core.model.load import model_class_of
from psc_core.projection.fit.projection import fit_tucker
from psc_core.projection.fit.ranks import choose_ranks
from psc_core.projection.fit.report import FittedProjection, ProjectionReport
from psc_core.settings import HEAD_INPUTS, OOD_SCORES, PREDICTIONS, FitSettings
from psc_core.tasks.fit.task import one_of
from psc_core.thumbnails.fit.choose import check_thumbnail_count


class FitResult(NamedTuple):
    """A fitted model, the comparison that chose its gates, and the disk space that its features took meanwhile."""

    model: FittedModel
    gate_choice: GateChoice | None  # None for a model without gates
    feature_bytes: int


@own_state()
def collapse(net: nn.Module, job: FitJob) -> CollapseReport:
    """Measure NC1 on the training images and NC4 (for a regression R²) on the selection split, after every layer.

    Raises:
        UsageError: If a setting is unknown, or a pattern matches no layer.
        FitError: If features are not finite.
        NetworkError: If the network cannot be run or cut.
    """
    data, compute = job.data, job.compute
    compute.reducer.require(data.train)
    return measure_layers(net, data.train, data.selection, job.settings, compute, data.task_fit.layer_quality)


@own_state()
def project(net: nn.Module, candidate: Candidate, job: FitJob) -> FittedProjection:
    """Fit moments and Tucker factors to the training images, and choose the sizes on the selection split.

    The sizes are the smallest that keep NC1 and NC4; for a density that reads z, with as many spatial components as
    that needs (:mod:`psc_core.fitting.positions`).

    Raises:
        UsageError: If the density is unknown.
        FitError: If features are constant, or sizes are larger than the layer allows.
        NetworkError: If the network cannot be cut.
    """
    data, settings, compute = job.data, job.settings, job.compute
    one_of("density", settings.density, tuple(DENSITIES), data.task_fit.task_type.noun)
    reads_z = DENSITIES[settings.density].reads == "z"
    compute.reducer.require(data.train)
    backbone = cut(net, candidate.layers, data.train, compute, keep_output=False)
    sized = fit_tucker(backbone, data.train, data.selection, settings, compute)
    choice = choose_ranks(sized.nc1, sized.nc4, sized.scaled_nc4, settings)
    compared: dict[int, float] = {}
    sizes = [choice]
    if settings.d_proj is None:
        sizes = choice.with_more_positions(sized.nc1, sized.nc4, sized.deviation, epsilon=settings.epsilon)
    if reads_z and len(sizes) > 1:
        pairs = [(size.c_proj, size.d_proj) for size in sizes]
        compared = compare_positions(backbone, sized, pairs, job)
        kept = compute.reducer.first(fewest_positions(compared))
        choice = next(size for size in sizes if size.d_proj == kept)
    if data.task_fit.averages_candidate(settings) and not reads_z:
        choice = replace(choice, warning="")  # Head and density read besides z, or instead of it, what z gives up.
    projection = sized.largest.leading(choice.c_proj, choice.d_proj).cpu()
    return FittedProjection(projection, ProjectionReport.of(choice, sized, compared), candidate.layers)


def checked(settings: FitSettings, data: FitData) -> FitSettings:
    """Return the settings with the task of the images and, where no head is named, the task's first.

    Raises:
        UsageError: If an option is unknown, no folder can hold temporary files, or so few validation images cannot keep
            a rate.
    """
    temporary_folder()  # Before hours are spent on what is to be kept there.
    fit = data.task_fit
    settings = settings.of_task(fit.task_type.name, fit.task_type.heads)
    for option, allowed in (
        ("predictions", PREDICTIONS), ("head_input", HEAD_INPUTS), ("head", tuple(fit.task_type.heads)),
        ("density", tuple(DENSITIES)), ("ood_score", OOD_SCORES),
    ):  # fmt: skip
        one_of(option, getattr(settings, option), allowed, fit.task_type.noun)
    fit.check(settings, len(data.calibration))
    data.check_rates(alpha=settings.alpha, coverage=settings.coverage)
    if settings.keep_examples is not None:
        check_thumbnail_count(settings.keep_examples, len(data.train.classes))
    return settings


@own_state()
def fit_model(
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    job: FitJob,
    *,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit density, head and gates to the training images, and calibrate them on the calibration split.

    Args:
        net: The whole network.
        candidate: The layer(s) that z is made from.
        projection: The candidate's features to z.
        job: The images, settings and device.
        name: The model's name.
        provenance: The origin that a bundle of the model records.

    Raises:
        UsageError: If the projection is of other layers than the candidate's.
        FitError: If features or outputs cannot be fitted; the message says why.
        NetworkError: If the network cannot be cut.
    """
    check_same_layers(candidate, projection)
    data = job.data
    job.compute.reducer.require(data.train)
    parts = fit_parts(net, candidate, projection, job)
    layer_map = None if parts.map is None else parts.map.map
    pipeline, calibrated = calibrate_scorer(parts.scorer, job, parts.gate_names, layer_map, parts.thumbnails)
    model = model_class_of(data.task)(
        task=data.task,
        pipeline=pipeline,
        backbone=parts.backbone,
        classes=data.train.classes,
        calibration=calibrated.calibration,
        policy=calibrated.policy,
        layers=tuple(candidate.layers),
        name=name,
        report=report_of(candidate, projection, parts, calibrated.metrics, provenance),
        trial=trial_of(data.calibration),
    )
    model.probe()  # As in loading: a model that cannot be loaded is not saved.
    choice = None if parts.chosen_gates is None else parts.chosen_gates.choice
    return FitResult(model, choice, parts.feature_bytes)


def check_same_layers(candidate: Candidate, projection: FittedProjection) -> None:
    """Raise :class:`UsageError` for a projection of other layers than the candidate's."""
    if projection.layers != candidate.layers:
        raise UsageError(
            f"expected a projection of the candidate {'+'.join(candidate.layers)}, got one of "
            f"{'+'.join(projection.layers)}; fit the projection for this candidate"
        )
