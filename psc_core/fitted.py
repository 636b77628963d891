"""Fitted models as named tensors of declared shapes: the base class of densities, heads and the projection.

A :class:`Fitted` module consists of its buffers alone.  ``config()`` (JSON) and ``state_dict()`` (tensors) describe it
completely, and :func:`restore` rebuilds it from them without running code from a file.

Each subclass declares a ``kind`` and a ``layout``, which maps tensor names to axis names.  An axis has the same size in
all tensors of a model; the config holds the sizes, and every tensor is checked against them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from psc_core.errors import BundleError, FitError

Record = dict[str, float | int]  # the decisions and measurements of a fit by name, all of them numbers

AnyFitted = TypeVar("AnyFitted", bound="Fitted")


class Fitted(nn.Module):
    """The base class of densities, heads and the projection."""

    kind: ClassVar[str]
    layout: ClassVar[Mapping[str, tuple[str, ...]]]
    in_float64: ClassVar[frozenset[str]] = frozenset()  # the tensors that are kept in float64; all others are float32

    def __init__(self, tensors: Mapping[str, Tensor], *, record: Mapping[str, float | int]) -> None:
        super().__init__()
        self.record: Record = dict(record)
        self.sizes: dict[str, int] = {}
        if set(tensors) != set(self.layout):
            raise FitError(
                f"expected tensors {sorted(self.layout)} for {self.kind!r}, got "
                f"{reprlib.repr(sorted(tensors))}; fit it again"
            )
        for name, axes in self.layout.items():
            shape = tuple(tensors[name].shape)
            expected = tuple(self.sizes.setdefault(axis, size) for axis, size in zip(axes, shape, strict=False))
            if len(shape) != len(axes) or shape != expected:
                raise FitError(
                    f"expected {self.kind}.{name} with axes {axes} and the sizes {self.sizes}, got shape {shape}; "
                    "fit it again"
                )
            if not tensors[name].isfinite().all():
                raise FitError(f"expected finite numbers in {self.kind}.{name}, got NaN or ∞; fit it again")
            self.register_buffer(name, tensors[name].detach().to(self.dtype_of(name)).contiguous())

    if TYPE_CHECKING:  # Every name of the layout is a tensor.

        def __getattr__(self, name: str) -> Tensor: ...

    @classmethod
    def dtype_of(cls, name: str) -> torch.dtype:
        """Return the dtype in which the tensor ``name`` is stored."""
        return torch.float64 if name in cls.in_float64 else torch.float32

    def recording(self: AnyFitted, more: Mapping[str, float | int]) -> AnyFitted:
        """Return a copy of this model with more entries in its record."""
        return type(self)({name: getattr(self, name) for name in self.layout}, record={**self.record, **more})

    def config(self) -> dict[str, Any]:
        """Return the kind, axis sizes and record as JSON types; with ``state_dict()`` they restore the model."""
        return {"kind": self.kind, "sizes": dict(self.sizes), "record": dict(self.record)}


def restore(kinds: Mapping[str, type[AnyFitted]], config: Mapping[str, Any], state: Mapping[str, Tensor]) -> AnyFitted:
    """Rebuild a model of one of ``kinds`` from its ``config()`` and ``state_dict()``."""
    kind, sizes = config["kind"], config["sizes"]
    if kind not in kinds:
        raise BundleError(f"expected kind one of {sorted(kinds)}, got {reprlib.repr(kind)}; use a newer version of psc")
    for name, tensor in state.items():
        if tensor.dtype != kinds[kind].dtype_of(name):
            raise BundleError(
                f"expected {kinds[kind].dtype_of(name)} for {kind}.{name}, got {tensor.dtype}; fit the bundle again"
            )
    try:
        model = kinds[kind](state, **{name: value for name, value in config.items() if name not in ("kind", "sizes")})
    except FitError as error:
        raise BundleError(str(error)) from error
    if model.sizes != sizes:
        raise BundleError(
            f"expected tensors of {kind!r} with sizes {sizes}, got {model.sizes}; the bundle is inconsistent, "
            "fit it again"
        )
    return model
