"""Fit a head of any kind: check the features, standardise them, run the fit of that kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from psc_core.numerics.features import check_features
from psc_core.tasks.classification.fit.data import ClassifierData
from psc_core.tasks.classification.fit.duq import fit_duq
from psc_core.tasks.classification.fit.laplace import fit_laplace
from psc_core.tasks.classification.fit.sngp import fit_sngp
from psc_core.tasks.classification.heads.base import ClassifierHead
from psc_core.tasks.fit.standardisation import fit_standardisation, in_memory
from psc_core.tasks.fit.task import HeadJob

FITS: Final[Mapping[str, Callable[[ClassifierData], ClassifierHead]]] = {
    "laplace": fit_laplace,
    "sngp": fit_sngp,
    "duq": fit_duq,
}
"""The fit of each kind in :data:`psc_core.tasks.classification.heads.HEADS`."""


def fit_head(job: HeadJob) -> ClassifierHead:
    """Fit a head to training features; every free number is chosen by the NLL of the selection split.

    Raises:
        FitError: If features are not finite or all equal, or a class has no training images.
    """
    num_classes, shown = len(job.classes), job.train.images
    train, selection = job.train.head_input.to(job.device), job.selection.head_input[:].to(job.device)
    train_labels, selection_labels = (part.labels.to(job.device) for part in (job.train, job.selection))
    check_features(train, train_labels, num_classes=num_classes, class_names=job.classes, minimum=1)
    check_features(selection, selection_labels, num_classes=num_classes, class_names=job.classes, minimum=0)
    standardisation = fit_standardisation(train, job.train.widths)
    data = ClassifierData(
        train=standardisation(train),
        train_labels=train_labels,
        weights=shown.bincount()[shown].double().reciprocal().to(job.device),
        selection=in_memory(standardisation(selection)),
        selection_labels=selection_labels,
        num_classes=num_classes,
        seed=job.seed,
        standardisation=standardisation,
    )
    return FITS[job.kind](data).to(job.device)
