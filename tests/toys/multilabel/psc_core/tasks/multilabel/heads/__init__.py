"""The heads of a model of several labels: a probability for each label from z."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from psc_core.classes_by_name import ClassesByName

if TYPE_CHECKING:
    from psc_core.tasks.multilabel.heads.base import MultilabelHead

HEADS: Final[Mapping[str, type[MultilabelHead]]] = ClassesByName(
    {"logistic": "psc_core.tasks.multilabel.heads.logistic:LogisticHead"}
)
"""Heads by kind; the first is the default."""
