"""What a regression's report keeps of a set of images, none of which it shows, and the figures that only it has.

y is the true number of an image; μ and σ are the predicted number and its deviation, all in the target's unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from psc_core.answers import RegressionPolicy, Target
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.regression import RegressionEvaluator, ScoredNumbers, numbers_of
from psc_core.model import PSCRegressor
from psc_core.report.content import GLOSSARY, TEXTS, Facts, Role, ScoredSet, TaskReport, parts_of
from psc_core.report.page import KNOWN, LIMIT, UNKNOWN, Figures, axes_of, scores
from psc_core.tasks.regression import Calibration, Regression


@dataclass(frozen=True)
class RegressionSet(ScoredSet):
    """The numbers that a regression predicts for n images, in the target's unit."""

    mean: Float[Tensor, " n"]
    deviation: Float[Tensor, " n"]  # predicted standard deviation
    values: Float[Tensor, " m"]  # the true numbers; empty for images without them


LOSS: Final = 0.05  # the relative rise of the RMSE, compared to the original network's, above which a warning is given
COVERAGES: Final = 19  # the number of nominal coverages, evenly spaced between 0 and 1, at which intervals are checked


def predictions(images: RegressionSet, target: Target) -> Figure:
    """Draw μ against y, and the diagonal."""
    figure, axis = axes_of(3.8, 3.4)
    ends = [float(images.values.min()), float(images.values.max())]
    axis.plot(ends, ends, "--", lw=0.8, color=LIMIT)
    axis.plot(images.values.numpy(), images.mean.numpy(), ".", ms=4, alpha=0.6, mew=0, color=KNOWN)
    axis.set(xlabel=f"true {target}", ylabel="predicted")
    return figure


def coverage(images: RegressionSet, calibration: Calibration) -> Figure:
    """Draw the fraction of true numbers inside the stated intervals, and those of N(μ, σ²), for each coverage."""
    figure, axis = axes_of(3.8, 3.4)
    axis.plot([0, 1], [0, 1], "--", lw=0.8, color=LIMIT)
    residuals = (images.values - images.mean.double()).abs() / images.deviation.double()
    nominal = torch.arange(1, COVERAGES + 1, dtype=torch.float64) / (COVERAGES + 1)
    stated = nominal[nominal <= len(calibration) / (len(calibration) + 1)]  # no higher coverage can be stated
    for name, at, half_widths, colour in (
        ("stated intervals", stated, torch.tensor([calibration.quantile(c) for c in stated.tolist()]), KNOWN),
        ("normal distribution", nominal, math.sqrt(2) * torch.erfinv(nominal), LIMIT),
    ):
        held = (residuals[:, None] <= half_widths).double().mean(0)
        axis.plot(at.numpy(), held.numpy(), "o-", ms=3, lw=1, label=name, color=colour)
    axis.set(xlabel="nominal coverage", ylabel="fraction that contains the number", xlim=(0, 1), ylim=(0, 1))
    axis.legend(fontsize=7)
    return figure


def error_coverage(images: RegressionSet, target: Target) -> Figure:
    """Draw the RMSE of the accepted images against their fraction, by smallest σ first and by smallest error first."""
    figure, axis = axes_of(3.8, 3.4)
    squares = (images.values - images.mean.double()).square()
    accepted = torch.arange(1, len(squares) + 1)
    for name, key, style, colour in (
        ("by predicted deviation", images.deviation, "-", KNOWN),
        ("if the errors were known", squares, ":", UNKNOWN),
    ):
        left = (squares[key.argsort(stable=True)].cumsum(0) / accepted).sqrt()
        axis.plot((accepted / len(squares)).numpy(), left.numpy(), style, lw=1, label=name, color=colour)
    axis.axhline(float(squares.mean().sqrt()), ls="--", lw=0.8, color=LIMIT, label="of all")
    unit = f", {target.unit}" if target.unit else ""
    axis.set(xlabel="fraction accepted", ylabel=f"RMSE of these{unit}", xlim=(0, 1), ylim=(0, None))
    axis.legend(fontsize=7)
    return figure


