"""The bases of every task's thresholds, and of the decisions that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy

AnyDecisions = TypeVar("AnyDecisions", bound="BaseDecisions")


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseDecisions:
    """The decisions on n images; every field is an array with a row for each image."""

    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in the ``DECISIONS`` of the task's answer

    def __len__(self) -> int:
        return len(self.decision)

    def at(self: AnyDecisions, images: slice | Sequence[int] | npt.NDArray[Any]) -> AnyDecisions:
        """Return the decisions on some of the images: a slice, their positions, or a mask."""
        return type(self)(**{each.name: getattr(self, each.name)[images] for each in fields(self)})

    def labels(self, classes: Sequence[str]) -> Sequence[str | None]:
        """Return the one label of each image's answer; None for a task whose answer has none."""
        return [None] * len(self)


@dataclass(frozen=True)
class BaseThresholds:
    """A policy in terms of the outputs, for one set of calibration images."""

    policy: BasePolicy
    ood_p_value: float  # an image is out of distribution when its p-value is at most this
    quantile: float  # the bound of prediction sets or intervals, from :meth:`.BaseCalibration.quantile`

    def decide(self, outputs: Outputs[FloatArray]) -> BaseDecisions:
        """Return the decisions on n images."""
        raise NotImplementedError
