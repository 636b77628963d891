"""Fit a head of a regression of any kind: check features and numbers, standardise both, run the fit of that kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.errors import FitError, UsageError
from psc_core.numerics.matrix import FeatureMatrix, check_features
from psc_core.tasks.fit.standardisation import fit_standardisation
from psc_core.tasks.regression.fit.blr import fit_blr
from psc_core.tasks.regression.fit.data import HeadData
from psc_core.tasks.regression.fit.dve import fit_dve
from psc_core.tasks.regression.heads.base import RegressionHead

FITS: Final[Mapping[str, Callable[[HeadData], RegressionHead]]] = {"blr": fit_blr, "dve": fit_dve}
"""The fit of each kind in :data:`psc_core.tasks.regression.heads.HEADS`."""


def fit_head(
    z_train: Float[Tensor, "n dim"] | FeatureMatrix,
    y_train: Float[Tensor, " n"],
    z_val: Float[Tensor, "m dim"],
    y_val: Float[Tensor, " m"],
    *,
    kind: str = "blr",
    seed: int = 0,
    device: torch.device | str = "cpu",
    val_mean: Float[Tensor, " m"] | None = None,
    widths: Sequence[int] | None = None,
    images: Int[Tensor, " n"] | None = None,
) -> RegressionHead:
    """Fit a head to the features and numbers of training images.

    Args:
        z_train: Features of every training image, any float type, read in blocks; of several layers side by side.
        y_train: Number of each, in the target's unit.
        z_val: Features of the selection split, which free numbers are chosen on.
        y_val: Number of each.
        kind: One of :data:`psc_core.tasks.regression.heads.HEADS`.
        seed: Draws training images where not all are needed, and orders them.
        device: Where to fit, and where the head is returned.
        val_mean: The network's own predictions for the selection split, if these are served in place of the head's.
        widths: Columns of each layer, for a head that tells layers apart; by default there is one.
        images: Which image of the training data each one is, for explanations; by default they are in its order.

    Raises:
        UsageError: An unknown kind.
        FitError: Features that are not finite or all equal, or numbers that are all equal.
    """
    if kind not in FITS:
        raise UsageError(f"expected a head of {', '.join(FITS)} for a regression, got {kind!r}")
    train, val = z_train.to(device), z_val.to(device)
    for z in (train, val):
        check_features(
            z, torch.zeros(len(z), dtype=torch.int64, device=device), num_classes=1, class_names=None, minimum=2
        )
    values = y_train.double().to(device)
    center, scale = values.mean(), values.std(correction=0)
    if not float(scale) > 0:
        raise FitError("expected numbers that differ between images, all are equal; nothing to fit")
    standardisation = fit_standardisation(train)
    data = HeadData(
        train=standardisation(train),
        train_values=(values - center) / scale,
        train_images=(torch.arange(len(values)) if images is None else images).to(device),
        val=standardisation(val)[:],
        val_values=(y_val.double().to(device) - center) / scale,
        val_mean=None if val_mean is None else (val_mean.double().to(device) - center) / scale,
        center=center,
        scale=scale,
        widths=(train.shape[1],) if widths is None else tuple(widths),
        seed=seed,
        standardisation=standardisation,
    )
    return FITS[kind](data).to(device)
