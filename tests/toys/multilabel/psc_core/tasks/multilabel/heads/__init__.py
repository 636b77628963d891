"""The heads of a model of several labels: a probability for each label from z."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.tasks.multilabel.heads.base import LabelHead
from psc_core.tasks.multilabel.heads.logistic import LogisticHead

__all__ = ["HEADS", "LabelHead"]

HEADS: Final[Mapping[str, type[LabelHead]]] = {head.kind: head for head in (LogisticHead,)}
"""Heads by kind; the first is the default."""
