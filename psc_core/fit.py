"""Fit a model to a trained network, in three stages.

    :func:`collapse`    network, images                      → :class:`.CollapseReport`, which names the chosen layer
    :func:`project`     network, chosen, images              → :class:`.FittedProjection`, its features to z (B, D)
    :func:`fit_model`   network, chosen, projection, images  → :class:`.FittedModel`, calibrated

Training images fit, the selection split chooses, and the calibration split only calibrates (:class:`.FitData`).
:func:`fit` takes all stages for ``PSC.fit``, and :func:`calibrate_on` is ``calibrate`` of a fitted model; a model that
only predicts never imports this file.  Last come the stages under the names of the paper's pseudo-code:

    net        = load_network("torchvision:resnet18", weights="net.safetensors", num_classes=10)
    chosen     = measure_collapse(net, train, val).choose()
    projection = fit_projection(net, chosen, train)
    psc        = fit_psc(net, chosen, projection, train, val, head="laplace")

Each of these checks and splits the images anew, alike for the same seed.  Settings are given by name, or all as
``settings``, but for ``layer`` and ``task``, which the chosen layer and the function decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Unpack, cast

from torch import Tensor, nn

from psc_core import __version__
from psc_core.calibrate import (
    CHOOSES,
    FEWEST_TO_CHOOSE,
    add_class,
    calibrate_again,
    calibrate_scorer,
    draw_quarter,
    learn,
    makes_mixed,
    settings_of,
    trial_of,
    warn_of_policy,
    with_class,
)
from psc_core.checks import REVIEWED
from psc_core.collapse import ChosenLayer, CollapseReport, check_named, measure_layers, to_text
from psc_core.compute import FIT_STEPS, begin, own_state, steps
from psc_core.data import MAX_BAD_IMAGES
from psc_core.data.cache import Scratch, check_disjoint, warn_of_repeated
from psc_core.data.dataset import ImageDataset
from psc_core.data.loaders import LoaderDescription, check_apart, read_loader, warn_of_uncompared
from psc_core.data.open import in_network_order
from psc_core.density import DENSITIES
from psc_core.errors import NetworkError, UsageError, warn
from psc_core.features import KeptFeatures
from psc_core.fit_data import Checkpoint, FitData, FitJob
from psc_core.fit_parts import FittedParts, compare_positions, cut, fewest_positions, fit_parts, report_of
from psc_core.images.preprocess import MAKE_KNOWN
from psc_core.log.labels import NONE_OF_THE_CLASSES
from psc_core.model import PSC, AnyModel, FittedModel, PSCRegressor, model_class_of
from psc_core.network.cut import device_of, readable_copy
from psc_core.network.described import classes_of
from psc_core.network.export import check_exportable
from psc_core.network.load import spec_of
from psc_core.network.output import OtherOutputs, check_images, check_output, trial_images
from psc_core.pipeline import Pipeline
from psc_core.projection import FittedProjection, fit_tucker
from psc_core.scoring import check_read_by
from psc_core.settings import FitOptions, FitSettings, Stage, settings_where
from psc_core.tasks import task_named


@own_state()
def collapse(net: nn.Module, job: FitJob, kept: KeptFeatures | None = None) -> CollapseReport:
    """Measure NC1 on the training images and NC4 (for a regression R²) on the selection split, after every layer."""
    begin("layers")
    data, compute = job.data, job.compute
    compute.require(data.train)
    return measure_layers(net, data.train, data.selection, job.settings, compute, data.task_type.layer_quality, kept)


@own_state()
def project(net: nn.Module, chosen: ChosenLayer, job: FitJob, kept: KeptFeatures | None = None) -> FittedProjection:
    """Fit moments and Tucker factors to the training images, and choose the sizes on the selection split.

    The sizes are the smallest that keep NC1 and NC4; for a density that reads z, with as many spatial components as
    that needs (:mod:`psc_core.fit_parts`).
    """
    begin("projection")
    data, settings, compute = job.data, job.settings, job.compute
    reads_z = DENSITIES[settings.density].reads == "z"
    compute.require(data.train)
    backbone = cut(net, chosen.layers, data.train, compute, keep_output=False)
    largest, report, deviation = fit_tucker(backbone, data.train, data.selection, settings, compute, kept)
    sizes = report.more_positions(deviation, settings.epsilon) if settings.d_proj is None else [report.d_proj]
    if reads_z and len(sizes) > 1:
        compared = compare_positions(backbone, largest, [(report.c_proj, d_proj) for d_proj in sizes], job)
        d_proj = compute.first(fewest_positions(compared))
        report = replace(report, d_proj=d_proj, positions=tuple(compared.items()))
    if data.task_type.averages_layer(settings) and not reads_z:
        report = replace(report, warning="")  # Head and density read besides z, or instead of it, what z gives up.
    return FittedProjection(largest.leading(report.c_proj, report.d_proj).cpu(), report, chosen.layers)


@own_state()
def fit_model(
    net: nn.Module,
    chosen: ChosenLayer,
    projection: FittedProjection,
    job: FitJob,
) -> tuple[FittedModel, FittedParts]:
    """Fit density, head and checks to the training images, and calibrate them on the calibration split."""
    if projection.layers != chosen.layers:
        raise UsageError(
            f"expected a projection of {'+'.join(chosen.layers)}, got one of "
            f"{'+'.join(projection.layers)}; fit the projection for this layer"
        )
    data = job.data
    job.compute.require(data.train)
    parts = fit_parts(net, chosen, projection, job)
    pipeline, calibrated = calibrate_scorer(parts.scorer, job, parts.checks, parts.map, parts.stored_images)
    model = model_class_of(data.task)(
        task=data.task,
        pipeline=pipeline,
        backbone=parts.backbone,
        classes=data.train.classes,
        calibration=calibrated.calibration,
        policy=calibrated.policy,
        layers=tuple(chosen.layers),
        name=job.name,
        report=report_of(chosen, projection, parts, calibrated.metrics, job.provenance),
        trial=trial_of(data.calibration),
    )
    model.probe()  # As in loading: a model that cannot be loaded is not saved.
    return model, parts


class Stages(NamedTuple):
    """What the stages of a fit found."""

    collapse: CollapseReport
    projection: FittedProjection
    model: FittedModel
    parts: FittedParts


def fit_stages(net: nn.Module, job: FitJob, checkpoint: Checkpoint | None = None) -> Stages:
    """Fit stage by stage, except for those in the checkpoint."""
    layer = job.settings.layer
    report = None if checkpoint is None else checkpoint.load_collapse()
    compute, kept = job.compute, None
    if compute.precision == "fp32":  # Layers are measured in float32, whatever the precision of what follows.
        kept = KeptFeatures(len(compute.shard(job.data.train)), compute.max_memory, compute.device)
    if report is None:
        report = collapse(net, job, kept)
        if checkpoint is not None:
            checkpoint.save_collapse(report)
    chosen = report.choose(None if layer == "auto" else layer)
    job.say(f"chosen layer: {'+'.join(chosen.layers)} ({len(report.layers)} measured)", to_text(report, chosen))
    projection = None if checkpoint is None else checkpoint.load_projection()
    if projection is None:
        projection = project(net, chosen, job, kept)
        if checkpoint is not None:
            checkpoint.save_projection(projection)
    del kept
    job.say("", projection.report.summary(report.nc4_of(chosen)))
    return Stages(report, projection, *fit_model(net, chosen, projection, job))


RMSE_RISE: Final = 1.25  # times the network's own on other images, which chance hardly explains


@own_state()
def fit(
    task: str,
    net: nn.Module,
    loaders: tuple[Any, Any],  # of training and of validation images; an ImageDataset is taken as it is
    description: LoaderDescription,
    name: str,
    settings: Mapping[str, Any],  # without a device it is the network's
) -> FittedModel:
    """Fit all stages to a copy of ``net``; mode, device and gradients of ``net`` itself stay as they are."""
    net = readable_copy(net)
    chosen = FitSettings(device=device_of(net)).changed(settings)
    compute = chosen.compute()
    check_apart(*loaders)
    train = open_images(loaders[0], "the training data", description)
    if train is loaders[0]:
        check_undescribed(train, description)
    elif description.classes is None:
        train = _named_by(net, train)
    warn_of_uncompared(loaders[0], train)
    train = _in_order_of(net, train, are_given=description.classes is not None)
    of_task = task_named(task)
    predicts = of_task.takes(train)
    if predicts:  # Before hours are spent on reading the others; otherwise the error comes below.
        images = trial_images(train.preprocess).to(compute.device)
        outputs = of_task.of_images(train).network_outputs(train.classes)
        try:
            check_output(net.to(compute.device), images[:1], outputs, name=type(net).__name__)
        except OtherOutputs as error:
            if description.classes is None or chosen.predictions == "original":
                raise
            predicts = False
            if chosen.predictions == "auto":
                warn(f"the head will predict, the original network cannot: {error}")
        check_images(net, images, name=type(net).__name__)
        check_named(net, images[:1], chosen)
        if train.preprocess.is_known and spec_of(net) is None:
            _warn_of_no_export(net, images[:1], chosen.precision)
    as_train = LoaderDescription(train.preprocess, classes=train.classes, target=train.target)
    val = open_images(loaders[1], "the validation data", as_train)
    check_disjoint(train, val)
    job = FitJob.of(train, val, chosen, task=task)
    if not train.preprocess.is_known:
        warn(f"the fitted model predicts tensors, but cannot be saved: {MAKE_KNOWN}")
    provenance = {"psc_version": __version__, "settings": job.settings.recorded()}
    job, notes = replace(job, name=name, provenance=provenance, cache=Scratch()).decode(MAX_BAD_IMAGES)
    if notes:
        warn("; ".join(notes))
    first = job.first_evaluation(net.to(compute.device)) if predicts else None
    if first and first.warning:
        warn(first.warning)
    with steps(FIT_STEPS[1:-1]):
        model = fit_stages(net, job).model
    measured = model.report["metrics"]
    warn_of_policy(model.policy, measured)
    if first and first.rmse is not None and measured["rmse"] > RMSE_RISE * first.rmse:
        warn(
            f"the head's RMSE is {measured['rmse']:.4g} on the images that calibrate, the network's own was "
            f"{first.rmse:.4g} on validation images; predictions='original' keeps the network's"
        )
    return model


@own_state()
def calibrate_on(model: FittedModel, loader: Any, **changes: Any) -> FittedModel:
    """Return ``model`` calibrated on other images, see :meth:`.FittedModel.calibrate`."""
    return _calibrated(model, model.pipeline, _calibration_images(model, loader), changes)


@own_state()
def learn_from(model: FittedModel, unknown: Any, loader: Any, **changes: Any) -> FittedModel:
    """Return ``model`` with the check ``reviewed``, calibrated on other images, see :meth:`.FittedModel.learn`."""
    chosen, rest, settings = _quarter(model, loader, changes)
    images = open_images(unknown, "the unknown images", LoaderDescription(model.preprocess))
    check_read_by(model, images)
    others = tuple(name for name in images.classes if name != NONE_OF_THE_CLASSES)
    named = replace(images, classes=(*images.classes, *{NONE_OF_THE_CLASSES} - {*images.classes}))
    named = named.in_order((NONE_OF_THE_CLASSES, *others))
    learnt = learn(model.pipeline, named, (), chosen, settings.compute(), mixed=makes_mixed(model))
    if text := learnt.warning():
        warn(text)
    return _calibrated(model, learnt.pipeline, rest, changes, {REVIEWED: learnt.to_json()})


@own_state()
def add_class_from(model: FittedModel, name: str, images: Any, loader: Any, **changes: Any) -> FittedModel:
    """Return ``model`` with one more class, calibrated on other images, see :meth:`.PSC.add_class`."""
    wide = with_class(model, name)
    chosen, rest, settings = _quarter(wide, _with_empty_classes(model, loader), changes)
    new = open_images(images, "the images of the class", LoaderDescription(model.preprocess))
    check_read_by(model, new)
    real = chosen.subset((chosen.first_labels() < len(model.classes)).nonzero()[:, 0])
    if len(real) < FEWEST_TO_CHOOSE:
        raise UsageError(
            f"a quarter of the images measures what {wide.classes[-1]} takes from the classes before it, and at least "
            f"{FEWEST_TO_CHOOSE} of them must be of these, not {len(real)}; give more than "
            f"{round(FEWEST_TO_CHOOSE / CHOOSES)} images of the classes before it"
        )
    added = add_class(model, wide.classes[-1], new, real, settings.compute())
    if added.forgets:
        warn(added.text(learns=False))
    return _calibrated(wide, added.pipeline, rest, changes, {"added_class": added.to_json()})


def _quarter(
    model: FittedModel, loader: Any, changes: Mapping[str, Any]
) -> tuple[ImageDataset, ImageDataset, FitSettings]:
    """Return a random quarter of images of the classes, which calibrates nothing, the rest, and the settings."""
    data, settings = _calibration_images(model, loader), settings_of(model, changes)
    chosen, rest = map(data.subset, draw_quarter(len(data), settings.seed))
    if len(chosen) < FEWEST_TO_CHOOSE:
        raise UsageError(
            f"a quarter of the {len(data)} images of the classes measures what changes, and calibrates nothing; give "
            f"at least {round(FEWEST_TO_CHOOSE / CHOOSES)}"
        )
    return chosen, rest, settings


def _with_empty_classes(model: FittedModel, loader: Any) -> Any:
    """Return images, of which a data set of the network's classes may have none of those that were added."""
    if isinstance(loader, ImageDataset) and {*model.network_classes} <= {*loader.classes}:
        return replace(loader, names_empty_classes=False)
    return loader


