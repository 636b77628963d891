"""Find the axis of a layer's output that holds the channels, and bring all outputs into one canonical shape.

    canonical features: (batch, channels, spatial)

The spatial axis is row-major: the positions of a map, the tokens of a transformer, one entry for a vector.

=============  =====================  ==========================================================
form           module output          canonical
=============  =====================  ==========================================================
``map``        (B, C, H, W)           (B, C, H·W); (B, C, P) of one-dimensional layers as it is
``map_last``   (B, H, W, C)           (B, C, H·W), Swin and the linear layers of ConvNeXt
``tokens``     (B, T, C)              (B, C, T)
``vector``     (B, C)                 (B, C, 1)
=============  =====================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Form = Literal["map", "map_last", "tokens", "vector"]

CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

INPUT_SUFFIX: Final = ":input"
"""Suffix after a module's name that means the module's input instead of its output."""


def value_of(output: Any) -> Any:
    """Return a layer's value: the output of its module, or the first of several outputs, as of attention blocks."""
    return output[0] if isinstance(output, tuple) and output else output


def canonical(features: Float[Tensor, "batch ..."], form: Form) -> Float[Tensor, "batch channels spatial"]:
    """Reshape a layer's output of the given form to (batch, channels, spatial)."""
    if form == "map":
        return features.flatten(2)
    return features.unsqueeze(2) if form == "vector" else features.flatten(1, -2).transpose(1, 2)


@dataclass(frozen=True)
class Layout:
    """The evidence in a module's weights for the channel axis of its output, if that has three or four dimensions."""

    convolves: bool  # contains a convolution or batch normalisation (channels first)
    widths: frozenset[int]  # output widths of its linear layers and layer normalisations (channels last)
    channels: frozenset[int]  # output channels of its convolutions
    one_dimensional: bool = False  # convolves, normalises or pools along a single axis

    def form(self, shape: Sequence[int | torch.SymInt]) -> Form | None:
        """Return the form of an output of this shape, or ``None`` if it is not a batch of features.

        Convolutions keep channels first, linear layers last, unless only the other axis matches a width.  Three
        dimensions are tokens, except after one-dimensional layers; a single channel there (a sum of tokens, a gate) is
        a token.
        """
        if len(shape) not in (3, 4):
            return "vector" if len(shape) == 2 else None
        fits_first, fits_last = shape[1] in self.widths | self.channels, shape[-1] in self.widths
        if len(shape) == 3:
            first = not self.widths or (fits_first and not fits_last)
            return "map" if self.one_dimensional and first and shape[1] > 1 else "tokens"
        if not self.widths:
            return "map"
        if not self.convolves:
            return "map" if fits_first and not fits_last else "map_last"
        return "map_last" if fits_last and not fits_first and shape[2] != shape[3] else "map"


def layout_of(net: nn.Module, name: str) -> Layout:
    """Return the layout of layer ``name``; a module without weights has the layout of its parent module."""
    module = net.get_submodule(name.removesuffix(INPUT_SUFFIX))
    if name.endswith(INPUT_SUFFIX):
        return Layout(False, frozenset({int(getattr(module, "in_features", 0))}), frozenset())
    if is_pooling(module):
        return Layout(True, frozenset(), frozenset(), "Pool1d" in type(module).__name__)
    if name and next(module.parameters(), None) is None:
        return layout_of(net, name.rpartition(".")[0])
    inside = list(module.modules())
    convolutions = [m for m in inside if isinstance(m, CONVOLUTIONS)]
    linears = [m for m in inside if isinstance(m, nn.Linear)]
    return Layout(
        bool(convolutions) or any(isinstance(m, BATCH_NORMS) for m in inside),
        frozenset(m.out_features for m in linears) | {width for m in inside if (width := _normalised_width(m))},
        frozenset(m.out_channels for m in convolutions),
        any(isinstance(m, nn.Conv1d | nn.ConvTranspose1d | nn.BatchNorm1d) for m in inside),
    )


def _normalised_width(module: nn.Module) -> int | None:
    """Return the width of the last axis if the module normalises it (layer and RMS normalisation), else ``None``.

    A module that normalises the channels of a map permutes it first, so it keeps the shape of a map with one position,
    on which all other normalisations fail.
    """
    shape = getattr(module, "normalized_shape", ())
    if not isinstance(shape, Sequence) or len(shape) != 1:
        return None
    width = int(shape[0])
    if type(module) is nn.LayerNorm:
        return width
    probe = next(module.parameters(), torch.empty(0)).new_zeros(1, width, 1, 1)
    try:
        with torch.no_grad():
            return None if module.forward(probe).shape == probe.shape else width
    except Exception:
        return width


def is_pooling(module: nn.Module) -> bool:
    return "Pool" in type(module).__name__ and next(module.children(), None) is None
