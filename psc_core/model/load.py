"""Load a bundle of any task."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from psc_core.bundle.io import read_bundle
from psc_core.compute.device import own_state
from psc_core.model.base import FittedModel
from psc_core.model.classifier import PSC
from psc_core.model.regressor import PSCRegressor

MODEL_CLASSES: tuple[type[FittedModel], ...] = (PSC, PSCRegressor)
"""The classes for the models of single tasks; the models of other tasks are :class:`.base.FittedModel` itself."""


@own_state()
def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    allow_factories: Collection[str] = (),
) -> FittedModel:
    """Read, verify, build and probe a bundle of any task; see :meth:`psc_core.PSC.load`.

    Example:
        >>> load_model("artifacts/dirty-mnist-resnet18").task.noun
        'classifier'

    Raises:
        BundleError: If the bundle is missing, altered, damaged or inconsistent.
    """
    return build_model(path, device=device, allow_factories=allow_factories).probed()


@own_state()
def build_model(
    path: str | Path, *, device: str | torch.device = "auto", allow_factories: Collection[str] = ()
) -> FittedModel:
    """Read, verify and build a bundle of any task, but compute nothing; call :meth:`.base.FittedModel.probed` next.

    Raises:
        BundleError: If the bundle is missing, altered, damaged or inconsistent.
    """
    bundle = read_bundle(Path(path))
    model_class = model_class_of(bundle.manifest.task)
    return model_class.from_bundle(bundle, device=device, allow_factories=allow_factories)


def model_class_of(task: object) -> type[FittedModel]:
    return next((each for each in MODEL_CLASSES if isinstance(task, each.task_type)), FittedModel)
