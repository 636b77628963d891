"""Evaluate a model of several labels: how many are right, which are undecided, and images unlike any seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from psc_core import metrics as ranking
from psc_core.compute import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.errors import UsageError
from psc_core.evaluation.base import PRIMARY, ObservedRate, Report, observed_rate
from psc_core.model import FittedModel
from psc_core.scoring import scored_batches
from psc_core.tasks.multilabel.fit.task import held


@dataclass(frozen=True)
class ScoredLabels:
    """What one pass keeps of n images, on the CPU, in the order of the data set."""

    probabilities: Float[Tensor, "n labels"]
    entropy: Float[Tensor, " n"]  # nats, as the next
    ood_score: Float[Tensor, " n"]
    is_ood: Bool[Tensor, " n"]
    possible: float  # smallest probability of a possible value of a label


@dataclass(frozen=True)
class MultilabelReport(Report):
    """How good a model of several labels is on test images."""

    quality: Mapping[str, float]
    misses: ObservedRate  # images of which some label is told for certain and wrong
    false_alarms: ObservedRate
    auroc: Mapping[str, float]  # OOD score, by out-of-distribution set

    def to_text(self) -> str:
        lines = [
            f"{self.model['name']}: {self.images} images of {self.id_name}",
            "",
            "| measure | value |",
            "| --- | ---: |",
        ]
        lines += [f"| {name} | {value:.4f} |" for name, value in self.quality.items()]
        lines += [f"| certain and wrong | {self.misses.rate:.2%} |", f"| false alarms | {self.false_alarms.rate:.2%} |"]
        return "\n".join([*lines, *(f"| AUROC of {name} | {value:.4f} |" for name, value in self.auroc.items())])

    def to_markdown(self) -> str:
        return self.to_text() + "\n"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def open_images(model: FittedModel, spec: str, *, split: str = "test", target: str | None = None) -> ImageDataset:
    """Open the images with labels that ``spec`` names."""
    return open_dataset(spec, split=split, preprocess=model.preprocess)


def open_baselines(
    model: FittedModel, weights: Path, train: ImageDataset, val: ImageDataset, *, batch_images: int = 256
) -> NoReturn:
    """Refuse, by :class:`UsageError`: there are none."""
    raise UsageError("a model of several labels has no baselines; leave out --weights, --train and --val")


def plain_network(net: nn.Module, data: ImageDataset, compute: Compute) -> None:
    """Return nothing: the network itself is not shown."""


@torch.inference_mode()
def score_images(
    model: FittedModel, data: ImageDataset, baselines: None = None, *, batch_images: int = 256
) -> ScoredLabels:
    """Send ``data`` through the served path once."""
    return labels_of(model, torch.cat([packed for _, _, packed in scored_batches(model, data, batch_images)]))


def labels_of(model: FittedModel, packed: Float[Tensor, "n columns"]) -> ScoredLabels:
    """Return what is kept of the pipeline's packed outputs for n images."""
    outputs, decisions = model.outputs(packed), model.decide(model.outputs(packed.numpy()))
    possible = model.calibration.quantile(model.policy.coverage)
    scores = outputs["entropy"], outputs["ood_score"], torch.from_numpy(decisions.is_ood)
    return ScoredLabels(outputs.probabilities, *scores, possible)


def quality_of(scored: ScoredLabels, data: ImageDataset) -> dict[str, dict[str, float]]:
    """Return the fraction of labels that are right, and of images with all of them right."""
    right = (scored.probabilities >= 0.5) == held(data)
    return {PRIMARY: {"accuracy": float(right.double().mean()), "exact": float(right.all(1).double().mean())}}


def compare(
    model: FittedModel, id_data: ImageDataset, inside: ScoredLabels, outside: Mapping[str, ScoredLabels]
) -> MultilabelReport:
    """Return the report of scored images: ``inside`` those of ``id_data``, ``outside`` out-of-distribution ones."""
    calibrated, true = len(model.calibration), held(id_data)
    given = torch.where(true, inside.probabilities, 1 - inside.probabilities)
    return MultilabelReport(
        model={"name": model.name, "version": model.version, "layer": model.layer},
        id_name=id_data.name,
        images=len(id_data),
        quality=quality_of(inside, id_data)[PRIMARY],
        misses=observed_rate((given < inside.possible).any(1), 1 - model.policy.coverage, calibrated),
        false_alarms=observed_rate(inside.is_ood, model.policy.alpha, calibrated),
        auroc={name: ranking.auroc(inside.ood_score, scored.ood_score) for name, scored in outside.items()},
    )
