"""The JSON answer to a prediction request, built from outputs and decisions by the names of their fields.

numpy values go to orjson as they are: a float32 number is printed in as few digits as tell it from its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from app.models.served import Predicted, ServedModel
from psc_core.model.decision import Decisions, ValueDecisions
from psc_core.model.outputs import FloatArray, Outputs
from psc_core.policy import Policy, ValuePolicy
from psc_core.prediction import DECISIONS, SCORES
from psc_core.value_prediction import VALUE_DECISIONS, VALUE_SCORES

UNUSUAL_COMPONENTS: Final = 5
"""How many components an explanation names."""


def predict_response(
    served: ServedModel, policy: Policy | ValuePolicy, predicted: Predicted, *, top_k: int | None = None
) -> bytes:
    """The JSON of a :class:`app.response.PredictResponse`, or of a :class:`app.response.ValueResponse`.

    Args:
        served: The model that answered.
        policy: Policy of the decisions.
        predicted: Finite outputs, decisions and, where it is asked for, an explanation.
        top_k: Give the ``top`` most probable classes in order instead of all ``probabilities``.
    """
    model, (outputs, decisions, explanation) = served.model, predicted
    explained: list[dict[str, Any]] = []
    if isinstance(decisions, Decisions):
        predictions = prediction_documents(outputs, decisions, model.classes, top_k=top_k)
        if explanation:
            explained = explanation_documents(explanation, model.classes)
    else:
        predictions = value_documents(outputs, decisions)
        if explanation:
            explained = value_explanation_documents(explanation, model.classes, model.head_layers)
    for document, more in zip(predictions, explained, strict=False):
        document["explanation"] = more
    document = {
        "model": {"name": served.name, "version": model.version, "layer": model.layer},
        **({} if model.target is None else {"target": model.target.model_dump()}),
        "policy": policy.model_dump(),
        "predictions": predictions,
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def prediction_documents(
    outputs: Outputs[FloatArray], decisions: Decisions, classes: Sequence[str], *, top_k: int | None = None
) -> list[dict[str, Any]]:
    """One :class:`psc_core.prediction.ImagePrediction` for each image."""
    probabilities = np.ascontiguousarray(outputs.probabilities)
    of_gates = outputs.gate_p_values
    documents = []
    for image, class_index in enumerate(decisions.class_index.tolist()):
        documents.append(
            {
                "label": classes[class_index],
                "class_index": class_index,
                "confidence": decisions.confidence[image],
                **(
                    {"probabilities": probabilities[image]}
                    if top_k is None
                    else {"top": _most_probable(probabilities[image], classes, top_k)}
                ),
                **{name: outputs[name][image] for name in SCORES},
                **({"gates": dict(zip(outputs.gates, of_gates[image], strict=True))} if outputs.gates else {}),
                "is_ood": bool(decisions.is_ood[image]),
                "decision": DECISIONS[decisions.decision[image]],
                "prediction_set": [classes[k] for k in decisions.prediction_set[image].nonzero()[0].tolist()],
            }
        )
    return documents


def value_documents(outputs: Outputs[FloatArray], decisions: ValueDecisions) -> list[dict[str, Any]]:
    """One :class:`psc_core.value_prediction.ValuePrediction` for each image."""
    of_gates = outputs.gate_p_values
    return [
        {
            **{name: outputs[name][image] for name in VALUE_SCORES},
            "lower": decisions.lower[image],
            "upper": decisions.upper[image],
            **({"gates": dict(zip(outputs.gates, of_gates[image], strict=True))} if outputs.gates else {}),
            "is_ood": bool(decisions.is_ood[image]),
            "decision": VALUE_DECISIONS[decisions.decision[image]],
        }
        for image in range(len(outputs))
    ]


def explanation_documents(explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str]) -> list[dict[str, Any]]:
    """One :class:`psc_core.prediction.Explanation` for each image.

    ``aleatoric`` and ``epistemic`` are ``None`` where the head does not split its uncertainty.
    """
    documents = []
    for image, nearest in enumerate(explanation["nearest_class"].tolist()):
        split = {name: explanation[name][image] for name in ("aleatoric", "epistemic") if name in explanation}
        documents.append(
            {
                "nearest_class": classes[nearest],
                "class_distances": np.ascontiguousarray(explanation["class_distances"][image]),
                "unusual_components": _unusual_components(explanation["component_deviation"][image]),
                "aleatoric": None,
                "epistemic": None,
                **{name: float(value) for name, value in split.items()},
            }
        )
    return documents


def value_explanation_documents(
    explanation: Mapping[str, npt.NDArray[Any]], bins: Sequence[str], head_layers: Sequence[str]
) -> list[dict[str, Any]]:
    """One :class:`psc_core.value_prediction.ValueExplanation` for each image."""
    return [
        {
            "nearest_bin": bins[nearest],
            "bin_distances": np.ascontiguousarray(explanation["class_distances"][image]),
            "unusual_components": _unusual_components(explanation["component_deviation"][image]),
            **(
                {"nearest_examples": _nearest_examples(explanation, image, head_layers)}
                if "neighbour_image" in explanation
                else {}
            ),
        }
        for image, nearest in enumerate(explanation["nearest_class"].tolist())
    ]


def _nearest_examples(
    explanation: Mapping[str, npt.NDArray[Any]], image: int, layers: Sequence[str]
) -> list[dict[str, Any]]:
    """One :class:`psc_core.value_prediction.LayerNeighbours` for each layer that the head reads."""
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


def _unusual_components(deviation: FloatArray) -> list[dict[str, Any]]:
    unusual = np.argsort(-np.abs(deviation), kind="stable")[:UNUSUAL_COMPONENTS].tolist()
    return [{"component": component, "deviation": float(deviation[component])} for component in unusual]


def _most_probable(probabilities: FloatArray, classes: Sequence[str], count: int) -> list[dict[str, Any]]:
    best = np.argsort(-probabilities, kind="stable")[:count].tolist()
    return [{"label": classes[k], "probability": probabilities[k]} for k in best]
