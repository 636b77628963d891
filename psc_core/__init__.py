"""Probabilistic skip connections: honest uncertainty for a trained image classifier or regression, without retraining.

The names below are loaded on first use, so importing the package itself is cheap.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psc_core.data.dataset import ImageDataset as ImageDataset
    from psc_core.data.loaders import open_loader as open_loader
    from psc_core.data.open import open_dataset as open_dataset
    from psc_core.fit import fit_projection as fit_projection
    from psc_core.fit import fit_psc as fit_psc
    from psc_core.fit import fit_regressor as fit_regressor
    from psc_core.fit import measure_collapse as measure_collapse
    from psc_core.images.preprocess import PRESETS as PRESETS
    from psc_core.images.preprocess import Preprocess as Preprocess
    from psc_core.model import PSC as PSC
    from psc_core.model import FittedModel as FittedModel
    from psc_core.model import PSCRegressor as PSCRegressor
    from psc_core.model import load_model as load_model
    from psc_core.network.load import load_network as load_network
    from psc_core.settings import FitSettings as FitSettings
    from psc_core.tasks.base import BasePrediction as BasePrediction
    from psc_core.tasks.classification import ClassificationPrediction as ClassificationPrediction
    from psc_core.tasks.regression import RegressionPrediction as RegressionPrediction

__version__ = "0.1.0"

# Nothing leaves the machine: what these libraries read when they start, here or in a child process.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

_MODULES = {
    "BasePrediction": "tasks.base",
    "ClassificationPrediction": "tasks.classification",
    "PRESETS": "images.preprocess",
    "PSC": "model",
    "PSCRegressor": "model",
    "FitSettings": "settings",
    "FittedModel": "model",
    "ImageDataset": "data.dataset",
    "Preprocess": "images.preprocess",
    "RegressionPrediction": "tasks.regression",
    "fit_projection": "fit",
    "fit_psc": "fit",
    "fit_regressor": "fit",
    "load_model": "model",
    "load_network": "network.load",
    "measure_collapse": "fit",
    "open_dataset": "data.open",
    "open_loader": "data.loaders",
}

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'psc_core' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"psc_core.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
