"""Regression: one number for each image, with its name and unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psc_core.errors import DataError
from psc_core.target import Target
from psc_core.tasks.head import Head
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.regression import NOUN, heads
from psc_core.tasks.regression.answer import DECISIONS, RESPONSE, SCORES, ValuePrediction
from psc_core.tasks.regression.calibration import Calibration, Thresholds
from psc_core.tasks.regression.decide import ABSTAIN_OOD, ABSTAIN_UNCERTAIN, Decisions, decide
from psc_core.tasks.regression.policy import ValuePolicy
from psc_core.tasks.regression.prediction import Prediction
from psc_core.tasks.task import GATES_OUTPUT, Datatype, Task, gate_members, score_members, unusual_components


class Regression(Task):
    """The task of a network that predicts a number."""

    name = "regression"
    noun = NOUN
    response = RESPONSE
    answer = ValuePrediction
    policy = ValuePolicy
    calibration = Calibration
    heads = heads.HEADS
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "uncertain": ABSTAIN_UNCERTAIN}
    tensors: ClassVar[Mapping[str, Datatype]] = {
        **dict.fromkeys((*SCORES, "lower", "upper", GATES_OUTPUT), "FP32"),
        "is_ood": "BOOL",
    }

    has_numbers = True

    target: Target

    @classmethod
    def is_of(cls, manifest: Mapping[str, Any]) -> bool:
        return manifest.get("target") is not None

    def manifest_fields(self) -> dict[str, Any]:
        return self.model_dump()

    def number(self) -> Target:
        return self.target

    def network_outputs(self, classes: Sequence[str]) -> int:
        return 1

    def probabilities(self, classes: Sequence[str]) -> int:
        return 0

    def epistemic_unit(self, head: Head) -> str:
        return f"standard deviation, {self.target.unit}".removesuffix(", ")

    def parse_label(self, text: str, classes: Sequence[str]) -> str:
        """Return a number as a log keeps it."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(f"expected a number for {self.target}, got {text!r}; correct the label")
        return repr(value)

    def decide(self, outputs: Outputs[FloatArray], thresholds: Thresholds) -> Decisions:
        return decide(outputs, thresholds)

    def prediction(self, outputs: Outputs[Tensor], decisions: Decisions, classes: tuple[str, ...]) -> Prediction:
        return Prediction(outputs, decisions, self.target)

    def documents(
        self, outputs: Outputs[FloatArray], decisions: Decisions, classes: Sequence[str], **options: Any
    ) -> list[dict[str, Any]]:
        """Return one :class:`.answer.ValuePrediction` for each image."""
        return [
            {
                **scores,
                "lower": decisions.lower[image],
                "upper": decisions.upper[image],
                **gates,
                "is_ood": bool(decisions.is_ood[image]),
                "decision": DECISIONS[decisions.decision[image]],
            }
            for image, (scores, gates) in enumerate(zip(score_members(outputs), gate_members(outputs), strict=True))
        ]

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one :class:`.answer.ValueExplanation` for each image."""
        return [
            {
                "nearest_bin": classes[nearest],
                "bin_distances": np.ascontiguousarray(explanation["class_distances"][image]),
                "unusual_components": unusual_components(explanation["component_deviation"][image]),
                **(
                    {"nearest_examples": _nearest_examples(explanation, image, layers)}
                    if "neighbour_image" in explanation
                    else {}
                ),
            }
            for image, nearest in enumerate(explanation["nearest_class"].tolist())
        ]

    def difference(self, outputs: Outputs[Tensor], other: Outputs[Tensor]) -> tuple[str, Tensor]:
        deviation = torch.hypot(outputs["aleatoric"], outputs["epistemic"])
        return "means", (outputs["mean"] - other["mean"]) / deviation

    def columns(self) -> dict[str, Any]:
        return {"target": Target, **super().columns()}

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return (self.target.name,)

    def label_index(self, decisions: Decisions) -> npt.NDArray[np.int64]:
        return np.zeros(len(decisions.decision), np.int64)


TASK: Final = Regression


def _nearest_examples(
    explanation: Mapping[str, npt.NDArray[Any]], image: int, layers: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one :class:`.answer.LayerNeighbours` for each layer that the head reads."""
    names = ("neighbour_image", "neighbour_value", "neighbour_distance")
    found = zip(layers, explanation["layer_weight"][image], *(explanation[name][image] for name in names), strict=True)
    return [
        {
            "layer": layer,
            "weight": float(weight),
            "examples": [
                {"image": int(position), "value": float(value), "distance": float(distance)}
                for position, value, distance in zip(positions, values, distances, strict=True)
            ],
        }
        for layer, weight, positions, values, distances in found
    ]
