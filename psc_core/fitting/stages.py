"""From a trained network to a PSC, stage by stage, with the names of the paper's pseudo-code.

    net        = load_network("torchvision:resnet18", weights="net.safetensors", num_classes=10)
    candidate  = measure_collapse(net, train, val).candidate()
    projection = fit_projection(net, candidate, train, method="tucker")
    psc        = fit_psc(net, candidate, projection, train, val, head="laplace")

Every stage splits the validation images alike (:func:`psc_core.data.dataset.split_validation`): the selection split
chooses the layer, the sizes, the prior precision and the temperature, the calibration split only calibrates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from psc_core.collapse.measure import measure_layers
from psc_core.collapse.report import Candidate, CollapseReport
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.data.targets import binned
from psc_core.density import DENSITIES
from psc_core.errors import UsageError
from psc_core.fitting.calibrate import OOD_SCORES, calibrate
from psc_core.fitting.checks import check_attainable_rates, check_classes
from psc_core.fitting.options import FitOptions
from psc_core.fitting.parts import FittedProjection, check_same_layers, fit_parts
from psc_core.fitting.positions import compare_positions, fewest_positions
from psc_core.fitting.scorer import cut
from psc_core.fitting.settings import FitSettings
from psc_core.gates.fit.made_up import is_ambiguous
from psc_core.heads import HEADS
from psc_core.model.predictor import PSC
from psc_core.policy import Policy
from psc_core.projection.fit.projection import fit_tucker
from psc_core.projection.fit.ranks import choose_ranks
from psc_core.projection.fit.report import ProjectionReport
from psc_core.rates import check_fraction

PREDICTIONS = ("psc", "base")
"""Whose probabilities a PSC gives: the head's, or the network's own."""


def measure_collapse(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    *,
    layers: str | None = None,
    granularity: str = FitSettings.granularity,
    options: FitOptions | None = None,
) -> CollapseReport:
    """NC1 on ``train`` and NC4 (R² of a regression) on the selection split of ``val``, after every layer.

    Example:
        >>> from functools import partial
        >>> from psc_core import PRESETS, open_dataset
        >>> open_split = partial(open_dataset, "mnist:tests/data", preprocess=PRESETS["mnist"])
        >>> train, val = open_split(split="train"), open_split(split="val")
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
        >>> [layer.name for layer in measure_collapse(net, train, val).layers]
        ['1', '3:input', '3']

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
    train, val = binned(train, val)
    check_classes(train, val)
    selection, _ = split_validation(val, options.seed)
    return measure_layers(
        net,
        train,
        selection,
        options.compute(),
        epsilon=options.epsilon,
        layers=layers,
        granularity=granularity,
        max_memory_bytes=options.max_memory_bytes,
        reducer=options.reducer,
        seed=options.seed,
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
    minimum_dim: int = FitSettings.minimum_dim,
    second_scaling: bool = True,
    density: str | None = None,
    options: FitOptions | None = None,
) -> FittedProjection:
    """Moments and Tucker factors on ``train``; sizes on the selection split of ``val`` (else on ``train``).

    The fewest components that keep NC1 and NC4, and, for a density that reads z, as many spatial ones as that needs
    (:mod:`psc_core.fitting.positions`).

    Example:
        >>> from psc_core import PRESETS, open_dataset
        >>> train = open_dataset("mnist:tests/data", split="train", preprocess=PRESETS["mnist"])
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)).eval()
        >>> fit_projection(net, Candidate(("0",), "by hand"), train, c_proj=4, d_proj=3).projection.config()
        {'method': 'tucker', 'positions': [169], 'channels': 8, 'c_proj': 4, 'd_proj': 3}

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
        density: Kind of the density that will be fitted, or None.
        options: Shared options.

    Raises:
        UsageError: An unknown method or density.
        FitError: Constant features, or sizes larger than the layer allows.
        NetworkError: The network cannot be cut.
    """
    if method != "tucker":
        raise UsageError(f"expected method 'tucker', got {method!r}")
    if density is not None and density not in DENSITIES:
        raise UsageError(f"expected density to be one of {', '.join(DENSITIES)}, got {density!r}")
    options = FitOptions.of(options, candidate)
    options.reducer.require(train)
    compute = options.compute()
    train, val = binned(train, val or train)[0], val and binned(train, val)[1]
    selection = train if val is None else split_validation(val, options.seed)[0]
    backbone = cut(net, candidate.layers, train, compute, keep_output=False)
    sized = fit_tucker(
        backbone,
        train,
        selection,
        compute,
        c_proj=c_proj,
        d_proj=d_proj,
        second_scaling=second_scaling,
        max_memory_bytes=options.max_memory_bytes,
        reducer=options.reducer,
    )
    choice = choose_ranks(
        sized.nc1,
        sized.nc4,
        epsilon=options.epsilon,
        reference_nc4=sized.scaled_nc4,
        c_proj=c_proj,
        d_proj=d_proj,
        minimum=minimum_dim,
    )
    compared: dict[int, float] = {}
    sizes = [choice]
    if d_proj is None:
        sizes = choice.with_more_positions(sized.nc1, sized.nc4, sized.deviation, epsilon=options.epsilon)
    if density is not None and DENSITIES[density].input_kind == "z" and len(sizes) > 1:
        compared = compare_positions(
            backbone,
            sized,
            [(size.c_proj, size.d_proj) for size in sizes],
            train,
            selection,
            compute,
            density=density,
            mixed=not (is_ambiguous(train) or is_ambiguous(selection)),
            seed=options.seed,
        )
        kept = options.reducer.first(fewest_positions(compared))
        choice = next(size for size in sizes if size.d_proj == kept)
    projection = sized.largest.leading(choice.c_proj, choice.d_proj).cpu()
    return FittedProjection(projection, ProjectionReport.of(choice, sized, compared), candidate.layers)


