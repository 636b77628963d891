"""Verdicts as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from psc_core.model.decision import DECISIONS, FloatArray, Rows, Verdict
from psc_core.model.pipeline import SCORES

UNUSUAL_COMPONENTS: Final = 5
"""How many components an explanation names."""


class Policy(NamedTuple):
    """What turns numbers into decisions.

    Attributes:
        alpha: Out of distribution when p ≤ alpha.
        ambiguity_threshold: Ambiguous when the predictive entropy is above it, nats.
        coverage: Share of images whose prediction set holds the true label.
    """

    alpha: float
    ambiguity_threshold: float
    coverage: float


def predictions_json(
    rows: Rows,
    verdict: Verdict,
    labels: Sequence[bytes],
    *,
    top_k: int | None = None,
    explanations: Sequence[Mapping[str, Any]] | None = None,
) -> list[bytes]:
    """The JSON object of each image, in order; float32 numbers are printed in as few digits as tell them apart.

    All numbers are printed in one call and then put in their places: an object of Python values for each image
    costs five times as much.

    Args:
        rows: (n, SCORES + K) packed ``psc_core.model.pipeline.Outputs``, finite.
        verdict: Of these rows.
        labels: K labels as JSON.
        top_k: Give the ``top`` most probable classes in order instead of all ``probabilities``.
        explanations: One for each image, to be added.
    """
    sets: list[list[bytes]] = [[] for _ in rows]
    for image, index in zip(*(each.tolist() for each in verdict.prediction_set.nonzero()), strict=True):
        sets[image].append(labels[index])
    columns = zip(
        dump(np.ascontiguousarray(rows))[2:-2].split(b"],["),
        dump(verdict.confidence)[1:-1].split(b","),
        verdict.class_index.tolist(),
        verdict.is_ood.tolist(),
        verdict.decision.tolist(),
        sets,
        strict=True,
    )
    answers = []
    for image, (row, confidence, index, is_ood, decision, members) in enumerate(columns):
        entropy, log_density, p_value, epistemic, score, probabilities = row.split(b",", SCORES)
        if top_k is None:
            shares = b'"probabilities":[%b]' % probabilities
        else:
            shares = b'"top":[%b]' % _top(verdict.probabilities[image], probabilities.split(b","), labels, top_k)
        answers.append(
            b'{"label":%b,"class_index":%d,"confidence":%b,%b,"predictive_entropy":%b,"log_density":%b,"ood_score":%b,'
            b'"ood_p_value":%b,"epistemic":%b,"is_ood":%b,"decision":"%b","prediction_set":[%b]%b}'
            % (
                labels[index],
                index,
                confidence,
                shares,
                entropy,
                log_density,
                score,
                p_value,
                epistemic,
                b"true" if is_ood else b"false",
                _DECISIONS[decision],
                b",".join(members),
                b"" if explanations is None else b',"explanation":' + dump(explanations[image]),
            )
        )
    return answers


_DECISIONS: Final = tuple(name.encode() for name in DECISIONS)


def _top(probabilities: FloatArray, texts: Sequence[bytes], labels: Sequence[bytes], count: int) -> bytes:
    best = np.argsort(-probabilities, kind="stable")[:count].tolist()
    return b",".join(b'{"label":%b,"probability":%b}' % (labels[k], texts[k]) for k in best)


def dump(document: Any) -> bytes:
    """JSON bytes of a document that may hold numpy scalars and arrays."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY, default=_contiguous)


def _contiguous(value: Any) -> Any:
    return value.tolist()


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
