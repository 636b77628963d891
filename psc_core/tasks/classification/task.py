"""Classification: one class of several for each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from psc_core.tasks.classification import NOUN, heads
from psc_core.tasks.classification.answer import RESPONSE, ClassificationAnswer
from psc_core.tasks.classification.calibration import Calibration
from psc_core.tasks.classification.decide import ABSTAIN_AMBIGUOUS, ABSTAIN_OOD
from psc_core.tasks.classification.heads.temperature import TemperatureHead
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.classification.prediction import ClassificationPrediction
from psc_core.tasks.task import Agreement, Task


class Classification(Task):
    """A classifier's task."""

    name = "classification"
    noun = NOUN
    response_type = RESPONSE
    answer_type = ClassificationAnswer
    policy_type = ClassificationPolicy
    calibration_type = Calibration
    prediction_type = ClassificationPrediction
    output_heads: ClassVar = {TemperatureHead.kind: TemperatureHead}
    heads = heads.HEADS
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "ambiguous": ABSTAIN_AMBIGUOUS}
    limits: ClassVar = {**Task.limits, "ambiguity_threshold": "predictive_entropy"}

    @classmethod
    def is_of(cls, manifest: Mapping[str, Any]) -> bool:
        return bool(manifest.get("task", cls.name) == cls.name)  # Also of a manifest that names none.

    def manifest_fields(self) -> dict[str, Any]:
        return {}

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        head, classes = manifest.head, len(manifest.classes)
        is_own = head.kind in self.output_heads
        return (
            ("predictions", "base" if is_own else "psc", manifest.predictions),
            ("head.sizes.classes", classes, classes if is_own else head.sizes.get("classes")),
            ("head.layers (of a classifier)", list(manifest.layers) if head.layers else [], head.layers),
        )


TASK: Final = Classification