def fit_psc(
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    head: str = FitSettings.head,
    density: str = FitSettings.density,
    pca: int | None = None,
    predictions: str = FitSettings.predictions,
    alpha: float = FitSettings.alpha,
    coverage: float = FitSettings.coverage,
    risk: float = FitSettings.risk,
    ood_score: str = FitSettings.ood_score,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    options: FitOptions | None = None,
) -> PSC:
    """Density and head on z of ``train``, calibration on the calibration split of ``val``.

    Example:
        >>> from functools import partial
        >>> from psc_core import PRESETS, open_dataset
        >>> open_split = partial(open_dataset, "mnist:tests/data", preprocess=PRESETS["mnist"])
        >>> train, val = open_split(split="train"), open_split(split="val")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)).eval()
        >>> candidate = measure_collapse(net, train, val).candidate("0")
        >>> projection = fit_projection(net, candidate, train, val)
        >>> psc = fit_psc(net, candidate, projection, train, val, head="duq")
        >>> psc.predict(next(val.batches(3)).images).probabilities.shape
        torch.Size([3, 10])

    Args:
        net: Trained network, from :func:`psc_core.load_network`; the result of another ``nn.Module`` predicts, but
            cannot be saved, because a bundle names the function that builds its network.
        candidate: The layer(s) it is cut behind.
        projection: From :func:`fit_projection`.
        train: Training images.
        val: Validation images.
        head: ``"laplace"``, ``"sngp"`` or ``"duq"``.
        density: ``"gda"`` (the paper's), ``"tied"``, ``"gda++"``, ``"mahalanobis++"``, ``"pooled++"`` or ``"rmd"``.
        pca: Dimension the density works in, or None to choose it from the data.
        predictions: ``"psc"`` (the head) or ``"base"`` (the network's own output, unchanged).
        alpha: Default false-alarm rate.
        coverage: Nominal coverage of the prediction sets.
        risk: Error rate that images below the ambiguity threshold keep, with 95 % confidence.
        ood_score: One of :data:`OOD_SCORES`: ``"gates"`` (:mod:`psc_core.fitting.gates`), or the paper's ``"density"``.
        name: Model name.
        provenance: Recorded in the bundle.
        options: Shared options.

    Raises:
        UsageError: An unknown option, rates outside (0, 1) or that so few validation images cannot keep, or a
            projection of other layers or options of another seed or epsilon than the candidate's.
        DataError: Classes that differ or have too few images.
        FitError: Features or outputs that cannot be fitted; the message says why.
        NetworkError: The network cannot be cut.
    """
    options = FitOptions.of(options, candidate)
    check_same_layers(candidate, projection)
    for option, value, allowed in (
        ("predictions", predictions, PREDICTIONS), ("head", head, HEADS),
        ("density", density, DENSITIES), ("ood_score", ood_score, OOD_SCORES),
    ):  # fmt: skip
        if value not in allowed:
            raise UsageError(f"expected {option} to be one of {', '.join(allowed)}, got {value!r}")
    check_fraction(risk, "risk")
    if train.target is not None:
        raise UsageError(f"expected images with classes, {train.name} has numbers of {train.target}; use fit_regressor")
    check_classes(train, val)
    options.reducer.require(train)
    check_attainable_rates(val, alpha=alpha, coverage=coverage, options=options)
    base = predictions == "base"
    parts = fit_parts(
        net,
        candidate,
        projection,
        train,
        val,
        head=None if base else head,
        density=density,
        pca=pca,
        keep_output=base,
        with_gates=ood_score == "gates",
        options=options,
    )
    calibrated = calibrate(
        parts.scorer,
        *split_validation(val, options.seed),
        options.compute(),
        ood_score=ood_score,
        risk=risk,
        gates=parts.gate_names,
    )
    psc = PSC(
        pipeline=calibrated.pipeline,
        backbone=parts.backbone,
        classes=train.classes,
        calibration=calibrated.calibration,
        policy=Policy(alpha=alpha, ambiguity_threshold=calibrated.ambiguity_threshold, coverage=coverage),
        layers=tuple(candidate.layers),
        name=name,
        report=parts.report(candidate, projection, calibrated.metrics, provenance),
    )
    psc.probe()  # As in loading: a model that cannot be loaded is not saved.
    return psc
