"""Fit a head of a regression of any kind: check features and numbers, standardise both, run the fit of that kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from psc_core.data.dataset import known_values
from psc_core.errors import FitError
from psc_core.numerics.features import check_features
from psc_core.tasks.fit.standardisation import fit_standardisation
from psc_core.tasks.fit.task import HeadJob
from psc_core.tasks.regression.fit.blr import fit_blr
from psc_core.tasks.regression.fit.data import RegressionData
from psc_core.tasks.regression.fit.dve import fit_dve
from psc_core.tasks.regression.heads.base import RegressionHead

FITS: Final[Mapping[str, Callable[[RegressionData], RegressionHead]]] = {"blr": fit_blr, "dve": fit_dve}
"""The fit of each kind in :data:`psc_core.tasks.regression.heads.HEADS`."""


def fit_head(job: HeadJob) -> RegressionHead:
    """Fit a head to the features and numbers of training images.

    The network's own predictions, where the selection split has them, are served in place of the head's.

    Raises:
        FitError: If features are not finite or all equal, or numbers are all equal.
    """
    train, selection = job.train.head_input.to(job.device), job.selection.head_input[:].to(job.device)
    for z in (train, selection):
        labels = torch.zeros(len(z), dtype=torch.int64, device=job.device)
        check_features(z, labels, num_classes=1, class_names=None, minimum=2)
    values = known_values(job.train.values).double().to(job.device)
    center, scale = values.mean(), values.std(correction=0)
    if not float(scale) > 0:
        raise FitError("expected numbers that differ between images, all are equal; nothing to fit")

    def standard(numbers: Tensor) -> Tensor:
        return (numbers.double().to(job.device) - center) / scale

    standardisation, own = fit_standardisation(train, job.train.widths), job.selection.network_output
    data = RegressionData(
        train=standardisation(train),
        train_values=standard(values),
        train_images=job.train.images.to(job.device),
        selection=standardisation(selection)[:],
        selection_values=standard(known_values(job.selection.values)),
        selection_mean=None if own is None else standard(own[:][:, 0]),
        center=center,
        scale=scale,
        widths=job.train.widths,
        seed=job.seed,
        standardisation=standardisation,
    )
    return FITS[job.kind](data).to(job.device)
