"""The heads of a regression: a number, its noise and its epistemic uncertainty from z.

To add a kind: a :class:`.base.RegressionHead` subclass with its ``layout``, listed in ``HEADS``, and a fit function,
listed in :data:`psc_core.tasks.regression.fit.head.FITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from psc_core.classes_by_name import ClassesByName

if TYPE_CHECKING:
    from psc_core.tasks.regression.heads.base import RegressionHead

HEADS: Final[Mapping[str, type[RegressionHead]]] = ClassesByName(
    {
        "blr": "psc_core.tasks.regression.heads.blr:BayesianLinearHead",
        "dve": "psc_core.tasks.regression.heads.dve:DeepVecchiaHead",
    }
)
"""Heads by kind; the first is the default."""
