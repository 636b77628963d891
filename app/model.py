"""What the service asks of a fitted model: the part of ``psc_core.PSC`` it uses, as protocols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from app.decoding import ImagePreprocess
from app.step import Network


class ModelPolicy(Protocol):
    """Default thresholds of a bundle."""

    @property
    def alpha(self) -> float: ...
    @property
    def ambiguity_threshold(self) -> float: ...
    @property
    def coverage(self) -> float: ...


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
    def policy(self) -> ModelPolicy: ...
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
