"""The answers of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from app.tasks.base import GATES_OUTPUT, Datatype, ServedTask, unusual_components
from app.tasks.query import PredictQuery
from psc_core.tasks.classification.answer import SCORES
from psc_core.tasks.classification.decide import Decisions
from psc_core.tasks.classification.policy import AmbiguityThreshold
from psc_core.tasks.outputs import FloatArray, Outputs


class ClassificationQuery(PredictQuery):
    """The query parameters of a request to a classifier."""

    top_k: int | None = Field(
        default=None,
        ge=1,
        le=999_999_999,
        description="Return the `top_k` most probable classes as `top` instead of all `probabilities`.",
    )
    ambiguity_threshold: AmbiguityThreshold | None = Field(
        default=None,
        description="For classifiers: `abstain_ambiguous` above this predictive entropy (nats), in this request.",
    )


class ServedClassification(ServedTask[Decisions]):
    """The answers of a classifier."""

    tensors: ClassVar[Mapping[str, Datatype]] = {
        "probabilities": "FP32",
        **dict.fromkeys((*SCORES, GATES_OUTPUT), "FP32"),
        "is_ood": "BOOL",
        "label": "BYTES",
        "class_index": "INT64",
    }
    query = ClassificationQuery

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one ``ClassificationExplanation`` for each image.

        ``aleatoric`` and ``epistemic`` are None if the head does not split its uncertainty.
        """
        documents = []
        for image, nearest in enumerate(explanation["nearest_class"].tolist()):
            split = {name: explanation[name][image] for name in ("aleatoric", "epistemic") if name in explanation}
            documents.append(
                {
                    "nearest_class": classes[nearest],
                    "class_distances": np.ascontiguousarray(explanation["class_distances"][image]),
                    "unusual_components": unusual_components(explanation["component_deviation"][image]),
                    "aleatoric": None,
                    "epistemic": None,
                    **{name: float(value) for name, value in split.items()},
                }
            )
        return documents

    def tensor_shape(self, name: str, classes: Sequence[str], gates: Sequence[str]) -> list[int]:
        return [len(classes)] if name == "probabilities" else super().tensor_shape(name, classes, gates)

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: Decisions, classes: Sequence[str]
    ) -> npt.NDArray[Any] | list[str]:
        if name == "label":
            return decisions.labels(classes)
        return outputs.probabilities if name == "probabilities" else super().tensor(name, outputs, decisions, classes)

    def label_index(self, decisions: Decisions) -> npt.NDArray[np.int64]:
        return decisions.class_index


SERVED: Final = ServedClassification
