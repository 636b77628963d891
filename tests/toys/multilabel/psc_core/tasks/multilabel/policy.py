"""The thresholds of a model of several labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from psc_core.tasks.policy import Alpha, BasePolicy, Coverage

MaxUndecided = Annotated[int, Field(ge=0, description="Undecided with more undecided labels than this.")]


class MultilabelPolicy(BasePolicy):
    """Decision thresholds of a model of several labels."""

    alpha: Alpha
    max_undecided: MaxUndecided
    coverage: Coverage

    def headline(self, metrics: Mapping[str, Any]) -> str:
        return f"images with more than {self.max_undecided} undecided labels are undecided"
