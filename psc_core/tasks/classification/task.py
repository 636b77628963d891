"""Classification: one class of several for each image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from psc_core.tasks.classification import NOUN, heads
from psc_core.tasks.classification.answer import DECISIONS, RESPONSE, SCORES, ImagePrediction
from psc_core.tasks.classification.calibration import ROUNDING, Calibration, Thresholds
from psc_core.tasks.classification.decide import ABSTAIN_AMBIGUOUS, ABSTAIN_OOD, Decisions, decide
from psc_core.tasks.classification.heads.own import OwnHead
from psc_core.tasks.classification.policy import Policy
from psc_core.tasks.classification.prediction import Prediction
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.task import GATES_OUTPUT, Agreement, Datatype, Task, gate_members, score_members, unusual_components


class Classification(Task):
    """A classifier's task."""

    name = "classification"
    noun = NOUN
    response = RESPONSE
    answer = ImagePrediction
    policy = Policy
    calibration = Calibration
    own_heads: ClassVar = {OwnHead.kind: OwnHead}
    heads = heads.HEADS
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "ambiguous": ABSTAIN_AMBIGUOUS}
    limits: ClassVar = {**Task.limits, "ambiguity_threshold": "predictive_entropy"}
    tensors: ClassVar[Mapping[str, Datatype]] = {
        "probabilities": "FP32",
        **dict.fromkeys((*SCORES, GATES_OUTPUT), "FP32"),
        "is_ood": "BOOL",
        "label": "BYTES",
        "class_index": "INT64",
    }
    request_options = frozenset({"top_k"})

    @classmethod
    def is_of(cls, manifest: Mapping[str, Any]) -> bool:
        return bool(manifest.get("task", cls.name) == cls.name)  # Also of a manifest that names none.

    def manifest_fields(self) -> dict[str, Any]:
        return {}

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        head, classes = manifest.head, len(manifest.classes)
        is_own = head.kind in self.own_heads
        return (
            ("predictions", "base" if is_own else "psc", manifest.predictions),
            ("head.sizes.classes", classes, classes if is_own else head.sizes.get("classes")),
            ("head.layers (of a classifier)", list(manifest.layers) if head.layers else [], head.layers),
        )

    def notes(self, policy: Policy, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        if policy.ambiguity_threshold <= math.log(len(classes)) + ROUNDING:
            return []
        risk = metrics.get("risk", {"threshold": policy.ambiguity_threshold})
        if risk["threshold"] is not None:
            return [f"no image is called ambiguous: no entropy is above {policy.ambiguity_threshold:.4g} nats"]
        nearest = risk.get("nearest")
        way_out = f"{nearest:g} is the nearest that one keeps: --risk {nearest:g}" if nearest else "raise --risk"
        return [
            f"no image is called ambiguous: no entropy threshold keeps the error rate at {risk['promised']:g} with "
            f"{risk['confidence']:.0%} confidence; {way_out}, or validate on more images"
        ]

    def decide(self, outputs: Outputs[FloatArray], thresholds: Thresholds) -> Decisions:
        return decide(outputs, thresholds)

    def prediction(self, outputs: Outputs[Tensor], decisions: Decisions, classes: tuple[str, ...]) -> Prediction:
        return Prediction(outputs, decisions, classes)

    def documents(
        self,
        outputs: Outputs[FloatArray],
        decisions: Decisions,
        classes: Sequence[str],
        *,
        top_k: int | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Return one :class:`.answer.ImagePrediction` for each image, with ``top_k`` classes where that is given."""
        probabilities = np.ascontiguousarray(outputs.probabilities)
        scores, gates, documents = score_members(outputs), gate_members(outputs), []
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
                    **scores[image],
                    **gates[image],
                    "is_ood": bool(decisions.is_ood[image]),
                    "decision": DECISIONS[decisions.decision[image]],
                    "prediction_set": [classes[k] for k in decisions.prediction_set[image].nonzero()[0].tolist()],
                }
            )
        return documents

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one :class:`.answer.Explanation` for each image.

        ``aleatoric`` and ``epistemic`` are ``None`` where the head does not split its uncertainty.
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

    def labels(self, decisions: Decisions, classes: Sequence[str]) -> list[str]:
        return [classes[k] for k in decisions.class_index.tolist()]

    def tensor_shape(self, name: str, classes: Sequence[str], gates: Sequence[str]) -> list[int]:
        return [len(classes)] if name == "probabilities" else super().tensor_shape(name, classes, gates)

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: Decisions, classes: Sequence[str]
    ) -> npt.NDArray[Any] | list[str]:
        if name == "label":
            return self.labels(decisions, classes)
        return outputs.probabilities if name == "probabilities" else super().tensor(name, outputs, decisions, classes)

    def label_index(self, decisions: Decisions) -> npt.NDArray[np.int64]:
        return decisions.class_index


TASK: Final = Classification


def _most_probable(probabilities: FloatArray, classes: Sequence[str], count: int) -> list[dict[str, Any]]:
    best = np.argsort(-probabilities, kind="stable")[:count].tolist()
    return [{"label": classes[k], "probability": probabilities[k]} for k in best]
