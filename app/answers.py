"""Rows → verdicts: labels, decisions and prediction sets under a policy, as arrays over the images.

A row is one image's packed ``psc_core.pipeline.Outputs``:
predictive entropy (nats), log density (nats), p-value, epistemic uncertainty, K probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.step import Rows

ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(3)
DECISIONS: Final = ("accept", "abstain_ambiguous", "abstain_ood")
"""Names of the decision codes in :class:`Verdict`."""

UNUSUAL_COMPONENTS: Final = 5
"""How many components an explanation names."""

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Policy:
    """What turns numbers into decisions.

    Attributes:
        alpha: Out of distribution when p ≤ alpha.
        ambiguity_threshold: Ambiguous when the predictive entropy is above it, nats.
        coverage: Share of images whose prediction set holds the true label.
    """

    alpha: float
    ambiguity_threshold: float
    coverage: float

    def to_json(self) -> dict[str, float]:
        """As the answer reports it."""
        return {
            "alpha": self.alpha,
            "ambiguity_threshold": self.ambiguity_threshold,
            "coverage": self.coverage,
        }


@dataclass(frozen=True)
class Verdict:
    """What is said of n images; every array has n first.

    Attributes:
        policy: Under which it was said.
        class_index: int64, the most probable class.
        confidence: Its probability.
        probabilities: (n, K).
        predictive_entropy: Nats.
        log_density: log p(z), nats.
        ood_p_value: Share of calibration images at least as unusual.
        epistemic: In the head's own unit.
        is_ood: bool, p ≤ alpha.
        decision: int8 code, an index into :data:`DECISIONS`.
        prediction_set: bool (n, K), the classes in the set.
    """

    policy: Policy
    class_index: npt.NDArray[np.int64]
    confidence: FloatArray
    probabilities: FloatArray
    predictive_entropy: FloatArray
    log_density: FloatArray
    ood_p_value: FloatArray
    epistemic: FloatArray
    is_ood: npt.NDArray[np.bool_]
    decision: npt.NDArray[np.int8]
    prediction_set: npt.NDArray[np.bool_]


def judge(rows: Rows, set_thresholds: FloatArray, policy: Policy) -> Verdict:
    """Apply ``policy`` to rows.

    Args:
        rows: (n, 4 + K).
        set_thresholds: (K,) smallest probability with which a class is in the prediction set; the most
            probable class always is (``Calibration.set_thresholds``).
        policy: The other thresholds.
    """
    probabilities = rows[:, 4:]
    predictive_entropy, p_value = rows[:, 0], rows[:, 2]
    class_index = probabilities.argmax(axis=1)
    images = np.arange(len(rows))
    prediction_set = probabilities >= set_thresholds
    prediction_set[images, class_index] = True
    is_ood = p_value <= policy.alpha
    decision = (predictive_entropy > policy.ambiguity_threshold).astype(np.int8)
    decision[is_ood] = ABSTAIN_OOD
    return Verdict(
        policy=policy,
        class_index=class_index,
        confidence=probabilities[images, class_index],
        probabilities=probabilities,
        predictive_entropy=predictive_entropy,
        log_density=rows[:, 1],
        ood_p_value=p_value,
        epistemic=rows[:, 3],
        is_ood=is_ood,
        decision=decision,
        prediction_set=prediction_set,
    )


def predictions_json(verdict: Verdict, classes: Sequence[str], *, top_k: int | None) -> list[dict[str, Any]]:
    """One JSON object for each image, in order; numbers stay float32 so that they print in few digits.

    Args:
        verdict: What to say.
        classes: K labels.
        top_k: Give the ``top`` most probable classes in order instead of all ``probabilities``.
    """
    columns = zip(
        verdict.class_index.tolist(),
        verdict.confidence,
        verdict.probabilities,
        verdict.predictive_entropy,
        verdict.log_density,
        verdict.ood_p_value,
        verdict.epistemic,
        verdict.is_ood.tolist(),
        verdict.decision.tolist(),
        verdict.prediction_set,
        strict=True,
    )
    answers = []
    for index, confidence, shares, entropy, log_density, p_value, epistemic, is_ood, code, members in columns:
        answer = {"label": classes[index], "class_index": index, "confidence": confidence}
        if top_k is None:
            answer["probabilities"] = shares
        else:
            best = np.argsort(-shares, kind="stable")[:top_k]
            answer["top"] = [{"label": classes[k], "probability": shares[k]} for k in best]
        answer["predictive_entropy"] = entropy
        answer["log_density"] = log_density
        answer["ood_score"] = -log_density
        answer["ood_p_value"] = p_value
        answer["epistemic"] = epistemic
        answer["is_ood"] = is_ood
        answer["decision"] = DECISIONS[code]
        answer["prediction_set"] = [classes[k] for k in members.nonzero()[0].tolist()]
        answers.append(answer)
    return answers


def explanations_json(
    arrays: dict[str, npt.NDArray[Any]], verdict: Verdict, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """One explanation for each image from the arrays of ``Pipeline.explain``.

    ``aleatoric`` and ``epistemic`` are ``None`` where the head does not split its uncertainty.
    """
    explanations = []
    for image in range(len(verdict.class_index)):
        deviation = arrays["component_deviation"][image]
        unusual = np.argsort(-np.abs(deviation), kind="stable")[:UNUSUAL_COMPONENTS]
        explanations.append(
            {
                "nearest_class": classes[int(arrays["nearest_class"][image])],
                "class_distances": arrays["class_distances"][image],
                "unusual_components": [
                    {"component": int(component), "deviation": float(deviation[component])} for component in unusual
                ],
                "calibration_rank": float(verdict.ood_p_value[image]),
                "aleatoric": _scalar(arrays.get("aleatoric"), image),
                "epistemic": _scalar(arrays.get("epistemic"), image),
            }
        )
    return explanations


def _scalar(array: npt.NDArray[Any] | None, image: int) -> float | None:
    return None if array is None else float(array[image])
