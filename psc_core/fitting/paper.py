"""The stages of a fit under the names of the paper's pseudo-code.

    net        = load_network("torchvision:resnet18", weights="net.safetensors", num_classes=10)
    candidate  = measure_collapse(net, train, val).candidate()
    projection = fit_projection(net, candidate, train)
    psc        = fit_psc(net, candidate, projection, train, val, head="laplace")

The settings of :class:`psc_core.FitSettings` that a stage reads can be given by name, or all as ``settings``; the
defaults agree with how the candidate was chosen.  ``layer`` and ``task`` are settings of ``psc-fit`` alone: here the
candidate and the function decide them.  Each call checks and splits the images anew, in the same way for the same seed;
``psc-fit`` does that once and calls :mod:`.stages`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, cast

from torch import nn

from psc_core.collapse.report import Candidate, CollapseReport
from psc_core.compute.device import own_state
from psc_core.data.dataset import ImageDataset
from psc_core.data.loader_warnings import warn_of_repeated
from psc_core.data.overlap import check_disjoint
from psc_core.errors import UsageError
from psc_core.fitting import stages
from psc_core.fitting.calibrate import warn_of_policy
from psc_core.fitting.data import FitData
from psc_core.fitting.job import FitJob
from psc_core.model.base import FittedModel
from psc_core.model.classifier import PSC
from psc_core.model.regressor import PSCRegressor
from psc_core.network.output import check_images, trial_images
from psc_core.projection.fit.report import FittedProjection
from psc_core.settings import FitSettings, Stage, settings_where

LAST_STAGE: Final = "fit_psc or fit_regressor"

READ_BY_ONE: Final[Mapping[str, tuple[str, ...]]] = {
    "measure_collapse": settings_where(stage=Stage.COLLAPSE),
    "fit_projection": settings_where(stage=Stage.PROJECTION),
    LAST_STAGE: settings_where(stage=Stage.LAST),
}
"""The settings that one stage alone reads, by its function."""


@own_state()
def measure_collapse(
    net: nn.Module, train: ImageDataset, val: ImageDataset, *, settings: FitSettings | None = None, **changes: Any
) -> CollapseReport:
    """Measure NC1 on ``train`` and NC4 (for a regression R²) on the selection split of ``val``, after every layer.

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
        settings: The settings of all stages.
        changes: Settings by name, such as ``layers`` or ``granularity``.

    Raises:
        UsageError: If an option is unknown, ε is outside (0, 1), or a pattern matches no layer.
        DataError: If classes differ or have too few images.
        FitError: If features are not finite.
        NetworkError: If the network cannot be run or cut.
    """
    check_read("measure_collapse", changes)
    settings = (settings or FitSettings()).changed(changes)
    return stages.collapse(net, _job(net, _data(train, val, settings), settings))


@own_state()
def fit_projection(
    net: nn.Module,
    candidate: Candidate,
    train: ImageDataset,
    val: ImageDataset | None = None,
    *,
    settings: FitSettings | None = None,
    **changes: Any,
) -> FittedProjection:
    """Fit moments and Tucker factors to ``train``; the selection split of ``val``, or ``train``, chooses the sizes.

    Example:
        >>> from psc_core import PRESETS, open_dataset
        >>> train = open_dataset("mnist:tests/data", split="train", preprocess=PRESETS["mnist"])
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)).eval()
        >>> fit_projection(net, Candidate(("0",), "by hand"), train, c_proj=4, d_proj=3).projection.config()
        {'method': 'tucker', 'positions': [169], 'channels': 8, 'c_proj': 4, 'd_proj': 3}

    Args:
        net: Trained network in eval mode.
        candidate: The layer(s) that the network is cut behind.
        train: Training images.
        val: Validation images, or None to choose the sizes on all of ``train``.
        settings: Settings of all stages.
        changes: Settings by name, such as ``c_proj``, ``d_proj`` or ``minimum_dim``; also ``density``, the kind that
            will be fitted, because one that reads z needs more spatial components, and ``head_input``, because a head
            that reads z alone lacks what z gives up.

    Raises:
        UsageError: If the density is unknown, or the settings have another seed or epsilon than the candidate's.
        DataError: If classes differ or have too few images.
        FitError: If features are constant, or sizes are larger than the layer allows.
        NetworkError: If the network cannot be cut.
    """
    check_read("fit_projection", changes)
    settings = settings_for(candidate, settings, changes)
    if val is None:
        data = FitData.without_validation(train, seed=settings.seed, max_images=settings.max_images)
    else:
        data = _data(train, val, settings)
    return stages.project(net, candidate, _job(net, data, settings))


@own_state()
def fit_psc(  # noqa: PLR0913
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    settings: FitSettings | None = None,
    **changes: Any,
) -> PSC:
    """Fit density and head to z of ``train``, and calibrate them on the calibration split of ``val``.

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
        net: Trained network, from :func:`psc_core.load_network` or of your own; a bundle names the function that builds
            the former, and holds the latter as an ONNX graph, if it can be exported.
        candidate: The layer(s) it is cut behind.
        projection: From :func:`fit_projection`.
        train: Training images.
        val: Validation images, none of them trained on; a :class:`psc_core.errors.LoaderWarning` says where they were.
        name: Model name.
        provenance: The origin that a bundle records.
        settings: The settings of all stages.
        changes: Settings by name: ``head`` (``"laplace"``, ``"sngp"``, ``"duq"``), ``density`` (``"gda"``, the paper's,
            ``"tied"``, ``"gda++"``, ``"mahalanobis++"``, ``"pooled++"``, ``"rmd"``), ``predictions`` (``"psc"``, the
            head's, or ``"base"``, the network's own), ``alpha``, ``coverage``, ``risk``, ``ood_score`` (``"gates"`` or
            ``"density"``, the paper's), ``pca``, ``keep_examples`` (training images kept as thumbnails; none).

    Raises:
        UsageError: If an option is unknown, rates are outside (0, 1) or so few validation images cannot keep them,
            images have numbers, or the projection has other layers, or the settings another seed or epsilon, than the
            candidate.
        DataError: If classes differ or have too few images.
        FitError: If features or outputs cannot be fitted; the message says why.
        NetworkError: If the network cannot be cut.
    """
    check_read(LAST_STAGE, changes)
    settings = settings_for(candidate, settings, changes)
    fitted = _fit(PSC, net, candidate, projection, (train, val), settings, name=name, provenance=provenance)
    return cast(PSC, fitted)


@own_state()
def fit_regressor(  # noqa: PLR0913
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    settings: FitSettings | None = None,
    **changes: Any,
) -> PSCRegressor:
    """Fit a density of bins and a head to z of ``train``, and calibrate them on the calibration split of ``val``.

    Example:
        >>> from functools import partial
        >>> from psc_core import PRESETS, open_dataset
        >>> open_split = partial(open_dataset, "rotated-mnist:tests/data", preprocess=PRESETS["mnist"])
        >>> train, val = open_split(split="train"), open_split(split="val")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 1)).eval()
        >>> candidate = measure_collapse(net, train, val).candidate("0")
        >>> projection = fit_projection(net, candidate, train, val, c_proj=4, d_proj=4)
        >>> model = fit_regressor(net, candidate, projection, train, val, coverage=0.9)
        >>> model.target, model.predict(next(val.batches(3)).images).interval.shape
        (Target(name='angle', unit='degrees'), torch.Size([3, 2]))

    The arguments are those of :func:`fit_psc`, with a network of one output and images with numbers of one target.
    ``head`` is ``"blr"`` or ``"dve"``, and ``max_width`` the width of an interval above which an image is uncertain, in
    the target's unit.

    Raises:
        UsageError: If :func:`fit_psc` would raise it, or images have no numbers.
        DataError: If numbers are all equal, or of another target.
        FitError: If features or outputs cannot be fitted; the message says why.
        NetworkError: If the network cannot be cut.
    """
    check_read(LAST_STAGE, changes)
    settings = settings_for(candidate, settings, changes)
    fitted = _fit(PSCRegressor, net, candidate, projection, (train, val), settings, name=name, provenance=provenance)
    return cast(PSCRegressor, fitted)


def _fit(
    model_class: type[FittedModel],
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    images: tuple[ImageDataset, ImageDataset],
    settings: FitSettings,
    **recorded: Any,
) -> FittedModel:
    """Return a model of type ``model_class``, which knows its task."""
    data = _data(*images, settings, model_class.task_type.name)
    job = _job(net, data, stages.checked(settings, data))
    warn_of_repeated(images[1])
    model = stages.fit_model(net, candidate, projection, job, **recorded).model
    warn_of_policy(model.policy, model.report["metrics"])
    return model


def _data(train: ImageDataset, val: ImageDataset, settings: FitSettings, task: str | None = None) -> FitData:
    data = FitData.of(train, val, seed=settings.seed, task=task, max_images=settings.max_images)
    check_disjoint(train, val)
    return data


def _job(net: nn.Module, data: FitData, settings: FitSettings) -> FitJob:
    """Return the job of a stage, after a trial of the network."""
    job = FitJob.of(data, settings)
    device = job.compute.device
    check_images(net.to(device), trial_images(data.train.preprocess).to(device), name=type(net).__name__)
    return job


def check_read(stage: str, changes: Collection[str]) -> None:
    """Require that a stage reads the settings that it is given by name.

    Raises:
        UsageError: If only another one does, or ``layer`` is given, which the candidate says.
    """
    if "layer" in changes:
        raise UsageError("expected no layer: the candidate says it; name one as report.candidate(layer)")
    for other, names in READ_BY_ONE.items():
        unread = [name for name in changes if name in names]
        if unread and other != stage:
            raise UsageError(f"{stage} does not read {', '.join(unread)}, {other} does; leave out or give it there")


def settings_for(candidate: Candidate, settings: FitSettings | None, changes: dict[str, Any]) -> FitSettings:
    """Return ``settings`` with ``changes``, or defaults that agree with how a candidate was chosen.

    Raises:
        UsageError: If they have another seed, so that images of the calibration split chose the candidate, or another
            epsilon.
    """
    report = candidate.report
    chosen: dict[str, Any] = {} if report is None else {"epsilon": report.epsilon}
    if report is not None and report.seed is not None:
        chosen["seed"] = report.seed
    wanted = (settings or FitSettings(**chosen)).changed(changes)
    for name, value in chosen.items():
        if getattr(wanted, name) != value:
            raise UsageError(
                f"expected {name}={value!r}, with which {'+'.join(candidate.layers)} was chosen as the candidate, "
                f"got {getattr(wanted, name)!r}; use the same settings in every stage"
            )
    return wanted
