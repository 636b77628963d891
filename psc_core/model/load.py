"""Load a bundle of any task."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from psc_core.bundle.io import read_bundle
from psc_core.model.base import FittedModel
from psc_core.model.classifier import PSC
from psc_core.model.regressor import PSCRegressor

MODEL_CLASSES: tuple[type[FittedModel], ...] = (PSC, PSCRegressor)
"""Classes for the models of one task; those of any other are plain :class:`.base.FittedModel`."""


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    allow_factories: Collection[str] = (),
    check: Callable[[FittedModel], None] | None = None,
) -> FittedModel:
    """Read, verify and build a bundle of any task; see :meth:`psc_core.PSC.load`.

    Example:
        >>> load_model("artifacts/dirty-mnist-resnet18").task.noun
        'classifier'

    Raises:
        BundleError: The bundle is missing, altered, damaged or inconsistent.
    """
    bundle = read_bundle(Path(path))
    return model_class_of(bundle.manifest.task).from_bundle(
        bundle, device=device, allow_factories=allow_factories, check=check
    )


def model_class_of(task: object) -> type[FittedModel]:
    """Return the class for models of a task."""
    return next((each for each in MODEL_CLASSES if isinstance(task, each.task_type)), FittedModel)
