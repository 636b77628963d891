"""The heads of a classifier: class probabilities and epistemic uncertainty from z.

To add a kind: a :class:`ClassifierHead` subclass with its ``layout`` and ``epistemic_unit``, listed in ``HEADS``, and a
fit function, listed in :data:`psc_core.tasks.classification.fit.head.FITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.tasks.classification.heads.base import (
    ClassifierHead,
    HeadOutput,
    UncertaintyDecomposition,
    entropy,
)
from psc_core.tasks.classification.heads.duq import DuqHead
from psc_core.tasks.classification.heads.laplace import LaplaceHead
from psc_core.tasks.classification.heads.own import OwnHead
from psc_core.tasks.classification.heads.sngp import SngpHead

__all__ = ["HEADS", "ClassifierHead", "HeadOutput", "OwnHead", "UncertaintyDecomposition", "entropy"]

HEADS: Final[Mapping[str, type[ClassifierHead]]] = {head.kind: head for head in (LaplaceHead, SngpHead, DuqHead)}
"""Heads by kind; the first is the default."""