def _calibration_images(model: FittedModel, loader: Any) -> ImageDataset:
    as_fitted = LoaderDescription(model.preprocess, classes=model.classes, target=model.task.number())
    loader = _with_empty_classes(model, loader)
    data = open_images(loader, "the calibration data", as_fitted).in_order(model.classes)
    warn_of_uncompared(loader, data)
    check_read_by(model, data)
    model.task.check_images(model.classes, data)
    warn_of_repeated(data)
    return data


def _calibrated(
    model: FittedModel,
    pipeline: Pipeline,
    data: ImageDataset,
    changes: Mapping[str, Any],
    entry: Mapping[str, Any] = MappingProxyType({}),
) -> FittedModel:
    count = len(data)
    numbers = {"labels": count, "calibrated_on": count, "effective_sample_size": count, "sha256": data.digest()}
    found, metrics = calibrate_again(model, pipeline, data, changes, {**numbers, **entry})
    warn_of_policy(found.policy, metrics)
    return found


def _named_by(net: nn.Module, train: ImageDataset) -> ImageDataset:
    """Return images whose classes nobody named, "0", "1", …, with the names that the network has."""
    names = classes_of(net) or ()
    is_unnamed = train.classes == tuple(map(str, range(len(names))))
    return replace(train, classes=names) if is_unnamed and len({*names}) == len(names) else train


