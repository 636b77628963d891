"""The answers of a model of several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from app.tasks.base import GATES_OUTPUT, Datatype, ServedTask, unusual_components
from app.tasks.query import PredictQuery
from psc_core.tasks.multilabel.answer import SCORES
from psc_core.tasks.multilabel.decide import Decisions
from psc_core.tasks.multilabel.policy import MaxUndecided
from psc_core.tasks.outputs import FloatArray, Outputs

PER_LABEL: Final[Mapping[str, Datatype]] = {"probabilities": "FP32", "holds": "BOOL", "undecided": "BOOL"}
"""Tensors with a number for each label."""


class MultilabelQuery(PredictQuery):
    """The query parameters of a request to a model of several labels."""

    max_undecided: MaxUndecided | None = Field(
        default=None, description="Of several labels: undecided with more undecided labels than this, in this request."
    )


class ServedMultilabel(ServedTask[Decisions]):
    """The answers of a model of several labels."""

    tensors: ClassVar[Mapping[str, Datatype]] = {
        **PER_LABEL,
        **dict.fromkeys((*SCORES, GATES_OUTPUT), "FP32"),
        "is_ood": "BOOL",
    }
    query = MultilabelQuery

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one ``MultilabelExplanation`` for each image."""
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


SERVED: Final = ServedMultilabel
