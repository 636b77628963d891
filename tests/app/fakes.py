"""A model with the interface of ``psc_core.PSC`` that computes next to nothing and fails on command."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psc_core.answers import CLASSIFICATION_SCORES, BasePolicy, ClassificationPolicy, RegressionPolicy, Target
from psc_core.answers import REGRESSION_SCORES as VALUE_SCORES
from psc_core.checks import REVIEWED
from psc_core.images.preprocess import Preprocess
from psc_core.learnt import Kind, Reviewed
from psc_core.maps import Grid, LayerMap, PositionDensity
from psc_core.pipeline import REVIEWED_DISTANCE
from psc_core.stored_images import STORED_DISTANCE, StoredImages
from psc_core.tasks.base import Matrix, Outputs, Task, pack
from psc_core.tasks.classification import Calibration, Classification
from psc_core.tasks.regression import Calibration as ValueCalibration
from psc_core.tasks.regression import Regression
from tests.encoded import encode

CLASSES = ("dark", "middle", "bright")
PREPROCESS = Preprocess("L", 8, 8, None, (0.5,), (0.5,))
POISON = 201  # an image whose first pixel has this value makes the network raise
NOT_FINITE = 202  # one whose first pixel has this value gets NaN


class FakePipeline:
    """Class by brightness; p-value falls with the variance of the pixels.

    It notes the sizes of batches and its callers, and fails on command; steps wait for ``check``.
    """

    is_traced = has_hooks = False
    map: LayerMap | None = None
    stored_images: StoredImages | None = None

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.callers: list[int] = []
        self.seconds = 0.0
        self.memory = 1 << 30
        self.dead = False
        self.check = threading.Event()
        self.check.set()

    def __call__(self, images: Tensor, /) -> Tensor:
        self.sizes.append(len(images))
        self.callers.append(threading.get_ident())
        self.check.wait(30)
        if self.seconds:
            time.sleep(self.seconds)
        if self.dead:
            raise RuntimeError("device-side assert triggered")
        if len(images) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory (fake)")
        first = images[:, 0, 0, 0]
        if bool((first == POISON).any()):
            raise RuntimeError("poison")
        packed = outputs_of(images)
        packed[first == NOT_FINITE] = float("nan")
        return packed

    def explain(self, images: Tensor, /, *, with_map: bool = False) -> tuple[Tensor, Mapping[str, Tensor]]:
        brightness = images.float().mean((1, 2, 3)) / 255.0
        distances = (brightness[:, None] - torch.tensor([0.0, 0.5, 1.0])).abs()
        deviation = images.float().flatten(1)[:, :7] / 255.0
        return self(images), {
            "class_distances": distances, "nearest_class": distances.argmin(1), "component_deviation": deviation,
            "aleatoric": brightness, "epistemic": 1.0 - brightness, **({"map": images[:, 0]} if with_map else {}),
        }  # fmt: skip

    def forward_with_map(self, images: Tensor, /) -> tuple[Tensor, Tensor]:
        return self(images), images[:, 0]


def outputs_of(images: Tensor) -> Tensor:
    """The packed outputs of the fake network, the same for an image whatever it is batched with."""
    brightness = images.float().mean((1, 2, 3)) / 255.0
    logits = -20.0 * (brightness[:, None] - torch.tensor([0.0, 0.5, 1.0])).abs()
    probabilities = logits.softmax(1)
    spread = images.float().std((1, 2, 3)) / 255.0
    entropy = torch.special.entr(probabilities).sum(1)
    p_value = (1.0 - 1.8 * spread).clamp(0.01, 1.0)
    scores = {name: torch.zeros_like(spread) for name in CLASSIFICATION_SCORES} | {
        "predictive_entropy": entropy,
        "log_density": -10.0 * spread,
        "ood_score": 10.0 * spread + 2.0 * entropy,
        "ood_p_value": p_value,
        "epistemic": spread,
    }
    return pack(CLASSIFICATION_SCORES, scores, probabilities)


class FakePipelineWithMap(FakePipeline):
    def __init__(self) -> None:
        super().__init__()
        tensors = {"mean": torch.zeros(1), "whitener": torch.ones(1, 1), "thresholds": torch.arange(255.0)}
        self.map = LayerMap("layer1", Grid(8, 8), PositionDensity(tensors, record={}))


class FakePipelineWithStoredImages(FakePipelineWithMap):
    """It also keeps a dark, a middle and a bright image of two pixels, from positions 10, 20 and 30."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        kept = torch.tensor([0, 128, 255], dtype=torch.uint8)
        tensors = {
            "embedding": kept[:, None].float() / 255.0,
            "pixels": kept[:, None, None, None].expand(3, 1, 1, 2).clone(),
            "images": torch.tensor([10, 20, 30]),
            "labels": torch.arange(3),
        }
        self.stored_images = StoredImages({**tensors, **values})

    def explain(self, images: Tensor, /, *, with_map: bool = False) -> tuple[Tensor, Mapping[str, Tensor]]:
        packed, explanation = super().explain(images, with_map=with_map)
        brightness = images.float().mean((1, 2, 3))[:, None] / 255.0
        assert self.stored_images is not None
        return packed, {**explanation, STORED_DISTANCE: self.stored_images(brightness)}