def _in_order_of(net: nn.Module, train: ImageDataset, *, are_given: bool) -> ImageDataset:
    """Return images whose classes are in the order of the outputs, where the network names them.

    Names that the caller gave may be other words for the network's.
    """
    names = classes_of(net) or ()
    if len({*names}) != len(train.classes) or (are_given and {*names} != {*train.classes}):
        return train
    train, note = in_network_order(train, names)
    if note:
        warn(note)
    return train


def _warn_of_no_export(net: nn.Module, trial: Tensor, precision: str) -> None:
    """Warn where the model could not be saved; it can predict all the same."""
    try:
        check_exportable(net, trial, precision)
    except NetworkError as error:
        warn(
            f"the fitted model predicts, but cannot be saved: {error}; a network that a function builds can, as "
            'net = load_network("package.module:function", weights="net.pth", num_classes=…)'
        )


def open_images(loader: Any, name: str, description: LoaderDescription) -> ImageDataset:
    """Return the images of a loader as a data set; a data set is returned as it is."""
    return loader if isinstance(loader, ImageDataset) else read_loader(loader, name, description)


def check_undescribed(data: ImageDataset, description: LoaderDescription) -> None:
    """Require that a caller says nothing of a data set, which says it itself."""
    if given := description.given():
        raise UsageError(
            f"{data.name} is a data set, which says itself how its images are read and what their labels mean; leave "
            f"out {', '.join(given)}, or give them where the data set is opened"
        )


