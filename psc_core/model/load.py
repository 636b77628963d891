"""Load a bundle of either kind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from psc_core.bundle.io import read_bundle
from psc_core.model.predictor import PSC
from psc_core.model.regressor import PSCRegressor

Model = PSC | PSCRegressor
"""A fitted classifier, or a fitted regression."""


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    allow_factories: Collection[str] = (),
    check: Callable[[Model], None] | None = None,
) -> Model:
    """Read, verify and build a bundle of a classifier or of a regression; see :meth:`psc_core.PSC.load`.

    Example:
        >>> load_model("artifacts/dirty-mnist-resnet18").target is None  # of a classifier
        True

    Raises:
        BundleError: The bundle is missing, altered, damaged or inconsistent.
    """
    bundle = read_bundle(Path(path))
    if bundle.manifest.target is None:
        return PSC.from_bundle(bundle, device=device, allow_factories=allow_factories, check=check)
    return PSCRegressor.from_bundle(bundle, device=device, allow_factories=allow_factories, check=check)
