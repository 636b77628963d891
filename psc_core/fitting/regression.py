"""From a trained network that predicts a number to a :class:`psc_core.PSCRegressor`: the last stage of its fit.

    candidate  = measure_collapse(net, train, val).candidate()
    projection = fit_projection(net, candidate, train, val)
    model      = fit_regressor(net, candidate, projection, train, val)

The first two stages are those of a classifier; they bin the numbers (:mod:`psc_core.data.targets`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.calibration.intervals import ValueCalibration, fit_value_calibration
from psc_core.collapse.report import Candidate
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.data.targets import binned
from psc_core.density import DENSITIES
from psc_core.errors import UsageError
from psc_core.fitting.calibrate import OOD_SCORES, score_dataset
from psc_core.fitting.checks import check_attainable_rates, check_classes
from psc_core.fitting.gates import early_layers
from psc_core.fitting.options import FitOptions
from psc_core.fitting.parts import FittedProjection, check_same_layers, fit_parts
from psc_core.fitting.settings import FitSettings
from psc_core.fitting.stages import PREDICTIONS
from psc_core.gates.fit.gates import fit_gates
from psc_core.gates.gates import readings_of
from psc_core.heads import VALUE_HEADS
from psc_core.metrics import regression
from psc_core.model.pipeline import Pipeline, Scorer, ood_score_of
from psc_core.model.regressor import PSCRegressor
from psc_core.network.backbone import example_input
from psc_core.policy import ValuePolicy

"""What the OOD score of a regression, and with it the p-value, is made of."""


def fit_regressor(
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    head: str = "blr",
    density: str = FitSettings.density,
    pca: int | None = None,
    predictions: str = FitSettings.predictions,
    alpha: float = FitSettings.alpha,
    coverage: float = FitSettings.coverage,
    max_width: float | None = None,
    ood_score: str = FitSettings.ood_score,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    options: FitOptions | None = None,
) -> PSCRegressor:
    """Density of bins and head on z of ``train``, calibration on the calibration split of ``val``.

    Example:
        >>> from functools import partial
        >>> from psc_core import PRESETS, fit_projection, measure_collapse, open_dataset
        >>> open_split = partial(open_dataset, "rotated-mnist:tests/data", preprocess=PRESETS["mnist"])
        >>> train, val = open_split(split="train"), open_split(split="val")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 1)).eval()
        >>> candidate = measure_collapse(net, train, val).candidate("0")
        >>> projection = fit_projection(net, candidate, train, val, c_proj=4, d_proj=4)
        >>> model = fit_regressor(net, candidate, projection, train, val, coverage=0.9)
        >>> model.target, model.predict(next(val.batches(3)).images).interval.shape
        (Target(name='angle', unit='degrees'), torch.Size([3, 2]))

    Args:
        net: Trained network of one output, from :func:`psc_core.load_network`.
        candidate: The layer(s) it is cut behind.
        projection: From :func:`psc_core.fit_projection`.
        train: Training images with numbers.
        val: Validation images with numbers of the same target.
        head: One of :data:`psc_core.heads.VALUE_HEADS`.
        density: As of :func:`psc_core.fit_psc`.
        pca: Likewise.
        predictions: ``"psc"`` (the head's mean) or ``"base"`` (the network's own).
        alpha: Default false-alarm rate.
        coverage: Nominal coverage of the intervals.
        max_width: Width of an interval above which an image is uncertain, in the target's unit; None for no limit.
        ood_score: One of :data:`psc_core.fitting.calibrate.OOD_SCORES`.
        name: Model name.
        provenance: Recorded in the bundle.
        options: Shared options.

    Raises:
        UsageError: An unknown option, rates that so few validation images cannot keep, images without numbers, or a
            projection of other layers.
        DataError: Numbers that are all equal, or of another target.
        FitError: Features or outputs that cannot be fitted; the message says why.
        NetworkError: The network cannot be cut.
    """
    options = FitOptions.of(options, candidate)
    check_same_layers(candidate, projection)
    for option, value, allowed in (
        ("predictions", predictions, PREDICTIONS), ("head", head, VALUE_HEADS),
        ("density", density, DENSITIES), ("ood_score", ood_score, OOD_SCORES),
    ):  # fmt: skip
        if value not in allowed:
            raise UsageError(f"expected {option} of a regression to be one of {', '.join(allowed)}, got {value!r}")
    train, val = binned(train, val)
    if train.target is None:
        raise UsageError(f"expected images with a number each, {train.name} has classes; fit_psc fits a classifier")
    check_classes(train, val)
    options.reducer.require(train)
    check_attainable_rates(val, alpha=alpha, coverage=coverage, options=options)
    compute = options.compute()
    head_layers: Sequence[str] = ()
    if VALUE_HEADS[head].reads_layers:
        example = example_input(train.preprocess).to(compute.device)
        head_layers = early_layers(net.to(compute.device), candidate.layers, example)
    parts = fit_parts(
        net,
        candidate,
        projection,
        train,
        val,
        head=head,
        density=density,
        pca=pca,
        keep_output=predictions == "base",
        with_gates=ood_score == "gates",
        options=options,
        head_layers=head_layers,
    )
    calibrated = calibrate_values(parts.scorer, *split_validation(val, options.seed), compute, gates=parts.gate_names)
    model = PSCRegressor(
        pipeline=calibrated.pipeline,
        backbone=parts.backbone,
        classes=train.classes,
        calibration=calibrated.calibration,
        policy=ValuePolicy(alpha=alpha, max_width=max_width, coverage=coverage),
        layers=tuple(candidate.layers),
        name=name,
        report=parts.report(candidate, projection, calibrated.metrics, provenance),
        target=train.target,
    )
    model.probe()  # As in loading: a model that cannot be loaded is not saved.
    return model


class CalibratedValues(NamedTuple):
    """A calibrated pipeline of a regression."""

    pipeline: Pipeline  # pixels to outputs
    calibration: ValueCalibration
    metrics: dict[str, Any]  # of the calibration split, JSON types


def calibrate_values(
    scorer: Scorer,
    selection: ImageDataset,
    calibration_split: ImageDataset,
    compute: Compute,
    *,
    gates: Sequence[str] = (),
) -> CalibratedValues:
    """What the gates need on ``selection``; OOD scores and residuals on ``calibration_split``.

    Raises:
        FitError: Scores that are not finite.
    """
    assert calibration_split.values is not None
    scored = score_dataset(scorer, calibration_split, compute, "calibration")[0].scores
    fitted_gates = None
    if gates:
        selected = score_dataset(scorer, selection, compute, "selection")[0].scores
        fitted_gates = fit_gates(gates, readings_of(gates, selected), readings_of(gates, scored))
    deviation = torch.hypot(scored["aleatoric"], scored["epistemic"])
    calibration = fit_value_calibration(
        ood_score_of(scored, fitted_gates), scored["mean"], deviation, calibration_split.values
    )
    metrics = calibration_metrics(scored["mean"], deviation, calibration_split.values)
    return CalibratedValues(Pipeline(scorer, calibration.ood_scores, fitted_gates), calibration, metrics)


def calibration_metrics(
    mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]
) -> dict[str, Any]:
    """Metrics of the calibration split, on which nothing that they measure was selected."""
    mean, deviation = mean.double(), deviation.double()
    return {
        "validation_images": len(values),
        "rmse": regression.rmse(mean, values),
        "r2": regression.r2(mean, values),
        "nll_nats": regression.nll(mean, deviation, values),
        "crps": regression.crps(mean, deviation, values),
    }
