"""The interface of a task: what a model predicts, and how that is decided and described.

A :class:`Task` is a value.  Its fields are what a manifest keeps of it, as the target of a regression; everything else
is the same for all models of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from psc_core.errors import DataError, listed
from psc_core.fitted import restore
from psc_core.names import composed
from psc_core.target import Target
from psc_core.tasks import TASKS, module_of
from psc_core.tasks.answer import ASKED_FOR, BaseAnswer, Response
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.decide import BaseDecisions
from psc_core.tasks.head import Head
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy
from psc_core.tasks.prediction import BasePrediction

Agreement = tuple[str, object, object]
"""A field of the manifest by its place in the JSON, what it should be, and what it is."""


class Task(BaseModel):
    """Base of the tasks.

    Attributes:
        name: The name of the task's folder.
        noun: The word for a model of the task in messages: ``"classifier"``.
        response_type: The answer to a request.
        answer_type: The prediction for one image in it.
        policy_type: The thresholds that a user sets.
        calibration_type: The statistics of calibration images, by which a policy becomes thresholds.
        prediction_type: The result of ``predict`` in Python.
        output_heads: Heads by kind that read the network's own output in place of the features, for base predictions.
        heads: The other heads by kind.
        abstentions: The code of the decision for each reason to abstain.
        limits: The score that each threshold of the policy is compared with.
        has_numbers: Whether a training image has a number, besides the class or bin that it belongs to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    noun: ClassVar[str]
    response_type: ClassVar[type[Response]]
    answer_type: ClassVar[type[BaseAnswer]]
    policy_type: ClassVar[type[BasePolicy]]
    calibration_type: ClassVar[type[BaseCalibration]]
    prediction_type: ClassVar[type[BasePrediction]]
    output_heads: ClassVar[Mapping[str, type[Head]]] = {}
    heads: ClassVar[Mapping[str, type[Head]]]
    abstentions: ClassVar[Mapping[str, int]]
    limits: ClassVar[Mapping[str, str]] = {"alpha": "ood_p_value"}
    has_numbers: ClassVar[bool] = False

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

    # Properties of a model

    def number(self) -> Target | None:
        """Return the number that a model predicts; None where it predicts something else."""
        return None

    def network_outputs(self, classes: Sequence[str]) -> int:
        """Return the number of outputs of a network of the task."""
        return len(classes)

    def probabilities(self, classes: Sequence[str]) -> int:
        """Return the number of columns of probabilities in the outputs."""
        return len(classes)

    def epistemic_unit(self, head: Head) -> str:
        """Return the unit of the epistemic uncertainty, for display; empty where there is none."""
        return head.epistemic_unit

    def restore_head(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Head:
        """Return the head with this ``config()`` and ``state_dict()``; raises :class:`BundleError`."""
        return restore({**self.heads, **self.output_heads}, config, state)

    def parse_label(self, text: str, classes: Sequence[str], marks: str = ".") -> str:
        """Return what a person says of an image as a log keeps it: one of the classes, unless a task says otherwise.

        Args:
            text: What the person says.
            classes: The model's classes.
            marks: How a number is written, see :func:`psc_core.tables.parse_number`.

        Raises:
            DataError: If the model could not have predicted it.
        """
        label = composed(text)
        if label not in classes:
            known, near = listed(classes, 10), get_close_matches(label.casefold(), map(str.casefold, classes), 1)
            meant = [name for name in classes if name.casefold() in near]
            advice = f"did you mean {meant[0]!r}?" if meant else "correct the label"
            raise DataError(f"expected one of the model's classes ({known}), got {text!r}; {advice}")
        return label

    # Predictions and labels

    def prediction(
        self, outputs: Outputs[Tensor], decisions: BaseDecisions, classes: tuple[str, ...]
    ) -> BasePrediction:
        """Return the predictions as ``predict`` returns them in Python."""
        return self.prediction_type(outputs, decisions, classes, **dict(self))  # Its own fields too: a target.

    def numbers(self, outputs: Outputs[FloatArray]) -> dict[str, FloatArray]:
        """Return what the answers say in the unit of :meth:`number`, by name, each (n,); empty where there is none."""
        return {}

    def decision_names(self) -> tuple[str, ...]:
        """Return the names of the decisions, by their codes."""
        return get_args(self.answer_type.model_fields["decision"].annotation)

    def columns(self) -> dict[str, Any]:
        """Return the types of the columns that ``psc-score`` writes: own fields, and an answer's except on request."""
        found = {**type(self).model_fields, **self.answer_type.model_fields}
        return {name: field.annotation for name, field in found.items() if name not in ASKED_FOR}

    def difference(self, outputs: Outputs[Tensor], other: Outputs[Tensor]) -> tuple[str, Tensor]:
        """Return the name of the predicted quantity, and the difference in it of two outputs for the same images.

        Rounding alone gives differences of about 10⁻⁴ or less.
        """
        return "probabilities", outputs.probabilities - other.probabilities


def task_type(name: str) -> type[Task]:
    """Return the task of one of the names in :data:`psc_core.tasks.TASKS`."""
    found: type[Task] = module_of(name, "psc_core.tasks.{}.task").TASK
    return found


def task_types() -> tuple[type[Task], ...]:
    """Return all tasks, first the one of a manifest that names none."""
    return tuple(map(task_type, reversed(TASKS)))


def task_type_of(manifest: Mapping[str, Any]) -> type[Task] | None:
    """Return the task of the model that a manifest describes; None for one that this version does not know."""
    return next((each for each in map(task_type, TASKS) if each.is_of(manifest)), None)
