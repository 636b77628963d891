"""The heads of a classifier: class probabilities and epistemic uncertainty from z.

To add a kind: a :class:`.base.ClassifierHead` subclass with its ``layout`` and ``epistemic_unit``, listed in ``HEADS``,
and a fit function, listed in :data:`psc_core.tasks.classification.fit.head.FITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from psc_core.classes_by_name import ClassesByName

if TYPE_CHECKING:
    from psc_core.tasks.classification.heads.base import ClassifierHead

HEADS: Final[Mapping[str, type[ClassifierHead]]] = ClassesByName(
    {
        "laplace": "psc_core.tasks.classification.heads.laplace:LaplaceHead",
        "sngp": "psc_core.tasks.classification.heads.sngp:SngpHead",
        "duq": "psc_core.tasks.classification.heads.duq:DuqHead",
    }
)
"""Heads by kind; the first is the default."""
