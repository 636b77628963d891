"""The answers of a regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from app.tasks.base import GATES_OUTPUT, Datatype, ServedTask, unusual_components
from app.tasks.query import PredictQuery
from psc_core.tasks.regression.answer import SCORES
from psc_core.tasks.regression.decide import Decisions
from psc_core.tasks.regression.policy import MaxWidth
from psc_core.tasks.regression.task import Regression


class RegressionQuery(PredictQuery):
    """The query parameters of a request to a regression."""

    max_width: MaxWidth | None = Field(
        default=None,
        description="For regressions: `abstain_uncertain` if the interval is wider, in this request.",
    )


@dataclass(frozen=True)
class ServedRegression(ServedTask[Decisions]):
    """The answers of a regression, whose images metrics count by the name of the target."""

    task: Regression

    tensors: ClassVar[Mapping[str, Datatype]] = {
        **dict.fromkeys((*SCORES, "lower", "upper", GATES_OUTPUT), "FP32"),
        "is_ood": "BOOL",
    }
    query = RegressionQuery

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one ``RegressionExplanation`` for each image."""
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

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return (self.task.target.name,)

    def label_index(self, decisions: Decisions) -> npt.NDArray[np.int64]:
        return np.zeros(len(decisions), np.int64)


SERVED: Final = ServedRegression


def _nearest_examples(
    explanation: Mapping[str, npt.NDArray[Any]], image: int, layers: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one ``LayerNeighbours`` for each layer that the head reads."""
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