LAST_STAGE: Final = "fit_psc or fit_regressor"

# The settings that one stage alone reads, by its function.
READ_BY_ONE: Final[Mapping[str, tuple[str, ...]]] = {
    "measure_collapse": settings_where(stage=Stage.COLLAPSE),
    "fit_projection": settings_where(stage=Stage.PROJECTION),
    LAST_STAGE: settings_where(stage=Stage.LAST),
}


@own_state()
def measure_collapse(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    *,
    settings: FitSettings | None = None,
    **changes: Unpack[FitOptions],
) -> CollapseReport:
    """Measure NC1 on ``train`` and NC4 (for a regression R²) on the selection split of ``val``, after every layer.

    Examples:
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
    return collapse(net, _stage_job(net, train, val, settings))


@own_state()
def fit_projection(
    net: nn.Module,
    chosen: ChosenLayer,
    train: ImageDataset,
    val: ImageDataset | None = None,
    *,
    settings: FitSettings | None = None,
    **changes: Unpack[FitOptions],
) -> FittedProjection:
    """Fit moments and Tucker factors to ``train``; the selection split of ``val``, or ``train``, chooses the sizes.

    Examples:
        >>> from psc_core import PRESETS, open_dataset
        >>> train = open_dataset("mnist:tests/data", split="train", preprocess=PRESETS["mnist"])
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)).eval()
        >>> fit_projection(net, ChosenLayer(("0",), "by hand"), train, c_proj=4, d_proj=3).projection.config()
        {'method': 'tucker', 'positions': [169], 'channels': 8, 'c_proj': 4, 'd_proj': 3}

    Args:
        net: Trained network in eval mode.
        chosen: The layer(s) that the network is cut behind.
        train: Training images.
        val: Validation images, or None to choose the sizes on all of ``train``.
        settings: Settings of all stages.
        changes: Settings by name, such as ``c_proj``, ``d_proj`` or ``minimum_dim``; also ``density``, the kind that
            will be fitted, because one that reads z needs more spatial components, and ``head_input``, because a head
            that reads z alone lacks what z gives up.

    Raises:
        UsageError: If the density is unknown, or the settings have another seed or epsilon than the chosen layer's.
        DataError: If classes differ or have too few images.
        FitError: If features are constant, or sizes are larger than the layer allows.
        NetworkError: If the network cannot be cut.
    """
    check_read("fit_projection", changes)
    settings = settings_for(chosen, settings, changes)
    return project(net, chosen, _stage_job(net, train, val, settings))


@own_state()
def fit_psc(  # noqa: PLR0913
    net: nn.Module,
    chosen: ChosenLayer,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    settings: FitSettings | None = None,
    **changes: Unpack[FitOptions],
) -> PSC:
    """Fit density and head to z of ``train``, and calibrate them on the calibration split of ``val``.

    Examples:
        >>> from functools import partial
        >>> from psc_core import PRESETS, open_dataset
        >>> open_split = partial(open_dataset, "mnist:tests/data", preprocess=PRESETS["mnist"])
        >>> train, val = open_split(split="train"), open_split(split="val")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)).eval()
        >>> chosen = measure_collapse(net, train, val).choose("0")
        >>> projection = fit_projection(net, chosen, train, val)
        >>> psc = fit_psc(net, chosen, projection, train, val, head="duq")
        >>> psc.predict(next(val.batches(3)).images).probabilities.shape
        torch.Size([3, 10])

    Args:
        net: Trained network, from :func:`psc_core.load_network` or of your own; a bundle names the function that builds
            the former, and holds the latter as an ONNX graph, if it can be exported.
        chosen: The layer(s) it is cut behind.
        projection: From :func:`fit_projection`.
        train: Training images.
        val: Validation images, none of them trained on; a :class:`psc_core.errors.LoaderWarning` says where they were.
        name: Model name.
        provenance: The origin that a bundle records.
        settings: The settings of all stages.
        changes: Settings by name: ``head`` (``"laplace"``, ``"sngp"``, ``"duq"``), ``density`` (``"gda"``, the paper's,
            ``"tied"``, ``"gda++"``, ``"mahalanobis++"``, ``"pooled++"``, ``"rmd"``), ``predictions`` (``"psc"``, the
            head's, or ``"original"``, the network's own), ``alpha``, ``coverage``, ``risk``, ``ood_score``
            (``"checks"`` or ``"density"``, the paper's), ``pca``, ``stored_images`` (number of images; none).

    Raises:
        UsageError: If an option is unknown, rates are outside (0, 1) or so few validation images cannot keep them,
            images have numbers, or the projection has other layers, or the settings another seed or epsilon, than the
            chosen.
        DataError: If classes differ or have too few images.
        FitError: If features or outputs cannot be fitted; the message says why.
        NetworkError: If the network cannot be cut.
    """
    recorded = {"name": name, "provenance": provenance or {}}
    return _fit(PSC, net, chosen, projection, (train, val), settings, changes, **recorded)


@own_state()
def fit_regressor(  # noqa: PLR0913
    net: nn.Module,
    chosen: ChosenLayer,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    name: str = "psc",
    provenance: Mapping[str, Any] | None = None,
    settings: FitSettings | None = None,
    **changes: Unpack[FitOptions],
) -> PSCRegressor:
    """Fit a density of bins and a head to z of ``train``, and calibrate them on the calibration split of ``val``.

    Examples:
        >>> from functools import partial
        >>> from psc_core import PRESETS, open_dataset
        >>> open_split = partial(open_dataset, "rotated-mnist:tests/data", preprocess=PRESETS["mnist"])
        >>> train, val = open_split(split="train"), open_split(split="val")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 1)).eval()
        >>> chosen = measure_collapse(net, train, val).choose("0")
        >>> projection = fit_projection(net, chosen, train, val, c_proj=4, d_proj=4)
        >>> model = fit_regressor(net, chosen, projection, train, val, coverage=0.9)
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
    recorded = {"name": name, "provenance": provenance or {}}
    return _fit(PSCRegressor, net, chosen, projection, (train, val), settings, changes, **recorded)


