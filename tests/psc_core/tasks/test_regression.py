"""The answers of a regression against documents built from Python numbers for each image."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from psc_core.answers import REGRESSION_SCORES, RegressionAnswer, RegressionExplanation, RegressionPolicy, Target
from psc_core.tasks.base import Outputs
from psc_core.tasks.regression import Regression, Thresholds

TASK = Regression(target=Target(name="angle", unit="degrees"))
ROWS = [[10.0, 3.0, 4.0, -1.0, 1.0, 0.5, 0.125], [-2.0, 0.5, 0.0, -9.0, 9.0, 0.01, 0.25], [1.0, 6.0, 8.0, 0, 0, 1, 1]]


def read(documents: list[dict[str, Any]]) -> Any:
    """The documents as a client reads them."""
    return orjson.loads(orjson.dumps(documents, option=orjson.OPT_SERIALIZE_NUMPY))


def test_equals_the_naive_document() -> None:
    outputs = Outputs(np.array(ROWS, np.float32), REGRESSION_SCORES, ("texture",))
    policy = RegressionPolicy(alpha=0.05, max_width=25.0, coverage=0.9)
    decided = Thresholds(policy, 0.05, 2.0).decide(outputs)
    documents = read(decided.documents(outputs, ("a", "b")))
    decisions = ("accept", "abstain_ood", "abstain_uncertain")
    for document, values, decision in zip(documents, ROWS, decisions, strict=True):
        mean, half = values[0], 2 * np.hypot(values[1], values[2])
        expected = {
            **dict(zip(REGRESSION_SCORES, values, strict=False)),
            "lower": mean - half,
            "upper": mean + half,
            "checks": {"texture": values[-1]},
            "is_ood": values[5] <= 0.05,
            "decision": decision,
        }
        assert document == expected and list(document) == list(expected)
        assert RegressionAnswer.model_validate(document).model_dump(exclude_none=True) == document


def test_explanation_names_the_nearest_examples_of_each_layer() -> None:
    explanation = {
        "nearest_class": np.array([1]),
        "class_distances": np.array([[3.0, 1.0]], np.float32),
        "component_deviation": np.array([[0.5, -4.0]], np.float32),
    }
    near = {
        "layer_weight": np.array([[0.75, 0.25]], np.float32),
        "neighbour_image": np.array([[[7, 3], [5, 7]]]),
        "neighbour_value": np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32),
        "neighbour_distance": np.array([[[0.5, 1.5], [0.25, 2.0]]], np.float32),
    }
    (plain,) = read(TASK.explanations(explanation, ("a", "b"), ("z",)))
    assert plain["nearest_bin"] == "b" and "nearest_examples" not in plain
    (told,) = read(TASK.explanations({**explanation, **near}, ("a", "b"), ("z", "layer1")))
    layers = RegressionExplanation.model_validate(told).nearest_examples
    assert layers is not None
    assert [(each.layer, each.weight) for each in layers] == [("z", 0.75), ("layer1", 0.25)]
    assert [(each.image, each.value, each.distance) for each in layers[1].examples] == [(5, 3.0, 0.25), (7, 4.0, 2.0)]
