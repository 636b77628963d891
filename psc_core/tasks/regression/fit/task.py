"""The fit of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core import metrics as regression
from psc_core.collapse import LinearFit
from psc_core.compute import Compute
from psc_core.conformal import thinned
from psc_core.data.dataset import ImageDataset, known_values
from psc_core.errors import DataError
from psc_core.settings import FitSettings
from psc_core.tasks.fit.task import (
    FIRST_LOOK_IMAGES,
    WRONG_NETWORK,
    Calibrated,
    FirstLook,
    HeadJob,
    TaskFit,
    run_network,
)
from psc_core.tasks.head import Scored
from psc_core.tasks.policy import BETTER_THAN_GUESSING
from psc_core.tasks.regression.fit.bins import binned
from psc_core.tasks.regression.fit.calibrate import fit_calibration
from psc_core.tasks.regression.fit.head import fit_head
from psc_core.tasks.regression.heads.base import RegressionHead
from psc_core.tasks.regression.policy import RegressionPolicy
from psc_core.tasks.regression.task import Regression
from psc_core.tasks.task import Task


class RegressionFit(TaskFit):
    """The fit of a regression: density and gates work on bins of the numbers."""

    task_type = Regression
    layer_quality = LinearFit
    own_settings = ("max_width",)

    why_not_extended = "a regression's bundle does not keep where its bins part, which are the classes of its density"

    def takes(self, data: ImageDataset) -> bool:
        return data.target is not None

    def labelled(self, train: ImageDataset, val: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
        return binned(train, val)

    def check_half(self, images: ImageDataset) -> None:
        values = known_values(images.values)
        if bool((values == values[0]).all()):
            raise DataError(
                f"expected numbers that differ in each half of the validation images, of {images.name} all "
                f"{len(values)} of one half are {float(values[0]):g}; give more validation images"
            )

    def task(self, train: ImageDataset) -> Regression:
        if train.target is None:
            raise DataError(f"expected numbers in {train.name}, got {len(train.classes)} classes; give a table")
        return Regression(target=train.target)

    def check_same(self, task: Task, classes: Sequence[str], data: ImageDataset) -> None:
        wanted = cast(Regression, task).target
        if data.target != wanted:
            raise DataError(
                f"expected numbers of {wanted} in {data.name}, got {data.target or 'classes'}; give a table of these "
                f"numbers, in Python with target={wanted.name!r}, unit={wanted.unit!r}"
            )

    def describe_labels(self, train: ImageDataset) -> str:
        return f"numbers of {train.target}"

    def relabelled(self, task: Task, data: ImageDataset, labels: Sequence[str]) -> ImageDataset:
        return replace(data, target=task.number(), values=torch.tensor([*map(float, labels)], dtype=torch.float64))

    def confidence_gate(self, *, ambiguous: bool) -> tuple[bool, str]:
        return False, "a regression has no class probabilities, so confidence is no gate"

    def fit_head(self, job: HeadJob) -> RegressionHead:
        return fit_head(job)

    def calibrate(
        self,
        scored: Scored,
        ood_score: Float[Tensor, " n"],
        images: ImageDataset,
        settings: FitSettings,
        weights: Float[Tensor, " n"] | None = None,
        *,
        or_higher: bool = False,
    ) -> Calibrated:
        """Return OOD scores and residuals of the images; weighted ones are thinned for width and metrics.

        Without a ``max_width`` it is the width of one interval for all images: a wider one says less than none.
        """
        values, mean = known_values(images.values), scored.scores["mean"]
        deviation = torch.hypot(scored.scores["aleatoric"], scored.scores["epistemic"])
        calibration = fit_calibration(ood_score, mean, deviation, values, weights)
        if weights is not None:
            kept = thinned(weights)
            values, mean, deviation = values[kept], mean[kept], deviation[kept]
        metrics = calibration_metrics(mean, deviation, values)
        width = settings.max_width
        if width is None:
            width = metrics["width_without_image"] = width_without_image(values, settings.coverage)
        return Calibrated(
            calibration, RegressionPolicy(alpha=settings.alpha, max_width=width, coverage=settings.coverage), metrics
        )

    def first_look(self, net: nn.Module, train: ImageDataset, val: ImageDataset, compute: Compute) -> FirstLook:
        (of_train, _), (of_val, predicted) = (network_rmse(net, data, compute) for data in (train, val))
        spread, unit = float(known_values(train.values).std(correction=0)), f" {self.task(train).target.unit}".rstrip()
        text = (
            f"the network itself: RMSE {of_train:.4g} on training and {of_val:.4g}{unit} on validation images (at most "
            f"{FIRST_LOOK_IMAGES:,} of each), the deviation of the numbers is {spread:.4g}"
        )
        if not regression.rises_with(predicted, known_values(val.values)):
            return FirstLook(text, f"THE NETWORK IS NO BETTER THAN GUESSING ON VALIDATION IMAGES, {WRONG_NETWORK}")
        if of_val > spread:
            warning = "always predicting the mean would be better; is the network's output in the table's unit?"
            return FirstLook(text, warning)
        return FirstLook(f"{text}; if it should be lower, check the preprocessing")


FIT: Final = RegressionFit()


def calibration_metrics(
    mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]
) -> dict[str, Any]:
    """Return metrics of the calibration split, which selected nothing that they measure."""
    mean, deviation = mean.double(), deviation.double()
    return {
        "validation_images": len(values),
        "rmse": regression.rmse(mean, values),
        "r2": regression.r2(mean, values),
        BETTER_THAN_GUESSING: regression.rises_with(mean, values),
        "nll_nats": regression.gaussian_nll(mean, deviation, values),
        "crps": regression.crps(mean, deviation, values),
    }


def width_without_image(values: Float[Tensor, " n"], coverage: float) -> float:
    """Return how wide the interval is between the quantiles of the numbers that lie as far out as ``coverage`` says."""
    ends = torch.tensor([(1 - coverage) / 2, (1 + coverage) / 2], dtype=torch.float64)
    lower, upper = map(float, torch.quantile(values.double(), ends))
    # Where nearly all numbers are equal, any interval is wider.
    return max(upper - lower, float(torch.finfo(torch.float32).tiny))


def network_rmse(net: nn.Module, data: ImageDataset, compute: Compute) -> tuple[float, Float[Tensor, " n"]]:
    """Return the RMSE of the plain network on images with numbers, and what it predicts."""
    predicted = run_network(net, data, compute)[:, 0]
    return regression.rmse(predicted, known_values(data.values)), predicted
