"""The JSON of predictions against an object of Python values for each image."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from app.http.documents import Policy, predictions_json
from psc_core.model.decision import DECISIONS, Verdict, decide, judge
from psc_core.prediction import SCORES

CLASSES = ('a "quoted" label', "ä", "2")
LABELS = [json.dumps(name).encode() for name in CLASSES]
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
shares = st.floats(0, 1, width=32)
outputs_of_images = (
    st.integers(1, 5)
    .flatmap(
        lambda n: st.tuples(
            hnp.arrays(np.float32, (n, SCORES), elements=numbers), hnp.arrays(np.float32, (n, 3), elements=shares)
        )
    )
    .map(np.hstack)
)
policies = st.builds(Policy, alpha=shares, ambiguity_threshold=shares, coverage=st.just(0.9))


def judged(rows: Any, thresholds: Any, policy: Policy) -> Verdict:
    return judge(rows, thresholds, alpha=policy.alpha, ambiguity_threshold=policy.ambiguity_threshold)


def naive(row: Any, thresholds: Any, policy: Policy, top_k: int | None) -> dict[str, Any]:
    entropy, log_density, p_value, epistemic, ood_score, *probabilities = row
    best = max(range(3), key=lambda k: (probabilities[k], -k))
    is_ood = bool(p_value <= np.float32(policy.alpha))
    ambiguous = bool(entropy > np.float32(policy.ambiguity_threshold))
    answer: dict[str, Any] = {"label": CLASSES[best], "class_index": best, "confidence": probabilities[best]}
    if top_k is None:
        answer["probabilities"] = probabilities
    else:
        order = sorted(range(3), key=lambda k: -probabilities[k])[:top_k]
        answer["top"] = [{"label": CLASSES[k], "probability": probabilities[k]} for k in order]
    return {
        **answer,
        "predictive_entropy": entropy,
        "log_density": log_density,
        "ood_score": ood_score,
        "ood_p_value": p_value,
        "epistemic": epistemic,
        "is_ood": is_ood,
        "decision": DECISIONS[2 if is_ood else int(ambiguous)],
        "prediction_set": [CLASSES[k] for k in range(3) if probabilities[k] >= thresholds[k] or k == best],
    }


def as_float32(value: Any) -> Any:
    """Every number of a parsed document as the float32 that was printed."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(np.float32(text)))


@given(outputs_of_images, hnp.arrays(np.float32, 3, elements=shares), policies, st.none() | st.integers(1, 4))
def test_equals_the_naive_document(rows: Any, thresholds: Any, policy: Policy, top_k: int | None) -> None:
    texts = predictions_json(rows, judged(rows, thresholds, policy), LABELS, top_k=top_k)
    expected = [naive(row.tolist(), thresholds, policy, top_k) for row in rows]
    for text, document in zip(texts, expected, strict=True):
        parsed = json.loads(text)
        assert list(parsed) == list(document)
        assert as_float32(parsed) == document


def test_numbers_are_printed_in_few_digits() -> None:
    rows = np.array([[0.1, -0.3, 0.7, 0.2, 0.4, 0.25, 0.05, 0.7]], np.float32)
    (text,) = predictions_json(rows, judged(rows, np.ones(3, np.float32), Policy(0.05, 0.5, 0.9)), LABELS)
    assert b'"predictive_entropy":0.1,"log_density":-0.3,"ood_score":0.4,"ood_p_value":0.7' in text


def test_a_threshold_beyond_every_float32_is_never_reached() -> None:
    rows = np.array([[3e38, 0, 1, 0, 0, 1.0]], np.float32)
    assert judged(rows, np.ones(1, np.float32), Policy(0.05, 1e300, 0.9)).decision.tolist() == [0]


@given(outputs_of_images, policies)
def test_thresholds_of_each_image_decide_as_those_of_all(rows: Any, policy: Policy) -> None:
    each = [np.full(len(rows), value, np.float32) for value in (policy.alpha, policy.ambiguity_threshold)]
    for one, other in zip(decide(rows, policy.alpha, policy.ambiguity_threshold), decide(rows, *each), strict=True):
        np.testing.assert_array_equal(one, other)
