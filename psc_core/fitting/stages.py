"""From a trained network to a PSC, stage by stage, with the names of the paper's pseudo-code.

    net        = load_network("torchvision:resnet18", weights="net.safetensors", num_classes=10)
    candidate  = measure_collapse(net, train, val).candidate()
    projection = fit_projection(net, candidate, train, method="tucker")
    psc        = fit_psc(net, candidate, projection, train, val, head="laplace")

Every stage splits the validation images alike (:func:`psc_core.data.dataset.split_validation`): the selection split
chooses the layer, the sizes, the prior precision and the temperature, the calibration split only calibrates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from psc_core.calibration.fit import ambiguity_threshold, fit_calibration
from psc_core.collapse import measure as collapse
from psc_core.collapse.candidate import Candidate
from psc_core.collapse.report import CollapseReport
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.density import kind_of
from psc_core.density.fit.density import fit_density
from psc_core.errors import UsageError
from psc_core.fitting.checks import check_attainable_rates, check_classes, check_own_output
from psc_core.fitting.options import FitOptions
from psc_core.fitting.passes import embed, score_dataset
from psc_core.heads.fit.head import fit_head
from psc_core.metrics import classification
from psc_core.model.pipeline import Pipeline, Scored, Scorer, ood_score_of
from psc_core.model.predictor import PSC
from psc_core.network.backbone import Backbone, example_input, truncate
from psc_core.policy import Policy
from psc_core.projection.fit.projection import ProjectionReport, fit_tucker
from psc_core.projection.module import Projection

OOD_SCORES = ("density", "density+entropy")
"""What the OOD score, and with it the p-value, is made of."""

DEFAULT_MINIMUM_DIM = 64
"""Smallest dimension of z that is considered when sizes are chosen."""


def measure_collapse(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    *,
    layers: str | None = None,
    granularity: str = "operations",
    options: FitOptions | None = None,
) -> CollapseReport:
    """NC1 on ``train`` and NC4 on the selection split of ``val``, after every layer.

    Args:
        net: Trained network in eval mode.
        train: Training images.
        val: Validation images, none of them trained on.
        layers: Regular expression that layer names must match.
        granularity: ``"operations"``, ``"blocks"`` or ``"all"``.
        options: Shared options.

    Raises:
        UsageError: An unknown option, ε outside (0, 1), or a pattern that matches no layer.
        DataError: Classes that differ or have too few images.
        FitError: Features that are not finite.
        NetworkError: The network cannot be run or cut.
    """
    options = options or FitOptions()
    options.reducer.require(train)
    check_classes(train, val)
    selection, _ = split_validation(val, options.seed)
    compute = options.compute()
    return collapse.measure_collapse(
        net.to(compute.device),
        train,
        selection,
        epsilon=options.epsilon,
        layers=layers,
        granularity=granularity,
        max_memory_bytes=options.max_memory_bytes,
        device=compute.device,
        batch_images=compute.batch_images,
        reducer=options.reducer,
    )


def fit_projection(
    net: nn.Module,
    candidate: Candidate,
    train: ImageDataset,
    val: ImageDataset | None = None,
    *,
    method: str = "tucker",
    c_proj: int | None = None,
    d_proj: int | None = None,
    minimum_dim: int = DEFAULT_MINIMUM_DIM,
    second_scaling: bool = True,
    options: FitOptions | None = None,
) -> FittedProjection:
    """Moments and Tucker factors on ``train``; sizes on the selection split of ``val`` (else on ``train``).

    Args:
        net: Trained network in eval mode.
        candidate: The layer(s) it is cut behind.
        train: Training images.
        val: Validation images, or None to choose the sizes on ``train``.
        method: ``"tucker"``.
        c_proj: Channel components, or None to choose them.
        d_proj: Spatial components, or None to choose them.
        minimum_dim: Smallest c_proj · d_proj that is considered.
        second_scaling: Whether z is standardised.
        options: Shared options.

    Raises:
        UsageError: An unknown method.
        FitError: Constant features, or sizes larger than the layer allows.
    """
    if method != "tucker":
        raise UsageError(f"expected method 'tucker', got {method!r}")
    options = options or FitOptions()
    options.reducer.require(train)
    compute = options.compute()
    selection = train if val is None else split_validation(val, options.seed)[0]
    backbone = cut(net, candidate, train, compute, keep_output=False)
    return FittedProjection(
        *fit_tucker(
            backbone,
            train,
            selection,
            compute,
            epsilon=options.epsilon,
            c_proj=c_proj,
            d_proj=d_proj,
            minimum_dim=minimum_dim,
            second_scaling=second_scaling,
            max_memory_bytes=options.max_memory_bytes,
            reducer=options.reducer,
        )
    )


@dataclass(frozen=True)
class FittedProjection:
    """A projection and what choosing it measured."""

    projection: Projection
    report: ProjectionReport


def fit_psc(
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    head: str = "laplace",
    density: str = "pooled++",
    pca: int | None = None,
    predictions: str = "psc",
    alpha: float = 0.05,
    coverage: float = 0.95,
    risk: float = 0.05,
    ood_score: str = "density",
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    collapse_report: CollapseReport | None = None,
    options: FitOptions | None = None,
) -> PSC:
    """Density and head on z of ``train``, calibration on the calibration split of ``val``.

    Args:
        net: Trained network, from :func:`psc_core.load_network`; the result of another ``nn.Module`` predicts, but
            cannot be saved, because a bundle names the function that builds its network.
        candidate: The layer(s) it is cut behind.
        projection: From :func:`fit_projection`.
        train: Training images.
        val: Validation images.
        head: ``"laplace"``, ``"sngp"`` or ``"duq"``.
        density: ``"gda"`` (the paper's), ``"tied"``, ``"gda++"``, ``"pooled++"`` or ``"rmd"``.
        pca: Dimension the density works in, or None to choose it from the data.
        predictions: ``"psc"`` (the head) or ``"base"`` (the network's own output, unchanged).
        alpha: Default false-alarm rate.
        coverage: Nominal coverage of the prediction sets.
        risk: Error rate that images below the ambiguity threshold should have.
        ood_score: One of :data:`OOD_SCORES`: ``"density"`` (−log p(z), the paper's), or ``"density+entropy"``, which
            adds the predictive entropy, both measured in their standard deviations over the selection split of ``val``.
        name: Model name.
        provenance: Recorded in the bundle.
        collapse_report: Recorded in the bundle.
        options: Shared options.

    Raises:
        UsageError: An unknown option, or promises that so few validation images cannot keep.
        DataError: Classes that differ or have too few images.
        FitError: Features or outputs that cannot be fitted; the message says why.
    """
    options = options or FitOptions()
    if predictions not in ("psc", "base"):
        raise UsageError(f"expected predictions 'psc' or 'base', got {predictions!r}")
    if ood_score not in OOD_SCORES:
        raise UsageError(f"expected ood_score to be one of {', '.join(OOD_SCORES)}, got {ood_score!r}")
    check_classes(train, val)
    options.reducer.require(train)
    compute = options.compute()
    check_attainable_rates(val, alpha=alpha, coverage=coverage, options=options)
    selection, calibration_split = split_validation(val, options.seed)
    base = predictions == "base"
    backbone = cut(net, candidate, train, compute, keep_output=base)
    if base:
        check_own_output(backbone, train, compute)
    project = projection.projection.to(compute.device)
    with tempfile.TemporaryDirectory(prefix="psc-fit-") as scratch:
        file, pooled = Path(scratch) / "train", kind_of(density).reads == "pooled"
        embedded = embed(backbone, project, train, compute, file, options.reducer, pooled=pooled)
        fitted_density = fit_density(
            embedded.read,
            embedded.labels,
            num_classes=len(train.classes),
            kind=density,
            pca=pca,
            class_names=train.classes,
        )
        fitted_head = None
        if not base:
            selected = embed(backbone, project, selection, compute, Path(scratch) / "val", options.reducer)
            fitted_head = fit_head(
                embedded.z,
                embedded.labels,
                selected.z[:],
                selected.labels,
                num_classes=len(train.classes),
                kind=head,
                seed=options.seed,
                device=compute.device,
                class_names=train.classes,
            ).to(compute.device)
    scorer = Scorer(
        train.preprocess,
        backbone.fused(compute.precision),
        project,
        fitted_density.to(compute.device),
        fitted_head,
        compute.precision,
    )
    weight = 0.0
    if ood_score == "density+entropy":
        weight = entropy_weight(score_dataset(scorer, selection, compute, "validation")[0].scores)
    scored, labels = score_dataset(scorer, calibration_split, compute, "calibration")
    entropies = scored.scores["predictive_entropy"]
    calibration = fit_calibration(ood_score_of(scored.scores, weight), entropies, scored.probabilities, labels)
    correct = scored.probabilities.argmax(1) == labels
    threshold = ambiguity_threshold(entropies, correct, risk=risk)
    report = {
        "collapse": None if collapse_report is None else collapse_report.to_json(),
        "metrics": {**validation_metrics(scored, labels), "projection": projection_metrics(projection.report)},
        "provenance": dict(provenance or {}),
    }
    psc = PSC(
        pipeline=Pipeline(scorer, calibration.scores, weight),
        backbone=backbone,
        preprocess=train.preprocess,
        classes=train.classes,
        calibration=calibration,
        policy=Policy(alpha=alpha, ambiguity_threshold=threshold, coverage=coverage),
        layers=tuple(candidate.layers),
        name=name,
        report=report,
    )
    psc.probe()  # As in loading: a model that cannot be loaded is not saved.
    return psc


def cut(net: nn.Module, candidate: Candidate, data: ImageDataset, compute: Compute, *, keep_output: bool) -> Backbone:
    """``net`` cut behind the candidate layer(s), on the device, checked on one input."""
    example = example_input(data.preprocess).to(compute.device)
    return truncate(net.to(compute.device), candidate.layers, keep_output=keep_output, example=example)


def entropy_weight(scores: Mapping[str, Tensor]) -> float:
    """Standard deviation of the log density ÷ that of the predictive entropy; 0 where the entropy never varies."""
    density, uncertainty = (float(scores[name].double().std()) for name in ("log_density", "predictive_entropy"))
    return density / uncertainty if uncertainty > 0 else 0.0


def validation_metrics(scored: Scored, labels: Tensor) -> dict[str, Any]:
    """Metrics of the calibration split, on which nothing that they measure was chosen."""
    probabilities = scored.probabilities.double()
    confidence, predicted = probabilities.max(1)
    return {
        "validation_images": len(labels),
        "accuracy": classification.accuracy(probabilities, labels),
        "nll_nats": classification.nll(probabilities, labels),
        "ece": classification.ece(confidence, predicted == labels),
        "mean_entropy_nats": float(scored.scores["predictive_entropy"].double().mean()),
    }


def projection_metrics(report: ProjectionReport) -> dict[str, Any]:
    """What a bundle records of its projection."""
    choice = report.choice
    return {
        "nc1": choice.nc1,
        "nc4": choice.nc4,
        "scaled_nc1": report.scaled_nc1,
        "scaled_nc4": report.scaled_nc4,
        "warning": choice.warning,
        "pooled": report.pooled,
    }
