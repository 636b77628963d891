"""Several labels: each holds for an image or does not, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from psc_core.tasks.multilabel import NOUN, heads
from psc_core.tasks.multilabel.answer import RESPONSE, MultilabelAnswer
from psc_core.tasks.multilabel.calibration import Calibration
from psc_core.tasks.multilabel.decide import ABSTAIN_OOD, ABSTAIN_UNDECIDED
from psc_core.tasks.multilabel.policy import MultilabelPolicy
from psc_core.tasks.multilabel.prediction import MultilabelPrediction
from psc_core.tasks.task import Agreement, Task


class Multilabel(Task):
    """The task of a network with an independent output for each label."""

    name = "multilabel"
    noun = NOUN
    response_type = RESPONSE
    answer_type = MultilabelAnswer
    policy_type = MultilabelPolicy
    calibration_type = Calibration
    prediction_type = MultilabelPrediction
    heads = heads.HEADS
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "undecided": ABSTAIN_UNDECIDED}

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        return (("head.sizes.labels", len(manifest.classes), manifest.head and manifest.head.sizes.get("labels")),)


TASK: Final = Multilabel