class FakePipelineWithChecks(FakePipeline):
    def __call__(self, images: Tensor, /) -> Tensor:
        brightness = images.float().mean((1, 2, 3), keepdim=True)[:, :, 0, 0] / 255.0
        return torch.cat([super().__call__(images), 1 - brightness, brightness], dim=1)


class FakePipelineWithReviewed(FakePipelineWithStoredImages):
    """Every image is like nineteen that were reviewed as drones, the more so the brighter it is."""

    def __init__(self) -> None:
        super().__init__()
        assert self.stored_images is not None
        drones = StoredImages({**self.stored_images.tensors(), "labels": torch.zeros(3, dtype=torch.int64)})
        kinds = [Kind("drone", 19, "2026-11-12")]
        self.scorer = SimpleNamespace(reviewed=Reviewed(torch.ones(1, 1), torch.zeros(1), kinds, drones))

    def __call__(self, images: Tensor, /) -> Tensor:
        dark = 1 - images.float().amax((1, 2, 3))[:, None] / 255.0
        return torch.cat([super().__call__(images), torch.ones_like(dark), dark], dim=1)

    def explain(self, images: Tensor, /, *, with_map: bool = False) -> tuple[Tensor, Mapping[str, Tensor]]:
        packed, explanation = super().explain(images, with_map=with_map)
        away = explanation[STORED_DISTANCE]
        return packed, {**explanation, REVIEWED: -away[:, :1], REVIEWED_DISTANCE: away}


class FakeBackbone:
    onnx = None


@dataclass
class FakeModel:
    version: str = "v1"
    pipeline: FakePipeline = field(default_factory=FakePipeline)
    policy: ClassificationPolicy = field(
        default_factory=lambda: ClassificationPolicy(alpha=0.2, ambiguity_threshold=0.5, coverage=0.9)
    )
    backbone: FakeBackbone = field(default_factory=FakeBackbone)
    preprocess: Preprocess = PREPROCESS
    classes: tuple[str, ...] = CLASSES
    task: Task = field(default_factory=Classification)
    head_layers: tuple[str, ...] = ("layer3",)
    layer: str = "layer3"
    predictions: str = "psc"
    epistemic_unit: str = "fraction"
    checks: tuple[str, ...] = ()
    score_names: tuple[str, ...] = CLASSIFICATION_SCORES
    report: dict[str, Any] = field(default_factory=lambda: {"metrics": {"accuracy": 0.99}})
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    calibration: Calibration = field(
        default_factory=lambda: Calibration(
            ood_scores=torch.linspace(-5.0, 0.0, 99),
            entropies=torch.linspace(0.0, 1.0, 99),
            error_bounds=torch.linspace(0.05, 0.3, 99),
            label_probabilities=torch.linspace(0.5, 1.0, 99),
            labels=torch.arange(99) % 3,
            num_classes=3,
        )
    )

    def headline(self, policy: BasePolicy) -> str:
        return policy.headline(self.report["metrics"])

    def outputs(self, packed: Matrix) -> Outputs[Matrix]:
        return Outputs(packed, self.score_names, self.checks)

    def probed(self) -> FakeModel:
        return self


class FakeValuePipeline(FakePipeline):
    """Predicts the brightness in per cent; the p-value is that of the other one."""

    def __call__(self, images: Tensor, /) -> Tensor:
        of_classes = Outputs(super().__call__(images), CLASSIFICATION_SCORES, ())
        brightness = images.float().mean((1, 2, 3)) / 2.55
        scores = {name: of_classes[name] for name in ("log_density", "ood_score", "ood_p_value")} | {
            "mean": brightness,
            "aleatoric": torch.full_like(brightness, 3.0),
            "epistemic": 0.04 * brightness,
        }
        return pack(VALUE_SCORES, scores, brightness.new_empty(len(images), 0))

    def explain(self, images: Tensor, /, *, with_map: bool = False) -> tuple[Tensor, Mapping[str, Tensor]]:
        _, explanation = super().explain(images, with_map=with_map)
        near = torch.arange(3.0).expand(len(images), 2, 3)
        neighbours = {"neighbour_image": near, "neighbour_value": 10 * near, "neighbour_distance": near}
        return self(images), {
            **explanation,
            **neighbours,
            "layer_weight": torch.tensor([0.75, 0.25]).expand(len(images), 2),
        }


@dataclass
class FakeValueModel(FakeModel):
    pipeline: FakePipeline = field(default_factory=FakeValuePipeline)
    policy: Any = field(default_factory=lambda: RegressionPolicy(alpha=0.2, max_width=14.0, coverage=0.9))
    task: Task = field(default_factory=lambda: Regression(target=Target(name="brightness", unit="%")))
    head_layers: tuple[str, ...] = ("layer3", "layer1")
    score_names: tuple[str, ...] = VALUE_SCORES
    calibration: Any = field(
        default_factory=lambda: ValueCalibration(
            ood_scores=torch.linspace(-5.0, 0.0, 99), residuals=torch.linspace(0.0, 2.2, 99)
        )
    )


def pixels(value: int, *, first: int | None = None, size: int = 8) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array = np.full((size, size), value, np.uint8)
    if first is not None:
        array[0, 0] = first
    return array


def png(value: int, *, first: int | None = None, size: int = 8) -> bytes:
    return encode(pixels(value, first=first, size=size))
