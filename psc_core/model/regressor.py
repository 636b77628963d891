"""PSCRegressor: a fitted model of a number, ready to predict, save and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psc_core.model.base import FittedModel
from psc_core.tasks.regression.calibration import Calibration
from psc_core.tasks.regression.policy import ValuePolicy
from psc_core.tasks.regression.task import Regression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from psc_core.images.inputs import ImageLike
    from psc_core.target import Target
    from psc_core.tasks.outputs import FloatArray, Outputs
    from psc_core.tasks.regression.decide import Decisions
    from psc_core.tasks.regression.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class PSCRegressor(FittedModel):
    """A regression that says how sure it is of a number, and recognises images unlike any seen, in one forward pass.

    Its :attr:`classes` are the bins of the target that density and gates work on.  :func:`psc_core.fit_regressor` and
    ``psc-fit --task regression`` make one.

    Example:
        >>> PSCRegressor.load("artifacts/dirty-mnist-resnet18")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        psc_core.errors.BundleError: expected the bundle of a regression, ... is of a classifier; ...
    """

    task_type = Regression

    task: Regression
    calibration: Calibration = field(repr=False)
    policy: ValuePolicy  # default thresholds

    if TYPE_CHECKING:

        @property
        def target(self) -> Target: ...

        def predict(self, images: Sequence[ImageLike] | Tensor) -> Prediction: ...

        def decide(self, outputs: Outputs[FloatArray]) -> Decisions: ...
