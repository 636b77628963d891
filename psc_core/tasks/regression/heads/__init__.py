"""The heads of a regression: a number, its noise and its epistemic uncertainty from z.

To add a kind: a :class:`RegressionHead` subclass with its ``layout``, listed in ``HEADS``, and a fit function, listed
in :data:`psc_core.tasks.regression.fit.head.FITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.tasks.regression.heads.base import RegressionHead, ValueOutput
from psc_core.tasks.regression.heads.blr import BayesianLinearHead
from psc_core.tasks.regression.heads.dve import DeepVecchiaHead

__all__ = ["HEADS", "RegressionHead", "ValueOutput"]

HEADS: Final[Mapping[str, type[RegressionHead]]] = {head.kind: head for head in (BayesianLinearHead, DeepVecchiaHead)}
"""Heads by kind; the first is the default."""
