"""Fit a head of any kind: check the features, standardise them, run the fit of that kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.errors import UsageError
from psc_core.numerics.matrix import FeatureMatrix, check_features
from psc_core.tasks.classification.fit.data import HeadData
from psc_core.tasks.classification.fit.duq import fit_duq
from psc_core.tasks.classification.fit.laplace import fit_laplace
from psc_core.tasks.classification.fit.sngp import fit_sngp
from psc_core.tasks.classification.heads.base import ClassifierHead
from psc_core.tasks.fit.standardisation import fit_standardisation, in_memory

FITS: Final[Mapping[str, Callable[[HeadData], ClassifierHead]]] = {
    "laplace": fit_laplace,
    "sngp": fit_sngp,
    "duq": fit_duq,
}
"""The fit of each kind in :data:`psc_core.tasks.classification.heads.HEADS`."""


def fit_head(
    z_train: Float[Tensor, "n dim"] | FeatureMatrix,
    y_train: Int[Tensor, " n"],
    z_val: Float[Tensor, "m dim"],
    y_val: Int[Tensor, " m"],
    *,
    num_classes: int,
    kind: str = "laplace",
    seed: int = 0,
    device: torch.device | str = "cpu",
    class_names: Sequence[str] | None = None,
    images: Int[Tensor, " n"] | None = None,
) -> ClassifierHead:
    """Fit a head to training features; every free number is chosen by validation NLL.

    Args:
        z_train: Features of every labelled training example, any float type, read in blocks.
        y_train: Class index of each.
        z_val: Features of the selection split.
        y_val: Class index of each.
        num_classes: K.
        kind: One of :data:`psc_core.tasks.classification.heads.HEADS`.
        seed: Of the random features of ``sngp``; the other heads use no random numbers.
        device: Where to fit, and where the head is returned.
        class_names: Names for messages.
        images: Which image each labelled training example shows; by default another one each.

    Raises:
        UsageError: An unknown kind.
        FitError: Features that are not finite or all equal, or a class without training images.
    """
    if kind not in FITS:
        raise UsageError(f"expected a head of {', '.join(FITS)}, got {kind!r}")
    train = z_train.to(device)
    train_labels, val, val_labels = (part.to(device) for part in (y_train, z_val, y_val))
    check_features(train, train_labels, num_classes=num_classes, class_names=class_names, minimum=1)
    check_features(val, val_labels, num_classes=num_classes, class_names=class_names, minimum=0)
    standardisation = fit_standardisation(train)
    shown = torch.arange(len(train_labels)) if images is None else images
    data = HeadData(
        train=standardisation(train),
        train_labels=train_labels,
        weights=shown.bincount()[shown].double().reciprocal().to(device),
        val=in_memory(standardisation(val)),
        val_labels=val_labels,
        num_classes=num_classes,
        seed=seed,
        standardisation=standardisation,
    )
    return FITS[kind](data).to(device)
