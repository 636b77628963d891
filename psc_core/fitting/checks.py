"""What is checked before a stage spends hours: classes, attainable rates, the network's own output."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

from psc_core.calibration.conformal import check_rates
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.errors import DataError, UsageError
from psc_core.fitting.options import FitOptions
from psc_core.network.backbone import Backbone, example_input

OWN_IMAGES: Final = 1000
"""Maximum number of images of :func:`own_accuracy` and, unless it is told, of :func:`own_error`."""


def check_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Require the same classes in both, at least two of them, each with at least two training images.

    Raises:
        DataError: They differ or have too few images.
    """
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
        rare = train.classes[int(counts.argmin())]
        raise DataError(f"expected at least two training images of each class, got {int(counts.min())} of {rare!r}")


def check_attainable_rates(val: ImageDataset, *, alpha: float, coverage: float, options: FitOptions) -> None:
    """Reject rates that the calibration split of ``val`` is too small for; only its size matters.

    Raises:
        UsageError: ``alpha`` below 1/(n + 1) or ``coverage`` above n/(n + 1).
    """
    _, calibration_split = split_validation(val, options.seed)
    try:
        check_rates(len(calibration_split), alpha=alpha, coverage=coverage)
    except UsageError as error:
        raise UsageError(f"{error} (half of the {len(val)} validation images calibrate)") from error


def check_own_output(backbone: Backbone, train: ImageDataset, compute: Compute) -> None:
    """Reject a network whose own output cannot be probabilities of the classes.

    Raises:
        UsageError: It has another number of outputs.
    """
    with torch.inference_mode():
        logits = backbone(example_input(train.preprocess).to(compute.device))[1]
    width = None if logits is None else logits.shape[1]
    expected = 1 if train.target is not None else len(train.classes)
    if width != expected:
        wanted = "1 output" if train.target is not None else f"{expected} outputs, one for each class of {train.name}"
        raise UsageError(
            f"expected a network of {wanted}, got {width}; use the data it was trained for, and a factory that reads "
            "num_classes"
        )


def own_error(
    net: nn.Module, data: ImageDataset, compute: Compute, seed: int, images: int = OWN_IMAGES
) -> float | None:
    """RMSE of the network itself on random images of a regression; None if it does not have one output."""
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:images]
    squares = 0.0
    for output, batch in passes(data.subset(chosen), compute, f"the network on {data.name}", net.to(compute.device)):
        if output.ndim != 2 or output.shape[1] != 1 or batch.values is None:
            return None
        squares += float((output[:, 0].cpu().double() - batch.values).square().sum())
    return math.sqrt(squares / len(chosen))


def own_accuracy(net: nn.Module, data: ImageDataset, compute: Compute, seed: int) -> float | None:
    """Accuracy of the network itself on random images; None if it does not have one output for each class.

    Of an image with several labels, the fraction that is predicted counts.  A first look that a person can compare with
    what is known of the network: images that are resized, cropped or standardised otherwise than in training lower it,
    and nothing else shows that.
    """
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:OWN_IMAGES]
    correct = 0.0
    for logits, batch in passes(data.subset(chosen), compute, f"the network on {data.name}", net.to(compute.device)):
        if logits.shape[1:] != (len(data.classes),):
            return None
        hits = logits.argmax(1).cpu()[batch.image_index] == batch.labels
        labels_of_image = batch.image_index.bincount()[batch.image_index]
        correct += float((hits / labels_of_image).sum())
    return correct / len(chosen)
