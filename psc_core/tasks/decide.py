"""The bases of every task's thresholds, and of the decisions that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy

AnyDecisions = TypeVar("AnyDecisions", bound="BaseDecisions")


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseDecisions:
    """The decisions on n images; every field is an array with a row for each image.

    Attributes:
        decision_names: The ``DECISIONS`` of the task's answer.
    """

    decision_names: ClassVar[tuple[str, ...]]

    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :attr:`decision_names`

    def __len__(self) -> int:
        return len(self.decision)

    def at(self: AnyDecisions, images: slice | Sequence[int] | npt.NDArray[Any]) -> AnyDecisions:
        """Return the decisions on some of the images: a slice, their positions, or a mask."""
        return type(self)(**{each.name: getattr(self, each.name)[images] for each in fields(self)})

    def labels(self, classes: Sequence[str]) -> Sequence[str | None]:
        """Return the one label of each image's answer; None for a task whose answer has none."""
        return [None] * len(self)

    def columns(self, outputs: Outputs[FloatArray], classes: Sequence[str], **options: int) -> dict[str, Any]:
        """Return each field of the n answers by name: an array whose first axis is the images, or a value for each.

        The fields are in the order of the service's JSON.  A task adds its own to these, which all have; ``gates`` is
        left out for a model without gates.

        Args:
            outputs: The outputs that were decided on.
            classes: The classes of the model.
            options: The parameters of a request that belong to the task and are no thresholds.
        """
        columns: dict[str, Any] = dict(zip(outputs.scores, outputs.packed.T, strict=False))
        if outputs.gates:
            columns["gates"] = list(map(dict, map(partial(zip, outputs.gates), outputs.gate_p_values)))
        columns["is_ood"] = self.is_ood
        columns["decision"] = list(map(self.decision_names.__getitem__, self.decision.tolist()))
        return columns


@dataclass(frozen=True)
class BaseThresholds:
    """A policy in terms of the outputs, for one set of calibration images."""

    policy: BasePolicy
    ood_p_value: float  # an image is out of distribution when its p-value is at most this
    quantile: float  # the bound of prediction sets or intervals, from :meth:`.BaseCalibration.quantile`

    def decide(self, outputs: Outputs[FloatArray]) -> BaseDecisions:
        """Return the decisions on n images."""
        raise NotImplementedError
