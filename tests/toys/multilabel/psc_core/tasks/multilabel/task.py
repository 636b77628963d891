"""Several labels: each holds for an image or does not, whatever the others do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from psc_core.tasks.multilabel import NOUN, heads
from psc_core.tasks.multilabel.answer import DECISIONS, RESPONSE, SCORES, LabelPrediction
from psc_core.tasks.multilabel.calibration import Calibration, Thresholds
from psc_core.tasks.multilabel.decide import ABSTAIN_OOD, ABSTAIN_UNDECIDED, Decisions, decide
from psc_core.tasks.multilabel.policy import LabelPolicy
from psc_core.tasks.multilabel.prediction import Prediction
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.task import (
    GATES_OUTPUT,
    Agreement,
    Datatype,
    Task,
    gate_members,
    score_members,
    unusual_components,
)

PER_LABEL: Final[Mapping[str, Datatype]] = {"probabilities": "FP32", "holds": "BOOL", "undecided": "BOOL"}
"""Tensors with a number for each label."""


class MultiLabel(Task):
    """The task of a network with an independent output for each label."""

    name = "multilabel"
    noun = NOUN
    response = RESPONSE
    answer = LabelPrediction
    policy = LabelPolicy
    calibration = Calibration
    heads = heads.HEADS
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "undecided": ABSTAIN_UNDECIDED}
    tensors: ClassVar[Mapping[str, Datatype]] = {
        **PER_LABEL,
        **dict.fromkeys((*SCORES, GATES_OUTPUT), "FP32"),
        "is_ood": "BOOL",
    }

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        return (("head.sizes.labels", len(manifest.classes), manifest.head and manifest.head.sizes.get("labels")),)

    def decide(self, outputs: Outputs[FloatArray], thresholds: Thresholds) -> Decisions:
        return decide(outputs, thresholds)

    def prediction(self, outputs: Outputs[Tensor], decisions: Decisions, classes: tuple[str, ...]) -> Prediction:
        return Prediction(outputs, decisions, classes)

    def documents(
        self, outputs: Outputs[FloatArray], decisions: Decisions, classes: Sequence[str], **options: Any
    ) -> list[dict[str, Any]]:
        """Return one :class:`.answer.LabelPrediction` for each image."""
        probabilities = np.ascontiguousarray(outputs.probabilities)
        return [
            {
                "labels": [classes[k] for k in decisions.holds[image].nonzero()[0].tolist()],
                "undecided": [classes[k] for k in decisions.undecided[image].nonzero()[0].tolist()],
                "probabilities": probabilities[image],
                **scores,
                **gates,
                "is_ood": bool(decisions.is_ood[image]),
                "decision": DECISIONS[decisions.decision[image]],
            }
            for image, (scores, gates) in enumerate(zip(score_members(outputs), gate_members(outputs), strict=True))
        ]

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one :class:`.answer.LabelExplanation` for each image."""
        return [
            {"nearest_label": classes[nearest], "unusual_components": unusual_components(deviation)}
            for nearest, deviation in zip(
                explanation["nearest_class"].tolist(), explanation["component_deviation"], strict=True
            )
        ]

    def tensor_shape(self, name: str, classes: Sequence[str], gates: Sequence[str]) -> list[int]:
        return [len(classes)] if name in PER_LABEL else super().tensor_shape(name, classes, gates)

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: Decisions, classes: Sequence[str]
    ) -> npt.NDArray[Any] | list[str]:
        return outputs.probabilities if name == "probabilities" else super().tensor(name, outputs, decisions, classes)

    def label_index(self, decisions: Decisions) -> npt.NDArray[np.int64]:
        return decisions.most_probable


TASK: Final = MultiLabel
