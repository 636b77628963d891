"""From a trained network to a PSC, stage by stage, with the names of the paper's pseudo-code.

    net        = load_network("torchvision:resnet18", weights="net.safetensors", num_classes=10)
    candidate  = measure_collapse(net, train, val).candidate()
    projection = fit_projection(net, candidate, train, method="tucker")
    psc        = fit_psc(net, candidate, projection, train, val, head="laplace")

The validation images are split once (:func:`psc_core.data.splits.split_validation`, same seed at every stage):
one half chooses the layer, the sizes, the prior precision and the temperature, the other half only calibrates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from psc_core.calibration.conformal import Calibration
from psc_core.calibration.fit import ambiguity_threshold, fit_calibration
from psc_core.collapse import measure as collapse
from psc_core.collapse.candidate import EPSILON, Candidate
from psc_core.collapse.report import CollapseReport
from psc_core.compute.device import resolve_device
from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute, passes, track_images
from psc_core.data.dataset import ImageDataset, stable_order
from psc_core.data.splits import split_validation
from psc_core.density import kind_of
from psc_core.density.fit.density import fit_density
from psc_core.errors import DataError, UsageError
from psc_core.heads.fit.head import fit_head
from psc_core.metrics import classification
from psc_core.model.outputs import Outputs
from psc_core.model.pipeline import PRECISIONS, Pipeline, pool
from psc_core.model.predictor import PSC
from psc_core.network.backbone import Backbone, example_input, feature_step, truncate
from psc_core.numerics.matrix import FeatureFile, FeatureMatrix, blocks
from psc_core.policy import Policy
from psc_core.projection.fit.projection import ProjectionReport, fit_tucker
from psc_core.projection.module import Projection

OOD_SCORES = ("density", "density+entropy")
"""What the OOD score, and with it the p-value, is made of."""

DEFAULT_MINIMUM_DIM = 64
"""Smallest dimension of z that is considered when sizes are chosen."""


@dataclass(frozen=True)
class FitOptions:
    """Options that several stages share.

    Attributes:
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: ``"fp32"`` or ``"bf16"`` of the network, at fit time and served.
        batch_images: Images sent through the network at once, at most; a CPU takes fewer.
        epsilon: Collapse cut-off (NC1).
        max_memory_bytes: Budget of one stage's statistics.
        seed: Splits the validation images and seeds the head.
        reducer: Sums over processes.
    """

    device: str | torch.device = "auto"
    precision: str = "fp32"
    batch_images: int = 256
    epsilon: float = EPSILON
    max_memory_bytes: int = collapse.DEFAULT_MEMORY_BYTES
    seed: int = 0
    reducer: Reducer = field(default_factory=Reducer)

    def compute(self) -> Compute:
        """Device, precision and batch size, checked."""
        if self.precision not in PRECISIONS:
            raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {self.precision!r}")
        return Compute(resolve_device(self.device), self.precision, self.batch_images)


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
    _check_classes(train, val)
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
    backbone = _cut(net, candidate, train, compute, keep_output=False)
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
    _check_classes(train, val)
    options.reducer.require(train)
    compute = options.compute()
    check_attainable_rates(val, alpha=alpha, coverage=coverage, options=options)
    selection, calibration_split = split_validation(val, options.seed)
    base = predictions == "base"
    backbone = _cut(net, candidate, train, compute, keep_output=base)
    if base:
        _check_own_output(backbone, train, compute)
    project = projection.projection.to(compute.device)
    with tempfile.TemporaryDirectory(prefix="psc-fit-") as scratch:
        file, pooled = Path(scratch) / "train", kind_of(density).reads == "pooled"
        z, read, labels = embed(backbone, project, train, compute, file, options.reducer, pooled=pooled)
        fitted_density = fit_density(
            read, labels, num_classes=len(train.classes), kind=density, pca=pca, class_names=train.classes
        )
        fitted_head = None
        if not base:
            z_val, _, val_labels = embed(backbone, project, selection, compute, Path(scratch) / "val", options.reducer)
            fitted_head = fit_head(
                z,
                labels,
                z_val[:],
                val_labels,
                num_classes=len(train.classes),
                kind=head,
                seed=options.seed,
                device=compute.device,
                class_names=train.classes,
            )
        del z, read  # Their file goes with the folder.
    uncalibrated = Pipeline(
        train.preprocess, backbone, project, fitted_density, fitted_head, torch.empty(0), compute.precision
    ).to(compute.device)
    weight = 0.0
    if ood_score == "density+entropy":
        weight = entropy_weight(predict_dataset(uncalibrated, selection, compute, "validation")[0])
        uncalibrated = uncalibrated.calibrated(torch.empty(0), entropy_weight=weight)
    outputs, targets = predict_dataset(uncalibrated, calibration_split, compute, "calibration")
    calibration = fit_calibration(outputs["ood_score"], outputs["predictive_entropy"], outputs.probabilities, targets)
    pipeline = uncalibrated.calibrated(calibration.scores, entropy_weight=weight)
    right = outputs.probabilities.argmax(1) == targets
    ambiguous = ambiguity_threshold(outputs["predictive_entropy"], right, risk=risk)
    policy = Policy(alpha=alpha, ambiguity_threshold=ambiguous, coverage=coverage)
    report = {
        "collapse": None if collapse_report is None else collapse_report.to_json(),
        "metrics": {
            **_validation_metrics(outputs, targets),
            "projection": _projection_metrics(projection.report),
        },
        "provenance": dict(provenance or {}),
    }
    psc = PSC(pipeline, train.preprocess, train.classes, calibration, policy, tuple(candidate.layers), name, report)
    psc.probe()  # As every reader does: better refused now than after it was saved.
    return psc


def _check_own_output(backbone: Backbone, train: ImageDataset, compute: Compute) -> None:
    """Refuse a network whose own output cannot be served as probabilities of the classes."""
    with torch.inference_mode():
        logits = backbone(example_input(train.preprocess).to(compute.device))[1]
    if logits is None or logits.shape[1] != len(train.classes):
        got = None if logits is None else logits.shape[1]
        raise UsageError(f"expected a network of {len(train.classes)} outputs to serve its own, got {got}")


def entropy_weight(outputs: Outputs[Tensor]) -> float:
    """Standard deviation of the log density ÷ that of the predictive entropy; 0 where the entropy never varies."""
    density, uncertainty = (
        float(part.double().std()) for part in (outputs["log_density"], outputs["predictive_entropy"])
    )
    return density / uncertainty if uncertainty > 0 else 0.0


def check_attainable_rates(val: ImageDataset, *, alpha: float, coverage: float, options: FitOptions) -> None:
    """Refuse rates that the calibration split of ``val`` is too small for; only its size matters.

    Raises:
        UsageError: ``alpha`` below 1/(n + 1) or ``coverage`` above n/(n + 1).
    """
    _, calibrate = split_validation(val, options.seed)
    blank = torch.zeros(len(calibrate))
    calibration = Calibration(blank, blank, blank, blank.long(), len(val.classes))
    try:
        calibration.ood_score_threshold(alpha)
        calibration.set_thresholds(coverage)
    except UsageError as error:
        raise UsageError(f"{error} (half of the {len(val)} validation images calibrate)") from error


def embed(
    backbone: Backbone,
    projection: Projection,
    dataset: ImageDataset,
    compute: Compute,
    file: Path,
    reducer: Reducer,
    *,
    pooled: bool = False,
) -> tuple[FeatureMatrix, FeatureMatrix, Tensor]:
    """z of every row; what the density reads, its pooled features if ``pooled``, else z again; and the labels.

    They are kept in ``file``, so that memory does not grow with the images, and class by class, so that what reads
    a class reads on in the file.
    """
    dim = projection.c_proj * projection.d_proj
    step = feature_step(backbone, compute.precision)
    channels = _channels(backbone, dataset, compute) if pooled else 0
    kept = FeatureFile(file, (dataset.examples, dim + channels))
    where = torch.empty_like(dataset.labels)
    where[stable_order(dataset.labels)] = torch.arange(len(where))
    if reducer.world > 1:
        where = where[reducer.shard_examples(dataset)]
    at = 0
    for features, batch in passes(reducer.shard(dataset), compute, "features", step):
        read = [projection(features), *([pool(features)] if pooled else [])]
        values = batch.per_example(torch.cat(read, dim=1)).cpu()
        kept.write(where[at : at + len(values)], values)
        at += len(values)
    if reducer.world > 1:
        for chunk, block in blocks(kept):
            kept.write(chunk, reducer.sum_(block))
    del where
    counts = dataset.labels.bincount(minlength=len(dataset.classes))
    labels = torch.arange(len(counts)).repeat_interleave(counts)
    if not pooled:
        return kept, kept, labels
    return (
        kept.map(lambda part: part[:, :dim], dim, kept.dtype),
        kept.map(lambda part: part[:, dim:], channels, kept.dtype),
        labels,
    )


@torch.inference_mode()
def _channels(backbone: Backbone, dataset: ImageDataset, compute: Compute) -> int:
    """Width of the pooled features."""
    return pool(backbone(example_input(dataset.preprocess).to(compute.device))[0]).shape[1]


def predict_dataset(
    pipeline: Pipeline, dataset: ImageDataset, compute: Compute, description: str
) -> tuple[Outputs[Tensor], Tensor]:
    """Outputs of the served pipeline for every image, on the CPU, and one label an image."""
    packed = []
    with torch.inference_mode():
        for batch in track_images(dataset, compute, description):
            packed.append(pipeline(batch.images.to(compute.device)).cpu())
    return Outputs(torch.cat(packed)), dataset.first_labels()


def _cut(net: nn.Module, candidate: Candidate, data: ImageDataset, compute: Compute, *, keep_output: bool) -> Backbone:
    """``net`` cut behind the candidate layer(s), on the device, checked on one input."""
    example = example_input(data.preprocess).to(compute.device)
    return truncate(net.to(compute.device), candidate.layers, keep_output=keep_output, example=example)


def _check_classes(train: ImageDataset, val: ImageDataset) -> None:
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise DataError(
            f"expected the same class folders for training and validation, they differ in {odd[:10]}; "
            "make the folders match (one without images is enough for a class that validation lacks)"
        )
    if len(train.classes) < 2:
        raise DataError(f"expected at least two classes, got {list(train.classes)}; give a folder for each class")
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    if counts.min() < 2:
        few = train.classes[int(counts.argmin())]
        raise DataError(f"expected at least two training images of each class, got {int(counts.min())} of {few!r}")


def _validation_metrics(outputs: Outputs[Tensor], targets: Tensor) -> dict[str, Any]:
    """Of the calibration split, on which nothing that they measure was chosen."""
    probabilities = outputs.probabilities.double()
    confidence, predicted = probabilities.max(1)
    return {
        "validation_images": len(targets),
        "accuracy": classification.accuracy(probabilities, targets),
        "nll_nats": classification.nll(probabilities, targets),
        "ece": classification.ece(confidence, predicted == targets),
        "mean_entropy_nats": float(outputs["predictive_entropy"].double().mean()),
    }


def _projection_metrics(report: ProjectionReport) -> dict[str, Any]:
    choice = report.choice
    return {
        "nc1": choice.nc1,
        "nc4": choice.nc4,
        "scaled_nc1": report.scaled_nc1,
        "scaled_nc4": report.scaled_nc4,
        "warning": choice.warning,
        "pooled": report.pooled,
    }
