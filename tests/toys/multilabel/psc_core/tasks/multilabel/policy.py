"""The thresholds of a model of several labels."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from psc_core.tasks.policy import Alpha, BasePolicy, Coverage

MaxUndecided = Annotated[int, Field(ge=0, description="Undecided with more undecided labels than this.")]


class MultilabelPolicy(BasePolicy):
    """Decision thresholds of a model of several labels."""

    alpha: Alpha
    max_undecided: MaxUndecided
    coverage: Coverage
