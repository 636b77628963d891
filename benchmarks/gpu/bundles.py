"""Models without training: random parts in the shapes that a fit gives, and a network that only hooks can cut."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.device.subjects import SUBJECTS, Subject, random_density, random_head, random_projection
from psc_core.calibration.conformal import Calibration
from psc_core.images.preprocess import PRESETS
from psc_core.model.pipeline import Pipeline, Scorer
from psc_core.model.predictor import PSC
from psc_core.network.backbone import example_input, truncate
from psc_core.network.load import load_network
from psc_core.policy import Policy

FACTORIES = ("benchmarks.gpu.bundles:untraceable",)
CALIBRATION_IMAGES = 1000


class _Looks(nn.Module):
    """Looks at its input, so it cannot be traced and waits for the device."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.fc = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("expected finite images")
        logits: Tensor = self.fc(self.body(x).mean((2, 3)))
        return logits


def untraceable(num_classes: int = 10) -> nn.Module:
    """A small network for digits that is cut by hooks."""
    return _Looks(num_classes)


def subject(name: str) -> Subject:
    """A network of the device benchmark."""
    return next(each for each in SUBJECTS if each.name == name)


def untrained(name: str) -> PSC:
    """A subject of the device benchmark as a model, with the tied density, on the CPU."""
    own = subject(name)
    pipeline = own.pipeline(own.network(), "fp32", torch.device("cpu"), density="tied")
    return _model(pipeline, own.network(), own.layer, own.classes, name)


def hooked() -> PSC:
    """A model whose network only hooks can cut, on the CPU."""
    torch.manual_seed(0)
    (spec,) = FACTORIES
    net = load_network(spec, num_classes=10).eval()
    preprocess = PRESETS["mnist"]
    backbone = truncate(net, ["body.3"], keep_output=False, example=example_input(preprocess))
    parts = random_projection(32, 49, 8, 4), random_density(32, 16, 10, kind="tied"), random_head(32, 10)
    pipeline = Pipeline(Scorer(preprocess, backbone, *parts), torch.randn(CALIBRATION_IMAGES).sort().values)
    return _model(pipeline, net, "body.3", 10, "hooked")


def write(psc: PSC, folder: Path) -> Path:
    """The model as a bundle; returns ``folder``."""
    if not (folder / "manifest.json").exists():
        psc.save(folder)
    return folder


def _model(pipeline: Pipeline, net: nn.Module, layer: str, classes: int, name: str) -> PSC:
    backbone = truncate(net.eval(), [layer], keep_output=False, example=example_input(pipeline.scorer.preprocess))
    count = CALIBRATION_IMAGES
    shape = (8, *pipeline.scorer.preprocess.shape)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        score = float(-pipeline.scorer(images).scores["log_density"].median())
    spread = torch.linspace(-1, 1, count) * max(1.0, 0.1 * abs(score))
    calibration = Calibration(
        score + spread,
        torch.linspace(0, math.log(classes) / 2, count),
        torch.linspace(0, 1, count),
        torch.arange(count) % classes,
        classes,
    )
    return PSC(
        pipeline=Pipeline(pipeline.scorer, calibration.ood_scores),
        backbone=backbone,
        classes=tuple(str(label) for label in range(classes)),
        calibration=calibration,
        policy=Policy(alpha=0.05, ambiguity_threshold=math.log(classes) / 4, coverage=0.9),
        layers=(layer,),
        name=name.replace(", ", "-").replace(" ", "-").lower(),
        report={"collapse": {"layers": []}},
    )