class RegressionTaskReport(TaskReport[PSCRegressor, ScoredNumbers]):
    set_type = RegressionSet
    templates = "regression"
    texts: ClassVar = {
        "collapse": (
            "Where the network collapses",
            "Deep layers forget how images with about the same number differ (NC1 falls). PSC reads the shaded layer: "
            "it still varies, NC1 > ε, and predicts the number, high R².",
        ),
        "sizes": TEXTS["sizes"],
        "ood-scores": TEXTS["ood-scores"],
        "deviations": (
            "How uncertain numbers are",
            "Right of the dashed line an interval is too wide, and a number that is not out of distribution is "
            "uncertain.",
        ),
        "roc": TEXTS["roc"],
        "predictions": ("Predicted and true numbers", "A point is an image; on the diagonal its number is right."),
        "coverage": (
            "Do intervals hold?",
            "On the diagonal, 80 % of the intervals with coverage 80 % contain the true number; below it intervals are "
            "too narrow. On validation images the stated ones lie there by construction; see whether they do on test "
            "images.",
        ),
        "error-coverage": (
            "Does the uncertainty know?",
            "RMSE when the numbers with the largest predicted deviation are left to a person; it should rise to the "
            "right.",
        ),
    }
    no_limit: ClassVar = {"deviations": "No width is too wide for an interval, so no number is uncertain."}
    columns: ClassVar = {"rmse": "RMSE", "r2": "R²", "nll": "NLL, nats", "crps": "CRPS"}
    digits = ".4g"
    recorded: ClassVar = {"rmse": "rmse", "r2": "r2", "nll": "nll_nats", "crps": "crps"}
    glossary: ClassVar = {
        "bin": "Numbers between two quantiles of the training images; bins take the place of classes.",
        **GLOSSARY,
        "check": "A value with its own p-value: texture (early layer), content (chosen layer).",
        "R²": "Fraction of the variance of the numbers that is explained: 1 is perfect, 0 no better than their mean.",
        "NC4": "How often the nearest bin mean is that of the number's bin, on validation images.",
        "interval": "Contains the true number with the nominal coverage, on images like the calibration images.",
        "predicted deviation": (
            "Standard deviation that a prediction gives itself: noise, and what more data would remove."
        ),
        "RMSE": "Root mean squared error, in the unit of the number.",
        "NLL": "Mean of −log(predicted density of the true number); lower is better. Nats.",
        "CRPS": "Mean distance of the predicted distribution from the true number, in its unit; lower is better.",
    }
    wrong = "have a number outside of their interval"
    test_images = "images/test.csv"

    def scored_set(self, name: str, role: Role, data: ImageDataset, scored: ScoredNumbers) -> RegressionSet:
        """Return the data that reports keep of the scores of ``data``; true numbers of OOD images are dropped."""
        values = data.values if role.is_known else None
        return RegressionSet(
            name,
            role,
            scored.ood_score,
            scored.mean,
            scored.deviation,
            torch.empty(0, dtype=torch.float64) if values is None else values,
            quality={} if values is None else RegressionEvaluator().quality_of(scored, data),
            groups=parts_of(data),
        )

    def synthetic_set(self, name: str, model: PSCRegressor, packed: Float[Tensor, "n columns"]) -> RegressionSet:
        scored, none = numbers_of(model, packed), torch.empty(0, dtype=torch.float64)
        return RegressionSet(name, Role.SYNTHETIC, scored.ood_score, scored.mean, scored.deviation, none)

    def limits_of(
        self, policy: RegressionPolicy, calibration: Calibration, metrics: Mapping[str, Any]
    ) -> dict[str, float | None]:
        width = policy.max_width
        return {"deviations": None if width is None else width / 2 / calibration.quantile(policy.coverage)}

    def judge(
        self, images: RegressionSet, policy: RegressionPolicy, calibration: Calibration
    ) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
        half = calibration.quantile(policy.coverage) * images.deviation.double()
        widest = math.inf if policy.max_width is None else policy.max_width
        return ~(2 * half <= widest), (images.values - images.mean.double()).abs() > half

    def policy_lines(self, task: Regression, policy: RegressionPolicy, limits: Mapping[str, float | None]) -> list[str]:
        widest = "" if policy.max_width is None else f"{policy.max_width:g} {task.target.unit}".rstrip()
        return [
            f"intervals contain the true number of at least {policy.coverage:.1%} of images like the calibration "
            "images",
            f"uncertain: an interval wider than {widest}" if widest else "no interval is too wide",
        ]

    def accuracy_lost(self, base: Mapping[str, float], psc: Mapping[str, float]) -> str:
        grown = psc["rmse"] / base["rmse"] - 1 if base.get("rmse") else 0
        return f"{grown:.0%} of its RMSE" if grown > LOSS else ""

    def draw(self, facts: Facts) -> Figures:
        sets, target = facts.content.sets, cast(Regression, facts.manifest.task).target
        last, unit = facts.measured, f", {target.unit}" if target.unit else ""
        found: Figures = {
            "deviations": scores(sets, "deviation", f"predicted deviation{unit}", facts.limits["deviations"])
        }
        if isinstance(last, RegressionSet):
            found |= {
                "predictions": predictions(last, target),
                "coverage": coverage(last, cast(Calibration, facts.calibration)),
                "error-coverage": error_coverage(last, target),
            }
        return found
