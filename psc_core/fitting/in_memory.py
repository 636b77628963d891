"""Fit a module that lives in this process, with the loaders that it was trained with, and calibrate a model again.

``PSC.fit`` and ``PSCRegressor.fit`` call :func:`fit`, and ``calibrate`` of a fitted model calls :func:`calibrate_on`;
both are imported when they are first called, so a model that only predicts loads no fitting code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from psc_core.compute.device import own_state
from psc_core.data import MAX_BAD_IMAGES
from psc_core.data.cache import PixelCache
from psc_core.data.classes import in_network_order
from psc_core.data.dataset import ImageDataset
from psc_core.data.loader_warnings import check_apart, warn_of_repeated
from psc_core.data.loaders import read_loader
from psc_core.data.overlap import check_disjoint
from psc_core.errors import NetworkError, UsageError, warn
from psc_core.fitting import stages
from psc_core.fitting.calibrate import calibrate_pipeline, settings_of, warn_of_policy, with_calibration
from psc_core.fitting.data import FitData
from psc_core.fitting.job import FitJob
from psc_core.images.loader_description import LoaderDescription
from psc_core.images.loader_preprocessing import LoaderPreprocessing
from psc_core.images.preprocess import MAKE_KNOWN
from psc_core.model.base import FittedModel
from psc_core.network.described.hugging_face import classes_of
from psc_core.network.live import device_of, readable_copy
from psc_core.network.load import recipe_of
from psc_core.network.onnx.export import check_exportable
from psc_core.network.output import check_images, check_output, trial_images
from psc_core.scoring.dataset import check_read_by
from psc_core.settings import FitSettings
from psc_core.tasks.fit.task import task_fit
from psc_core.version import __version__


@own_state()
def fit(
    task: str,
    net: nn.Module,
    loaders: tuple[Any, Any],
    description: LoaderDescription,
    name: str,
    settings: Mapping[str, Any],
) -> FittedModel:
    """Fit all stages to a copy of ``net``; mode, device and gradients of ``net`` itself stay as they are.

    Args:
        task: One of :data:`psc_core.tasks.TASKS`.
        net: A network that returns logits, or one number for each image.
        loaders: The loaders of training and of validation images; an :class:`ImageDataset` is taken as it is.
        description: What the caller says of the loaders' images.
        name: The model's name.
        settings: Settings of :class:`.FitSettings`, by name; without a device it is the network's.

    Raises:
        UsageError: If the network is no module, a loader or a setting cannot be used, validation images are training
            images, or the training data are a data
            set with a description.
        DataError: If a batch cannot be used, or a class has too few images.
        NetworkError: If the network cannot be copied, run or cut.
        FitError: If features cannot be fitted.
    """
    net = readable_copy(net)
    chosen = FitSettings(device=device_of(net)).changed(settings)
    compute = chosen.compute()
    check_apart(*loaders)
    train = opened(loaders[0], "the training data", description)
    if train is loaders[0]:
        check_undescribed(train, description)
    elif description.classes is None:
        train = _named_by(net, train)
    train = _in_order_of(net, train, are_given=description.classes is not None)
    of_task = task_fit(task)
    predicts = of_task.takes(train)
    if predicts:  # Before hours are spent on reading the others; otherwise the error comes below.
        images = trial_images(train.preprocess).to(compute.device)
        outputs = of_task.task(train).network_outputs(train.classes)
        try:
            check_output(net.to(compute.device), images[:1], outputs, name=type(net).__name__)
        except NetworkError as error:
            if description.classes is None:
                raise
            predicts = False
            if chosen.predictions == "auto":
                warn(f"the head will predict, the network itself cannot: {error}")
        check_images(net, images, name=type(net).__name__)
        if train.preprocess.is_known and recipe_of(net) is None:
            _warn_of_no_export(net, images[:1], chosen.precision)
    val = opened(loaders[1], "the validation data", described_as(train))
    check_disjoint(train, val)
    warn_of_repeated(val)
    data = FitData.of(train, val, seed=chosen.seed, task=task, max_images=chosen.max_images)
    chosen = stages.checked(chosen, data)
    if not train.preprocess.is_known:
        warn(f"the fitted model predicts tensors, but cannot be saved: {MAKE_KNOWN}")
    job = FitJob(_decoded(data, chosen), chosen, compute)
    if predicts and (warning := job.first_look(net.to(compute.device)).warning):
        warn(warning)
    report = stages.collapse(net, job)
    candidate = report.candidate(None if chosen.layer == "auto" else chosen.layer)
    projection = stages.project(net, candidate, job)
    provenance = {"psc_version": __version__, "settings": job.settings.recorded()}
    fitted = stages.fit_model(net, candidate, projection, job, name=name, provenance=provenance)
    warn_of_policy(fitted.model.policy, fitted.model.report["metrics"])
    return fitted.model


@own_state()
def calibrate_on(model: FittedModel, loader: Any, **changes: Any) -> FittedModel:
    """Return ``model`` calibrated on other images, see :meth:`.FittedModel.calibrate`."""
    as_fitted = LoaderDescription(LoaderPreprocessing(model.preprocess), model.classes, model.task.number())
    data = opened(loader, "the calibration data", as_fitted).in_order(model.classes)
    check_read_by(model, data)
    settings, fit = settings_of(model, changes), task_fit(model.task.name)
    fit.check_same(model.task, model.classes, data)
    warn_of_repeated(data)
    pipeline, calibrated = calibrate_pipeline(model.pipeline, fit, data, settings, or_higher="risk" not in changes)
    warn_of_policy(calibrated.policy, calibrated.metrics)
    count = len(data)
    entry = {"labels": count, "calibrated_on": count, "worth": count, "sha256": data.digest()}
    return with_calibration(model, pipeline, calibrated, data, entry)


def _named_by(net: nn.Module, train: ImageDataset) -> ImageDataset:
    """Return images whose classes nobody named, "0", "1", …, with the names that a network of transformers has."""
    names = classes_of(net) or ()
    is_unnamed = train.classes == tuple(map(str, range(len(names))))
    return replace(train, classes=names) if is_unnamed and len({*names}) == len(names) else train


def _in_order_of(net: nn.Module, train: ImageDataset, *, are_given: bool) -> ImageDataset:
    """Return images whose classes are in the order of the outputs, where a network of transformers names them.

    Names that the caller gave may be other words for the network's.
    """
    names = classes_of(net) or ()
    if len({*names}) != len(train.classes) or (are_given and {*names} != {*train.classes}):
        return train
    train, note = in_network_order(train, names)
    if note:
        warn(note)
    return train


def _decoded(data: FitData, settings: FitSettings) -> FitData:
    """Return the images decoded once, without the few that cannot be, as ``psc-fit`` reads them."""
    data, not_kept = data.cached(PixelCache())
    data, left_out = data.readable(MAX_BAD_IMAGES)
    if left_out:
        data.check_rates(alpha=settings.alpha, coverage=settings.coverage)
    for lines in filter(None, (not_kept, left_out)):
        warn("; ".join(lines))
    return data


def _warn_of_no_export(net: nn.Module, trial: Tensor, precision: str) -> None:
    """Warn where the model could not be saved; it can predict all the same."""
    try:
        check_exportable(net, trial, precision)
    except NetworkError as error:
        warn(
            f"the fitted model predicts, but cannot be saved: {error}; a network that a function builds can, as "
            'net = load_network("package.module:function", weights="net.pth", num_classes=…)',
        )


def opened(loader: Any, name: str, description: LoaderDescription) -> ImageDataset:
    """Return the images of a loader as a data set; a data set is returned as it is."""
    return loader if isinstance(loader, ImageDataset) else read_loader(loader, name, description)


def check_undescribed(data: ImageDataset, description: LoaderDescription) -> None:
    """Require that a caller says nothing of a data set, which says it itself.

    Raises:
        UsageError: If something is said; the message names the arguments.
    """
    if given := description.given():
        raise UsageError(
            f"{data.name} is a data set, which says itself how its images are read and what their labels mean; leave "
            f"out {', '.join(given)}, or give them where the data set is opened"
        )


def described_as(data: ImageDataset) -> LoaderDescription:
    """Return the description of a loader whose images belong to those of a data set."""
    return LoaderDescription(LoaderPreprocessing(data.preprocess), data.classes, data.target)