def _fit(
    model_class: type[AnyModel],
    net: nn.Module,
    chosen: ChosenLayer,
    projection: FittedProjection,
    images: tuple[ImageDataset, ImageDataset],
    settings: FitSettings | None,
    changes: Mapping[str, Any],
    **recorded: Any,
) -> AnyModel:
    """Return a model of type ``model_class``, which knows its task."""
    check_read(LAST_STAGE, changes)
    settings = settings_for(chosen, settings, changes)
    job = FitJob.of(*images, settings, task=model_class.task_type.name)
    check_disjoint(*images)
    _check_network(net, job)
    model, _ = fit_model(net, chosen, projection, replace(job, **recorded))
    warn_of_policy(model.policy, model.report["metrics"])
    return cast(AnyModel, model)


def _stage_job(net: nn.Module, train: ImageDataset, val: ImageDataset | None, settings: FitSettings) -> FitJob:
    """Return the job of a stage that only chooses by validation images, and calibrates nothing."""
    data = FitData.of(train, val, seed=settings.seed, max_images=settings.max_images)
    if val is not None:
        check_disjoint(train, val)
    job = FitJob(data, settings, settings.compute())
    _check_network(net, job)
    return job


def _check_network(net: nn.Module, job: FitJob) -> None:
    device = job.compute.device
    check_images(net.to(device), trial_images(job.data.train.preprocess).to(device), name=type(net).__name__)


def check_read(stage: str, changes: Collection[str]) -> None:
    """Require that a stage reads the settings that it is given by name."""
    if "layer" in changes:
        raise UsageError("expected no layer: the chosen layer says it; name one as report.choose(layer)")
    for other, names in READ_BY_ONE.items():
        unread = [name for name in changes if name in names]
        if unread and other != stage:
            raise UsageError(f"{stage} does not read {', '.join(unread)}, {other} does; leave out or give it there")


def settings_for(chosen: ChosenLayer, settings: FitSettings | None, changes: Mapping[str, Any]) -> FitSettings:
    """Return ``settings`` with ``changes``, or defaults that agree with how a layer was chosen."""
    report = chosen.report
    wanted: dict[str, Any] = {} if report is None else {"epsilon": report.epsilon}
    if report is not None and report.seed is not None:
        wanted["seed"] = report.seed
    found = (settings or FitSettings(**wanted)).changed(changes)
    for name, value in wanted.items():
        if getattr(found, name) != value:
            raise UsageError(
                f"expected {name}={value!r}, with which {'+'.join(chosen.layers)} was chosen, "
                f"got {getattr(found, name)!r}; use the same settings in every stage"
            )
    return found
