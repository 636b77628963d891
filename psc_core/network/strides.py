"""Make a traced network give the same values whatever the memory format of its images.

``x.view(len(x), -1)`` is legal for contiguous maps and raises for channels-last ones; ``reshape`` gives the same values
for both.  :func:`reads_strides` finds the networks where that is not enough.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from psc_core.network.cut import mutates

_RESHAPES: Final = {"view": "reshape", "view_as": "reshape_as"}

_MAY_COPY: Final = frozenset({*_RESHAPES, *_RESHAPES.values(), "flatten", "Flatten", "ravel", "contiguous"})
"""Operations that give a view of contiguous maps and a copy of channels-last ones."""

_READ_STRIDES: Final = frozenset(
    {"as_strided", "as_strided_", "stride", "storage_offset", "is_contiguous", "resize_", "view_as_complex"}
)

_KNOWN: Final = frozenset({"torch", "torchvision", "timm", "operator", "_operator", "math", "builtins"})
"""Packages whose functions do not depend on strides; those of others, wrapped for torch.fx, may use a ``view``."""


def reads_strides(net: fx.GraphModule) -> bool:
    """Return whether the values of ``net`` may depend on strides even after :func:`reshape_views`."""
    return any(_reads_strides(node) or _may_change_a_copy(node, net) for node in net.graph.nodes)


def reshape_views(net: fx.GraphModule) -> None:
    """Replace each ``view`` of ``net`` that gives another shape by a ``reshape``."""
    for node in net.graph.nodes:
        if node.op == "call_method" and node.target in _RESHAPES and not _reads_strides(node):
            node.target = _RESHAPES[node.target]


def _reads_strides(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    # A view may be told a dtype, in place of a shape or by name.
    reinterprets = _name(node) in _RESHAPES and (bool(node.kwargs) or isinstance(node.args[-1], torch.dtype))
    package = (getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    opaque = node.op == "call_function" and package not in _KNOWN
    return reinterprets or opaque or _name(node) in _READ_STRIDES


def _may_change_a_copy(node: fx.Node, net: fx.GraphModule) -> bool:
    """Return whether a node changes in place what may be a view or a copy of something that is read later."""
    if node.op not in ("call_module", "call_method", "call_function") or not mutates(node, net):
        return False
    out = node.kwargs.get("out")
    changed = out if isinstance(out, fx.Node) else node.all_input_nodes[0]
    name = type(net.get_submodule(str(changed.target))).__name__ if changed.op == "call_module" else _name(changed)
    return name in _MAY_COPY and any(node < user for user in changed.all_input_nodes[0].users)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
