"""Heads (the paper's g′): class probabilities, or the number of a regression, and epistemic uncertainty from z.

``restore_head`` rebuilds one from a bundle, :func:`psc_core.heads.fit.head.fit_head` fits one.  To add a kind: a
:class:`Head` subclass with its ``layout`` and ``epistemic_unit``, listed in ``HEADS``, and a fit function, listed in
:data:`psc_core.heads.fit.head.FITS`.  For regressions: :class:`ValueHead`, ``VALUE_HEADS``, ``restore_value_head`` and
:mod:`psc_core.heads.fit.value`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from psc_core.fitted import restore
from psc_core.heads.base import Head, HeadOutput, UncertaintyDecomposition, ValueHead, ValueOutput, entropy
from psc_core.heads.blr import BayesianLinearHead
from psc_core.heads.duq import DuqHead
from psc_core.heads.dve import DeepVecchiaHead
from psc_core.heads.laplace import LaplaceHead
from psc_core.heads.sngp import SngpHead

__all__ = [
    "HEADS",
    "VALUE_HEADS",
    "Head",
    "HeadOutput",
    "LaplaceHead",
    "UncertaintyDecomposition",
    "ValueHead",
    "ValueOutput",
    "entropy",
    "restore_head",
    "restore_value_head",
]

HEADS: Final[Mapping[str, type[Head]]] = {head.kind: head for head in (LaplaceHead, SngpHead, DuqHead)}
"""Heads of classifiers by kind."""

VALUE_HEADS: Final[Mapping[str, type[ValueHead]]] = {head.kind: head for head in (BayesianLinearHead, DeepVecchiaHead)}
"""Heads of regressions by kind."""


def restore_head(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Head:
    """Inverse of ``head.config()`` and ``head.state_dict()``; raises :class:`BundleError`."""
    return restore(HEADS, config, state)


def restore_value_head(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> ValueHead:
    """The same for a regression."""
    return restore(VALUE_HEADS, config, state)
