"""PSC: a fitted probabilistic skip connection, ready to predict, save and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from psc_core.calibration.conformal import Calibration
from psc_core.model.base import FittedModel
from psc_core.model.decision import Decisions, decide
from psc_core.model.inputs import ImageLike
from psc_core.model.outputs import FloatArray, Outputs
from psc_core.model.prediction import Prediction
from psc_core.policy import Policy


@dataclass(frozen=True, kw_only=True)
class PSC(FittedModel):
    """A classifier that recognises ambiguous and out-of-distribution images, in one forward pass.

    Example:
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> psc = PSC.load(bundle)
        >>> prediction = psc.predict([f"{bundle}/examples/{name}.png" for name in ("clean", "shirt")])
        >>> prediction.decision
        ('accept', 'abstain_ood')
    """

    calibration: Calibration = field(repr=False)
    policy: Policy  # default thresholds

    def predict(self, images: Sequence[ImageLike] | Tensor) -> Prediction:
        """Classify images with uncertainty.

        Args:
            images: A list of paths, encoded files (bytes), Pillow images or ``uint8`` arrays (height, width) or
                (height, width, 3), of any size; or a tensor ``uint8 (n, channels, height, width)`` already of the
                network's input size.

        Raises:
            ImageError: An image cannot be decoded.
            UsageError: Another type, a file that cannot be read, or a tensor of another shape.
        """
        outputs = self.compute(images)
        return Prediction(outputs, self.decide(self.outputs(outputs.packed.numpy())), self.classes)

    def decide(self, outputs: Outputs[FloatArray]) -> Decisions:
        """Decisions under the bundle's policy."""
        return decide(outputs, self.calibration.thresholds(self.policy))
