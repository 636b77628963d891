"""The interface of a task: what a model predicts, and how that is decided, answered and described.

A :class:`Task` is a value.  Its fields are what a manifest keeps of it, as the target of a regression; everything else
is the same for all models of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from psc_core.errors import DataError, listed
from psc_core.fitted import restore
from psc_core.target import Target
from psc_core.tasks import TASKS, module_of
from psc_core.tasks.answer import ASKED_FOR, BaseAnswer, Response
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.head import Head
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy
from psc_core.tasks.prediction import BasePrediction

Datatype = Literal["FP32", "INT64", "UINT8", "BOOL", "BYTES"]
"""Types of a tensor of the Open Inference Protocol."""

GATES_OUTPUT: Final = "gates"
"""The tensor of the gates' p-values, in the order of a model's gates."""

UNUSUAL_COMPONENTS: Final = 5
"""Number of components that an explanation names."""

Agreement = tuple[str, Any, Any]
"""A field of the manifest by its place in the JSON, what it should be, and what it is."""


class Task(BaseModel):
    """Base of the tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    """The name of its folder."""
    noun: ClassVar[str]
    """The word for a model of it in messages: ``"classifier"``."""
    response: ClassVar[type[Response]]
    """The answer to a request."""
    answer: ClassVar[type[BaseAnswer]]
    """The prediction for one image in it."""
    policy: ClassVar[type[BasePolicy]]
    calibration: ClassVar[type[BaseCalibration]]
    own_heads: ClassVar[Mapping[str, type[Head]]] = {}
    """By kind, what reads the network's own output in place of the features, for base predictions."""
    heads: ClassVar[Mapping[str, type[Head]]]
    """Heads of its models by kind."""
    abstentions: ClassVar[Mapping[str, int]]
    """Reasons why an image is not accepted, as metrics name them, to the code of the decision."""
    limits: ClassVar[Mapping[str, str]] = {"alpha": "ood_p_value"}
    """Thresholds of the policy to the scores that they are compared with."""
    tensors: ClassVar[Mapping[str, Datatype]]
    """The outputs of the v2 protocol, in order."""
    has_numbers: ClassVar[bool] = False
    """Whether a training image has a number, beside the class or bin that it belongs to."""
    request_options: ClassVar[frozenset[str]] = frozenset()
    """Options that a request may give beside thresholds."""

    @classmethod
    def is_of(cls, manifest: Mapping[str, Any]) -> bool:
        """Return whether a manifest is of a model of this task."""
        return manifest.get("task") == cls.name

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields of a manifest that name the task, such that :meth:`is_of` holds; JSON types."""
        return {"task": self.name, **self.model_dump()}

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        """Return the agreements between fields of a manifest that this task alone requires."""
        return ()

    # What a model has

    def number(self) -> Target | None:
        """Return the number that it predicts; None where it predicts something else."""
        return None

    def network_outputs(self, classes: Sequence[str]) -> int:
        """Return the number of outputs of its networks."""
        return len(classes)

    def probabilities(self, classes: Sequence[str]) -> int:
        """Return the number of columns of probabilities in the outputs."""
        return len(classes)

    def epistemic_unit(self, head: Head) -> str:
        """Return the unit of the epistemic uncertainty, for people; empty where there is none."""
        return head.epistemic_unit

    def restore_head(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Head:
        """Return the head with this ``config()`` and ``state_dict()``; raises :class:`BundleError`."""
        return restore({**self.heads, **self.own_heads}, config, state)

    def notes(self, policy: Any, classes: Sequence[str], metrics: Mapping[str, Any]) -> list[str]:
        """Return the limits of decisions by this policy that their users should know, a sentence each.

        Args:
            policy: A policy of the task.
            classes: Of the model.
            metrics: What a fit measured, as in the manifest.
        """
        return []

    def parse_label(self, text: str, classes: Sequence[str]) -> str:
        """Return what a person says of an image as a log keeps it: one of the classes, unless a task says otherwise.

        Raises:
            DataError: The model could not have said it.
        """
        if text not in classes:
            known = listed(classes, 10)
            raise DataError(f"expected one of the model's classes ({known}), got {text!r}; correct the label")
        return text

    # What it says of images

    def decide(self, outputs: Outputs[FloatArray], thresholds: Any) -> Any:
        """Return the decisions for n images, which have at least ``is_ood`` and ``decision``."""
        raise NotImplementedError

    def prediction(self, outputs: Outputs[Tensor], decisions: Any, classes: tuple[str, ...]) -> BasePrediction:
        """Return the predictions that ``predict`` gives in Python."""
        raise NotImplementedError

    def decision_names(self) -> tuple[str, ...]:
        """Return the names of the decisions, by their codes."""
        return get_args(self.answer.model_fields["decision"].annotation)

    def documents(
        self, outputs: Outputs[FloatArray], decisions: Any, classes: Sequence[str], **options: Any
    ) -> list[dict[str, Any]]:
        """Return one answer for each image, as orjson takes it.

        Args:
            outputs: Finite ones.
            decisions: Decisions for the same images.
            classes: Classes of the model.
            options: Some of :attr:`request_options`.
        """
        raise NotImplementedError

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one explanation for each image, from the arrays of ``Pipeline.explain``.

        Args:
            explanation: Arrays by name, images first.
            classes: Classes of the model.
            layers: Layers that its head tells apart: z, by the candidate layer(s), and the other layers that it reads.
        """
        raise NotImplementedError

    def columns(self) -> dict[str, Any]:
        """Return the types of the columns that ``psc-score`` writes: an answer's fields but those that one asks for."""
        return {name: field.annotation for name, field in self.answer.model_fields.items() if name not in ASKED_FOR}

    def difference(self, outputs: Outputs[Tensor], other: Outputs[Tensor]) -> tuple[str, Tensor]:
        """Return the name of the predicted quantity, and the difference in it of two outputs for the same images.

        Rounding alone gives differences of about 10⁻⁴ or less.
        """
        return "probabilities", outputs.probabilities - other.probabilities

    def labels(self, decisions: Any, classes: Sequence[str]) -> Sequence[str | None]:
        """Return the one label of each image's answer; None for a task whose answer has none."""
        return [None] * len(decisions.decision)

    # What the protocol and the metrics call it

    def tensor_shape(self, name: str, classes: Sequence[str], gates: Sequence[str]) -> list[int]:
        """Return the sizes of a tensor of :attr:`tensors` behind that of the images."""
        return [len(gates)] if name == GATES_OUTPUT else []

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: Any, classes: Sequence[str]
    ) -> npt.NDArray[Any] | list[str]:
        """Return a tensor of :attr:`tensors`; texts for one of ``BYTES``."""
        if name == GATES_OUTPUT:
            return outputs.gate_p_values
        values: npt.NDArray[Any] | None = getattr(decisions, name, None)
        return outputs[name] if values is None else values

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the labels that images are counted by."""
        return classes

    def label_index(self, decisions: Any) -> npt.NDArray[np.int64]:
        """Return the position of each image's label among them."""
        raise NotImplementedError


