"""Evaluate a regression through its served path: errors, forecasts, intervals, and images unlike any seen.

One pass over each data set keeps a handful of numbers for each image, but no features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.evaluation.evaluate import observed_rate
from psc_core.evaluation.report import ObservedRate
from psc_core.metrics import ranking, regression
from psc_core.model.regressor import PSCRegressor


@dataclass(frozen=True)
class ScoredNumbers:
    """What one pass keeps of n images, on the CPU, in the order of the data set."""

    mean: Float[Tensor, " n"]  # target's unit, as the next two
    deviation: Float[Tensor, " n"]
    interval: Float[Tensor, "n 2"]
    ood_score: Float[Tensor, " n"]  # nats
    is_ood: Bool[Tensor, " n"]


@dataclass(frozen=True)
class ValueReport:
    """How good a regression is on test images."""

    model: Mapping[str, str]  # name, version, layer, target
    id_name: str
    images: int
    errors: Mapping[str, float]  # rmse, r2, nll, crps
    width: float  # mean width of the intervals, target's unit
    misses: ObservedRate  # intervals without the true number
    false_alarms: ObservedRate
    accepted_rmse: float | None  # of the images that are not out of distribution; None without any
    auroc: Mapping[str, float]  # OOD score, by out-of-distribution set
    flagged: Mapping[str, float]  # fraction that raises the alarm, by set

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)

    def to_text(self) -> str:
        """A table for a terminal, which is Markdown too."""
        errors = self.errors
        lines = [
            f"{self.model['name']} (version {self.model['version']}, layer {self.model['layer']}) predicts "
            f"{self.model['target']}; {self.images} images of {self.id_name}",
            "",
            "| measure | value |",
            "| --- | ---: |",
            f"| RMSE | {errors['rmse']:.4g} |",
            f"| R² | {errors['r2']:.4f} |",
            f"| NLL, nats | {errors['nll']:.4f} |",
            f"| CRPS | {errors['crps']:.4g} |",
            f"| mean width of an interval | {self.width:.4g} |",
            f"| intervals that hold the number | {_rate(self.misses, inverted=True)} |",
            f"| false alarms | {_rate(self.false_alarms)} |",
        ]
        if self.accepted_rmse is not None:
            lines.append(f"| RMSE of images that raise no alarm | {self.accepted_rmse:.4g} |")
        if self.auroc:
            lines += ["", "| out of distribution | AUROC | raises the alarm |", "| --- | ---: | ---: |"]
            lines += [f"| {name} | {self.auroc[name]:.4f} | {self.flagged[name]:.2%} |" for name in self.auroc]
        return "\n".join(lines)


def _rate(rate: ObservedRate, *, inverted: bool = False) -> str:
    """An observed rate with its interval and what was promised; ``inverted`` for the rate of the opposite."""
    seen, (low, high), promised = rate.count / rate.images, rate.interval, rate.promised
    if inverted:
        seen, low, high, promised = 1 - seen, 1 - high, 1 - low, 1 - promised
    return f"{seen:.2%} ({low:.2%} to {high:.2%}), promised {promised:.2%}"


def numbers_in(data: ImageDataset, model: PSCRegressor) -> Float[Tensor, " n"]:
    """The true numbers of the images.

    Raises:
        UsageError: Data of another target than the model's.
    """
    if data.values is None or data.target is None or data.target.name != model.target.name:
        raise UsageError(f"expected numbers of {model.target} in {data.name}, got {data.target or 'classes'}")
    return data.values


def compare_values(
    model: PSCRegressor, id_data: ImageDataset, inside: ScoredNumbers, outside: Mapping[str, ScoredNumbers]
) -> ValueReport:
    """The report of scored images: ``inside`` those of ``id_data``, ``outside`` out-of-distribution ones by name.

    Raises:
        UsageError: Data of another target than the model's.
    """
    y, calibrated = numbers_in(id_data, model), len(model.calibration)
    missed = (y < inside.interval[:, 0]) | (y > inside.interval[:, 1])
    accepted = ~inside.is_ood
    return ValueReport(
        model={"name": model.name, "version": model.version, "layer": model.layer, "target": str(model.target)},
        id_name=id_data.name,
        images=len(id_data),
        errors=errors_of(inside, y),
        width=float(inside.interval.diff(dim=1).mean()),
        misses=observed_rate(missed, 1 - model.policy.coverage, calibrated),
        false_alarms=observed_rate(inside.is_ood, model.policy.alpha, calibrated),
        accepted_rmse=regression.rmse(inside.mean[accepted], y[accepted]) if bool(accepted.any()) else None,
        auroc={name: ranking.auroc(inside.ood_score, scored.ood_score) for name, scored in outside.items()},
        flagged={name: float(scored.is_ood.double().mean()) for name, scored in outside.items()},
    )


def errors_of(scored: ScoredNumbers, values: Float[Tensor, " n"]) -> dict[str, float]:
    """``rmse`` and ``crps`` in the target's unit, ``r2``, ``nll`` in nats, for the true ``values``."""
    return {
        "rmse": regression.rmse(scored.mean, values),
        "r2": regression.r2(scored.mean, values),
        "nll": regression.nll(scored.mean, scored.deviation, values),
        "crps": regression.crps(scored.mean, scored.deviation, values),
    }


@torch.inference_mode()
def score_numbers(model: PSCRegressor, data: ImageDataset, *, batch_images: int = 256) -> ScoredNumbers:
    """One pass of ``data`` through the served pipeline.

    Raises:
        UsageError: Data read through another preprocessing than the model's.
    """
    if data.preprocess != model.preprocess:
        raise UsageError(
            f"expected {data.name} to be read through the model's preprocessing {model.preprocess}, got "
            f"{data.preprocess}; open it with preprocess=model.preprocess"
        )
    batches = track_images(data, Compute(model.device, batch_images=batch_images), f"evaluating {data.name}")
    return numbers_of(model, torch.cat([model.pipeline(batch.images.to(model.device)).cpu() for batch in batches]))


def numbers_of(model: PSCRegressor, packed: Float[Tensor, "n columns"]) -> ScoredNumbers:
    """What is kept of the pipeline's packed outputs for n images."""
    outputs, decisions = model.outputs(packed), model.decide(model.outputs(packed.numpy()))
    deviation = torch.hypot(outputs["aleatoric"], outputs["epistemic"])
    ends = torch.stack([torch.from_numpy(decisions.lower), torch.from_numpy(decisions.upper)], dim=1)
    return ScoredNumbers(outputs["mean"], deviation, ends, outputs["ood_score"], torch.from_numpy(decisions.is_ood))
