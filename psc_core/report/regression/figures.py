"""Draw the figures that only a regression's report has; see :mod:`psc_core.report.figures` for the others.

y is the true number of an image; μ and σ are the predicted number and its deviation, all in the target's unit.
"""

from __future__ import annotations

import math
from typing import Final, cast

import torch
from matplotlib.figure import Figure

from psc_core.report.facts import Facts
from psc_core.report.figures import KNOWN, LIMIT, UNKNOWN, Figures, axes_of, scores
from psc_core.report.regression.sets import RegressionSet
from psc_core.target import Target
from psc_core.tasks.regression.calibration import Calibration
from psc_core.tasks.regression.task import Regression

COVERAGES: Final = 19
"""The number of nominal coverages, evenly spaced between 0 and 1, at which intervals are checked."""


def draw(facts: Facts) -> Figures:
    sets, target = facts.content.sets, cast(Regression, facts.manifest.task).target
    last, unit = facts.measured, f", {target.unit}" if target.unit else ""
    found: Figures = {"deviations": scores(sets, "deviation", f"predicted deviation{unit}", facts.limits["deviations"])}
    if isinstance(last, RegressionSet):
        found |= {
            "predictions": predictions(last, target),
            "coverage": coverage(last, cast(Calibration, facts.calibration)),
            "error-coverage": error_coverage(last, target),
        }
    return found


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