def task_type(name: str) -> type[Task]:
    """Return the task of one of the names in :data:`psc_core.tasks.TASKS`."""
    found: type[Task] = module_of(name, "psc_core.tasks.{}.task").TASK
    return found


def task_types() -> tuple[type[Task], ...]:
    """Return all tasks, first the one that a manifest means that names none."""
    return tuple(map(task_type, reversed(TASKS)))


def task_type_of(manifest: Mapping[str, Any]) -> type[Task] | None:
    """Return the task of the model that a manifest describes; None for one that this version does not know."""
    return next((kind for kind in map(task_type, TASKS) if kind.is_of(manifest)), None)


def unusual_components(deviation: FloatArray) -> list[dict[str, Any]]:
    """Return the components of one image that deviate most, as an explanation names them."""
    unusual = np.argsort(-np.abs(deviation), kind="stable")[:UNUSUAL_COMPONENTS].tolist()
    return [{"component": component, "deviation": float(deviation[component])} for component in unusual]


def score_members(outputs: Outputs[FloatArray]) -> list[dict[str, Any]]:
    """Return the scores of each image's answer."""
    return [dict(zip(outputs.scores, row, strict=False)) for row in outputs.packed]


def gate_members(outputs: Outputs[FloatArray]) -> list[dict[str, Any]]:
    """Return the member ``gates`` of each image's answer; nothing for a model without gates."""
    if not outputs.gates:
        return [{}] * len(outputs)
    return [{GATES_OUTPUT: dict(zip(outputs.gates, p_values, strict=True))} for p_values in outputs.gate_p_values]
