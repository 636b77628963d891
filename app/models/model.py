"""What the service asks of a fitted model: the part of ``psc_core.PSC`` it uses, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from app.inference.decoder import ImagePreprocess
from app.inference.steps import Network
from psc_core.policy import Policy


class ModelPreprocess(ImagePreprocess, Protocol):
    """What is served of the preprocessing."""

    def to_json(self) -> dict[str, Any]: ...


class ModelCalibration(Protocol):
    """What is served of the calibration."""

    @property
    def scores(self) -> torch.Tensor: ...
    def ood_score_threshold(self, alpha: float) -> float: ...
    def set_thresholds(self, coverage: float) -> torch.Tensor: ...


class Model(Protocol):
    """What the service needs of ``psc_core.PSC``."""

    @property
    def pipeline(self) -> Network: ...
    @property
    def preprocess(self) -> ModelPreprocess: ...
    @property
    def calibration(self) -> ModelCalibration: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def report(self) -> Mapping[str, Any]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def version(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def predictions(self) -> str: ...
    @property
    def epistemic_unit(self) -> str: ...


Loader = Callable[[Path], Model]
"""Reads a bundle directory; called on a thread."""
