"""PSC: a fitted probabilistic skip connection, ready to predict, save and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psc_core.model.base import FittedModel
from psc_core.tasks.classification.calibration import Calibration
from psc_core.tasks.classification.policy import Policy
from psc_core.tasks.classification.task import Classification

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from psc_core.images.inputs import ImageLike
    from psc_core.tasks.classification.decide import Decisions
    from psc_core.tasks.classification.prediction import Prediction
    from psc_core.tasks.outputs import FloatArray, Outputs


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

    task_type = Classification

    task: Classification = field(default_factory=Classification)
    calibration: Calibration = field(repr=False)
    policy: Policy  # default thresholds

    if TYPE_CHECKING:

        def predict(self, images: Sequence[ImageLike] | Tensor) -> Prediction: ...

        def decide(self, outputs: Outputs[FloatArray]) -> Decisions: ...
