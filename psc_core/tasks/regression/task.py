"""Regression: one number for each image, with its name and unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from psc_core.errors import DataError
from psc_core.tables import parse_number
from psc_core.target import Target
from psc_core.tasks.head import Head
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.regression import NOUN, heads
from psc_core.tasks.regression.answer import RESPONSE, RegressionAnswer
from psc_core.tasks.regression.calibration import Calibration
from psc_core.tasks.regression.decide import ABSTAIN_OOD, ABSTAIN_UNCERTAIN
from psc_core.tasks.regression.policy import RegressionPolicy
from psc_core.tasks.regression.prediction import RegressionPrediction
from psc_core.tasks.task import Task


class Regression(Task):
    """The task of a network that predicts a number."""

    name = "regression"
    noun = NOUN
    response_type = RESPONSE
    answer_type = RegressionAnswer
    policy_type = RegressionPolicy
    calibration_type = Calibration
    prediction_type = RegressionPrediction
    heads = heads.HEADS
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "uncertain": ABSTAIN_UNCERTAIN}
    has_numbers = True

    target: Target

    @classmethod
    def is_of(cls, manifest: Mapping[str, Any]) -> bool:
        return manifest.get("target") is not None

    def manifest_fields(self) -> dict[str, Any]:
        return self.model_dump()

    def number(self) -> Target:
        return self.target

    def network_outputs(self, classes: Sequence[str]) -> int:
        return 1

    def probabilities(self, classes: Sequence[str]) -> int:
        return 0

    def epistemic_unit(self, head: Head) -> str:
        return f"standard deviation, {self.target.unit}".removesuffix(", ")

    def parse_label(self, text: str, classes: Sequence[str], marks: str = ".") -> str:
        """Return a number as a log keeps it."""
        value = parse_number(text, marks)
        if value is None or not math.isfinite(value):
            raise DataError(f"expected a number for {self.target}, got {text!r}; correct the label")
        return repr(value)

    def numbers(self, outputs: Outputs[FloatArray]) -> dict[str, FloatArray]:
        """Return the means and the deviations, in proportion to which an interval is wide."""
        return {"mean": outputs["mean"], "deviation": np.hypot(outputs["aleatoric"], outputs["epistemic"])}

    def difference(self, outputs: Outputs[Tensor], other: Outputs[Tensor]) -> tuple[str, Tensor]:
        deviation = torch.hypot(outputs["aleatoric"], outputs["epistemic"])
        return "means", (outputs["mean"] - other["mean"]) / deviation


TASK: Final = Regression
