"""PSCRegressor: a fitted model of a number, ready to predict, save and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from psc_core.calibration.intervals import ValueCalibration
from psc_core.model.base import FittedModel
from psc_core.model.decision import ValueDecisions, decide_values
from psc_core.model.inputs import ImageLike
from psc_core.model.outputs import FloatArray, Outputs
from psc_core.model.value_predictions import ValuePredictions
from psc_core.policy import ValuePolicy
from psc_core.target import Target


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

    is_regression: ClassVar[bool] = True

    calibration: ValueCalibration = field(repr=False)
    policy: ValuePolicy  # default thresholds
    target: Target

    def predict(self, images: Sequence[ImageLike] | Tensor) -> ValuePredictions:
        """The number of each image with its uncertainty.

        Args:
            images: As of :meth:`psc_core.PSC.predict`.

        Raises:
            ImageError: An image cannot be decoded.
            UsageError: Another type, a file that cannot be read, or a tensor of another shape.
        """
        outputs = self.compute(images)
        return ValuePredictions(outputs, self.decide(self.outputs(outputs.packed.numpy())), self.target)

    def decide(self, outputs: Outputs[FloatArray]) -> ValueDecisions:
        """Decisions under the bundle's policy."""
        return decide_values(outputs, self.calibration.thresholds(self.policy))
