"""The answers of a classifier against documents built from Python numbers for each image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from psc_core.answers import (
    CLASSIFICATION_DECISIONS,
    CLASSIFICATION_SCORES,
    ClassificationAnswer,
    ClassificationExplanation,
    ClassificationPolicy,
)
from psc_core.tasks.base import FloatArray, Outputs
from psc_core.tasks.classification import Classification, Thresholds

TASK = Classification()
CLASSES = ('a "quoted" label', "ä", "2")
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
fractions = st.floats(0, 1, width=32)
packed_outputs = (
    st.integers(1, 5)
    .flatmap(
        lambda n: st.tuples(
            hnp.arrays(np.float32, (n, len(CLASSIFICATION_SCORES)), elements=numbers),
            hnp.arrays(np.float32, (n, 3), elements=fractions),
        )
    )
    .map(np.hstack)
)
policies = st.builds(
    ClassificationPolicy,
    alpha=st.floats(2**-20, 1 - 2**-20, width=32),
    ambiguity_threshold=fractions,
    coverage=st.just(0.9),
)


def documents(
    outputs: Outputs[FloatArray], probability: float, policy: ClassificationPolicy, top_k: int | None = None
) -> list[Any]:
    """The documents as a client reads them."""
    decisions = Thresholds(policy, policy.alpha, probability).decide(outputs)
    built = decisions.documents(outputs, CLASSES[: outputs.probabilities.shape[1]], top_k=top_k)
    parsed: list[Any] = orjson.loads(orjson.dumps(built, option=orjson.OPT_SERIALIZE_NUMPY))
    return parsed


def naive(values: list[float], probability: float, policy: ClassificationPolicy, top_k: int | None) -> dict[str, Any]:
    entropy, log_density, ood_score, p_value, epistemic, *probabilities = values
    best = max(range(3), key=lambda k: (probabilities[k], -k))
    is_ood = bool(p_value <= np.float32(policy.alpha))
    ambiguous = bool(entropy > np.float32(policy.ambiguity_threshold))
    document: dict[str, Any] = {"label": CLASSES[best], "class_index": best, "confidence": probabilities[best]}
    if top_k is None:
        document["probabilities"] = probabilities
    else:
        order = sorted(range(3), key=lambda k: -probabilities[k])[:top_k]
        document["top"] = [{"label": CLASSES[k], "probability": probabilities[k]} for k in order]
    return {
        **document,
        "predictive_entropy": entropy,
        "log_density": log_density,
        "ood_score": ood_score,
        "ood_p_value": p_value,
        "epistemic": epistemic,
        "is_ood": is_ood,
        "decision": CLASSIFICATION_DECISIONS[2 if is_ood else int(ambiguous)],
        "prediction_set": [CLASSES[k] for k in range(3) if probabilities[k] >= probability or k == best],
    }


def as_float32(value: Any) -> Any:
    """Every number of a document as the float32 that was printed."""
    return orjson.loads(orjson.dumps(_rounded(value)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


@given(packed_outputs, fractions, policies, st.none() | st.integers(1, 4))
def test_equals_the_naive_document(
    packed: FloatArray, probability: float, policy: ClassificationPolicy, top_k: int | None
) -> None:
    expected = [naive(values, probability, policy, top_k) for values in packed.tolist()]
    got = documents(Outputs(packed, CLASSIFICATION_SCORES, ()), probability, policy, top_k)
    for document, naive_document in zip(got, expected, strict=True):
        assert list(document) == list(naive_document)
        assert as_float32(document) == naive_document


@given(packed_outputs, policies, st.none() | st.integers(1, 4))
def test_has_the_declared_fields(packed: FloatArray, policy: ClassificationPolicy, top_k: int | None) -> None:
    outputs = Outputs(packed, CLASSIFICATION_SCORES, ())
    outputs["ood_p_value"][:] = np.clip(outputs["ood_p_value"], 0, 1)
    for document in documents(outputs, 1.0, policy, top_k):
        assert ClassificationAnswer.model_validate(document).model_dump(exclude_none=True) == document


def test_numbers_are_printed_in_few_digits() -> None:
    outputs = Outputs(np.array([[0.1, -0.3, 0.4, 0.7, 0.2, 0.25, 0.05, 0.7]], np.float32), CLASSIFICATION_SCORES, ())
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9)
    decisions = Thresholds(policy, policy.alpha, 1.0).decide(outputs)
    text = orjson.dumps(decisions.documents(outputs, CLASSES), option=orjson.OPT_SERIALIZE_NUMPY)
    assert b'"predictive_entropy":0.1,"log_density":-0.3,"ood_score":0.4,"ood_p_value":0.7' in text


def test_checks_are_named() -> None:
    row = [0.1, -0.3, 0.4, 0.5, 0.2, 0.25, 0.05, 0.7, 0.125, 0.75]
    outputs = Outputs(np.array([row], np.float32), CLASSIFICATION_SCORES, ("texture", "content"))
    (document,) = documents(outputs, 1.0, ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9))
    assert document["checks"] == {"texture": 0.125, "content": 0.75}
    assert len(document["probabilities"]) == 3
    assert ClassificationAnswer.model_validate(document).model_dump(exclude_none=True) == document


def test_threshold_beyond_every_float32_is_never_reached() -> None:
    outputs = Outputs(np.array([[3e38, 0, 0, 1, 0, 1.0]], np.float32), CLASSIFICATION_SCORES, ())
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=1e300, coverage=0.9)
    assert documents(outputs, 1.0, policy)[0]["decision"] == "accept"


def explanation(**more: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    return {
        "nearest_class": np.array([1]),
        "class_distances": np.array([[3.0, 1.0, 2.0]], np.float32),
        "component_deviation": np.array([[0.5, -4.0, 1.0, 0.0, 2.0, -0.1, 3.0]], np.float32),
        **more,
    }


def test_explanation_names_the_most_unusual_components() -> None:
    split = {"aleatoric": np.array([0.5], np.float32), "epistemic": np.array([0.25], np.float32)}
    (document,) = TASK.explanations(explanation(**split), CLASSES, ("layer3",))
    document["class_distances"] = document["class_distances"].tolist()
    assert ClassificationExplanation.model_validate(document).model_dump() == {**document, "map": None, "nearest": None}
    assert document["nearest_class"] == "ä"
    assert [each["component"] for each in document["unusual_components"]] == [1, 6, 4, 2, 0]
    assert [each["deviation"] for each in document["unusual_components"]] == [-4.0, 3.0, 2.0, 1.0, 0.5]
    assert (document["aleatoric"], document["epistemic"]) == (0.5, 0.25)


def test_explanation_of_base_predictions_does_not_split_the_uncertainty() -> None:
    (document,) = TASK.explanations(explanation(), CLASSES, ("layer3",))
    assert (document["aleatoric"], document["epistemic"]) == (None, None)
