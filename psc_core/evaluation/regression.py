"""Evaluate a regression: errors, forecasts, intervals, and the detection of out-of-distribution images.

One pass over each data set keeps a handful of numbers for each image, but no features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from psc_core import metrics
from psc_core.compute import Compute
from psc_core.data.dataset import ImageDataset, known_values
from psc_core.data.open import is_table, open_dataset
from psc_core.evaluation.evaluate import (
    AUROC_MEANS,
    AUTOMATED,
    FALSE_ALARMS,
    NO_OTHERS,
    OTHERS,
    PRIMARY,
    Evaluator,
    ObservedRate,
    OriginalNetwork,
    Report,
    Table,
    describe_rate,
    observed_rate,
    percent,
)
from psc_core.model import PSCRegressor
from psc_core.scoring import scored_batches
from psc_core.settings import BATCH_IMAGES
from psc_core.tasks.regression import CODE_ACCEPT


@dataclass(frozen=True)
class ScoredNumbers:
    """The numbers that one pass keeps of n images, on the CPU, in the order of the data set."""

    mean: Float[Tensor, " n"]  # in the target's unit, like the next two
    deviation: Float[Tensor, " n"]
    interval: Float[Tensor, "n 2"]
    ood_score: Float[Tensor, " n"]  # nats
    is_ood: Bool[Tensor, " n"]
    accepted: Bool[Tensor, " n"]  # neither out of distribution nor uncertain
    plain: Float[Tensor, " n"] | None = None  # predictions of the original network, float64, if it was given


@dataclass(frozen=True)
class RegressionReport(Report):
    """Everything that ``psc-eval`` measures of a regression; :attr:`model` also names the target."""

    errors: Mapping[str, float]  # rmse, r2, nll, crps
    width: float  # mean width of the intervals, target's unit
    misses: ObservedRate  # intervals without the true number
    false_alarms: ObservedRate
    accepted: int  # number of images that are neither out of distribution nor uncertain
    accepted_rmse: float | None  # of these; None if there are none
    auroc: Mapping[str, float]  # of the OOD score, by out-of-distribution set
    flagged: Mapping[str, float]  # fraction that raises the alarm, by out-of-distribution set

    def heading(self) -> str:
        return (
            f"{self.model['name']} (version {self.model['version']}, layer {self.model['layer']}) predicts "
            f"{self.model['target']}; {self.images} images of {self.id_name}"
        )

    def answers(self) -> dict[str, list[str]]:
        accepted, alarms, unit = self.accepted, self.false_alarms.count, f" {self.model['unit']}".rstrip()
        of_these = "" if self.accepted_rmse is None else f"; their RMSE is {self.accepted_rmse:.4g}{unit}"
        return {
            "How far off are the numbers?": [f"RMSE {self.errors['rmse']:.4g}{unit}, R² {self.errors['r2']:.4f}."],
            AUTOMATED: [
                f"{accepted} of {self.images} images are accepted ({percent(accepted / self.images)}){of_these}.",
                f"The others go to a person: {alarms} unusual, {self.images - accepted - alarms} uncertain.",
            ],
            FALSE_ALARMS: [describe_rate("False alarms", self.false_alarms)],
            OTHERS: [
                f"{name}: {percent(self.flagged[name])} are called out of distribution; AUROC {auroc:.4f}."
                for name, auroc in self.auroc.items()
            ]
            or [NO_OTHERS],
            "Do the intervals hold the number?": [
                describe_rate("Numbers outside of their interval", self.misses),
                f"An interval is {self.width:.4g}{unit} wide on average.",
            ],
        }

    def tables(self) -> list[Table]:
        errors = self.errors
        rows = [
            ["RMSE", f"{errors['rmse']:.4g}"],
            ["R²", f"{errors['r2']:.4f}"],
            ["NLL, nats", f"{errors['nll']:.4f}"],
            ["CRPS", f"{errors['crps']:.4g}"],
            ["mean width of an interval", f"{self.width:.4g}"],
        ]
        if self.accepted_rmse is not None:
            rows.append(["RMSE of accepted images", f"{self.accepted_rmse:.4g}"])
        words = {
            "RMSE": "root of the mean squared error",
            "R²": "the part of the numbers' variance that is predicted; 1 is perfect, 0 as good as their mean",
            "NLL": "mean of −log(density at the true number); lower is better",
            "CRPS": "mean distance of the forecast from the true number, in its unit; lower is better",
        }
        found = [Table("Errors and intervals", ["measure", "value"], rows, words)]
        if self.auroc:
            sets = [[name, f"{self.auroc[name]:.4f}", f"{self.flagged[name]:.2%}"] for name in self.auroc]
            header = ["images", "AUROC", "raise the alarm"]
            found.append(Table("Out of distribution", header, sets, {"AUROC": AUROC_MEANS}))
        return found


def numbers_of(model: PSCRegressor, packed: Float[Tensor, "n columns"]) -> ScoredNumbers:
    """Return the numbers that are kept of the pipeline's packed outputs for n images."""
    outputs, decisions = model.outputs(packed), model.decide(model.outputs(packed.numpy()))
    deviation = torch.hypot(outputs["aleatoric"], outputs["epistemic"])
    ends = torch.stack([torch.from_numpy(decisions.lower), torch.from_numpy(decisions.upper)], dim=1)
    is_ood, accepted = map(torch.from_numpy, (decisions.is_ood, decisions.decision == CODE_ACCEPT))
    return ScoredNumbers(outputs["mean"], deviation, ends, outputs["ood_score"], is_ood, accepted)


