"""Probabilistic skip connections: honest uncertainty for a trained image classifier, without retraining.

The names below are loaded when first used, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psc_core.data import ImageDataset, open_dataset
    from psc_core.fit import FitOptions, fit_projection, fit_psc, measure_collapse
    from psc_core.networks import load_network
    from psc_core.predictor import PSC
    from psc_core.preprocess import PRESETS, Preprocess
    from psc_core.types import Prediction
    from psc_core.version import __version__

_HOMES = {
    "PRESETS": "preprocess",
    "PSC": "predictor",
    "FitOptions": "fit",
    "ImageDataset": "data",
    "Prediction": "types",
    "Preprocess": "preprocess",
    "__version__": "version",
    "fit_projection": "fit",
    "fit_psc": "fit",
    "load_network": "networks",
    "measure_collapse": "fit",
    "open_dataset": "data",
}

__all__ = [
    "PRESETS",
    "PSC",
    "FitOptions",
    "ImageDataset",
    "Prediction",
    "Preprocess",
    "__version__",
    "fit_projection",
    "fit_psc",
    "load_network",
    "measure_collapse",
    "open_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'psc_core' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"psc_core.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