class RegressionEvaluator(Evaluator[PSCRegressor, ScoredNumbers, OriginalNetwork]):
    def open_images(
        self, model: PSCRegressor, spec: str, *, split: str = "test", target: str | None = None
    ) -> ImageDataset:
        """Open images with numbers; ``target`` is the column of a table, by default the model's."""
        opened, wanted = partial(open_dataset, spec, split=split, preprocess=model.preprocess), model.target
        if not is_table(spec):
            return opened()
        data = opened(numbers=True, target=target or wanted.name, unit=wanted.unit)
        return replace(data, target=wanted)

    def original_network(self, net: nn.Module, data: ImageDataset, compute: Compute) -> OriginalNetwork:
        return OriginalNetwork(net.to(compute.device), data.preprocess, compute.precision)

    @torch.inference_mode()
    def score_images(
        self,
        model: PSCRegressor,
        data: ImageDataset,
        baselines: OriginalNetwork | None = None,
        *,
        batch_images: int = BATCH_IMAGES,
        packed: Tensor | None = None,
    ) -> ScoredNumbers:
        outputs, plain = [], []
        for _, images, of_batch in scored_batches(model, data, batch_images, packed=packed):
            outputs.append(of_batch)
            if baselines is not None:
                plain.append(baselines.outputs(images)[:, 0].cpu())
        return replace(numbers_of(model, torch.cat(outputs)), plain=torch.cat(plain) if plain else None)

    def quality_of(self, scored: ScoredNumbers, data: ImageDataset) -> dict[str, dict[str, float]]:
        """Return RMSE, R², NLL and CRPS; of the original network, which gives no deviation, the RMSE alone."""
        if data.values is None:
            return {}
        plain = {} if scored.plain is None else {"original": {"rmse": metrics.rmse(scored.plain, data.values)}}
        errors = {
            "rmse": metrics.rmse(scored.mean, data.values),
            "r2": metrics.r2(scored.mean, data.values),
            "nll": metrics.gaussian_nll(scored.mean, scored.deviation, data.values),
            "crps": metrics.crps(scored.mean, scored.deviation, data.values),
        }
        return {**plain, PRIMARY: errors}

    def compare(
        self, model: PSCRegressor, id_data: ImageDataset, inside: ScoredNumbers, outside: Mapping[str, ScoredNumbers]
    ) -> RegressionReport:
        y, calibrated = known_values(id_data.values), len(model.calibration)
        missed = (y < inside.interval[:, 0]) | (y > inside.interval[:, 1])
        accepted = inside.accepted
        return RegressionReport(
            model={
                "name": model.name,
                "version": model.version,
                "layer": model.layer,
                "target": str(model.target),
                "unit": model.target.unit,
            },
            id_name=id_data.name,
            images=len(id_data),
            errors=self.quality_of(inside, id_data)[PRIMARY],
            width=float(inside.interval.diff(dim=1).mean()),
            misses=observed_rate(missed, 1 - model.policy.coverage, calibrated),
            false_alarms=observed_rate(inside.is_ood, model.policy.alpha, calibrated),
            accepted=int(accepted.sum()),
            accepted_rmse=metrics.rmse(inside.mean[accepted], y[accepted]) if bool(accepted.any()) else None,
            auroc={name: metrics.auroc(inside.ood_score, scored.ood_score) for name, scored in outside.items()},
            flagged={name: float(scored.is_ood.double().mean()) for name, scored in outside.items()},
        )
