"""A classifier from an ONNX file, which a fit can use like a PyTorch network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from psc_core.errors import NetworkError, hint
from psc_core.network.layers import LayeredNetwork, LayerInfo
from psc_core.network.onnx.body import OnnxBody
from psc_core.network.onnx.graph import Graph
from psc_core.network.onnx.model import read_onnx
from psc_core.network.onnx.rewrite import cut, with_any_batch, with_one_input, with_size
from psc_core.network.onnx.sizes import BATCH, sizes_of
from psc_core.network.output import See, dependence, first_dependent

if TYPE_CHECKING:
    from onnx import ModelProto

Size = tuple[int, int, int]

_APART = 1e-4
"""Maximum difference between images computed in a batch and alone, relative to the largest value."""


@dataclass(frozen=True)
class _Sized:
    """The network prepared for images of one size."""

    model: ModelProto
    graph: Graph
    logits: OnnxBody


class OnnxNetwork(LayeredNetwork):
    """A whole network from standardised images (batch, channels, height, width) to logits (batch, classes)."""

    place: Tensor

    def __init__(self, model: ModelProto, origin: str) -> None:
        super().__init__()
        self.origin = origin
        self._model = model
        self._sized: dict[Size, _Sized] = {}
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, even if the network ends in a softmax.

        Raises:
            NetworkError: If the network is for images of another size.
        """
        logits: Tensor = self._of_size(_size(x)).logits.to(x.device)(x)[0]
        return logits

    def list_layers(self, trial: Tensor, granularity: str) -> list[LayerInfo]:
        """List the layers; see :mod:`.graph`."""
        return self._of_size(_size(trial)).graph.layers(granularity)

    def cut(self, layers: Sequence[str], trial: Tensor, *, keep_output: bool) -> OnnxBody:
        """Cut the network after ``layers``: the result returns canonical features of each layer, then the logits.

        Raises:
            NetworkError: If a layer is not in the graph or has no features.
        """
        sized = self._of_size(_size(trial))
        found = []
        for name in layers:
            layer = sized.graph.layer(name)
            if layer is None:
                near = hint(name, list(sized.graph.sizes), "see list_layers")
                raise NetworkError(f"{self.origin} has no layer {name!r}; {near}")
            found.append(layer)
        logits = (sized.graph.logits, sized.graph.classes) if keep_output else None
        return OnnxBody(cut(sized.model, found, logits).SerializeToString()).to(self.place.device)

    @property
    def notes(self) -> tuple[str, ...]:
        """The differences from a PyTorch network that have been found so far."""
        graphs = [sized.graph for sized in self._sized.values()]
        found = []
        if any(graph.logits != graph.output for graph in graphs):
            found.append("ends in a softmax, whose input is taken as the logits")
        if any(graph.batch == 1 for graph in graphs):
            found.append("takes one image at a time")
        return tuple(found)

    def _of_size(self, size: Size) -> _Sized:
        if size not in self._sized:
            sized = self._fixed(size)
            if _first_dependent(sized.logits, [""], size) is not None:
                raise NetworkError(f"{self.origin}: {dependence(self._first_dependent_layer(sized, size))}")
            self._sized[size] = sized
        return self._sized[size]

    def _first_dependent_layer(self, sized: _Sized, size: Size) -> str:
        """Return the name of the first tensor of an image that depends on the other images; "" for the logits."""
        layers = sized.graph.layers("all")
        body = OnnxBody(cut(sized.model, layers, (sized.graph.logits, sized.graph.classes)).SerializeToString())
        return _first_dependent(body, [*(layer.name for layer in layers), ""], size) or ""

    def _fixed(self, size: Size) -> _Sized:
        model = with_size(self._model, size, self.origin)
        is_any = not model.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")
        if is_any:
            return _sized(model, self.origin, BATCH)
        one = _sized(model, self.origin, model.graph.input[0].type.tensor_type.shape.dim[0].dim_value)
        if one.graph.batch != 1:
            raise NetworkError(
                f"{self.origin} takes batches of {one.graph.batch} images only; export it with one image, images[:1], "
                "or a dynamic batch axis"
            )
        try:
            several = _sized(with_any_batch(model), self.origin, BATCH)
            alike = _agree(one.logits, several.logits, size) and _first_dependent(several.logits, [""], size) is None
            return several if alike else one
        except NetworkError:
            return one  # the graph fixes the batch size of one somewhere


def _sized(model: ModelProto, origin: str, batch: int) -> _Sized:
    if not model.graph.output:
        raise NetworkError(f"{origin} has no output; export a classifier that returns logits")
    graph = Graph(model, sizes_of(model, origin), batch)
    _, shape = graph.sizes.get(graph.logits, (0, ()))
    if len(shape) != 2 or shape[0] != batch:
        raise NetworkError(f"{origin}: expected a classifier that returns logits (batch, classes), got {shape}")
    return _Sized(model, graph, OnnxBody(cut(model, [], (graph.logits, graph.classes)).SerializeToString()))


def _agree(one: OnnxBody, several: OnnxBody, size: Size) -> bool:
    images = torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    (alone,), (together,) = one(images), several(images)
    return bool((alone - together).abs().max() <= _APART * alone.abs().max())


def _first_dependent(body: OnnxBody, names: Sequence[str], size: Size) -> str | None:
    noise = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    uniform = [torch.full_like(noise, value) for value in (-2.0, 2.0, 0.0)]  # As a standardised image has.

    def run(images: Tensor, see: See) -> None:
        for name, value in zip(names, body(images), strict=True):
            see(name, value)

    return first_dependent(run, torch.cat([noise / 2, *uniform, noise.flip(-1)]))


def _size(x: Tensor) -> Size:
    if x.ndim != 4:
        raise NetworkError(f"expected images (batch, channels, height, width), got {tuple(x.shape)}")
    return x.shape[1], x.shape[2], x.shape[3]


def open_onnx(path: Path) -> OnnxNetwork:
    """Read a classifier from an ONNX file.

    Raises:
        NetworkError: If :mod:`.model` refuses the file, or it is not a network of one image input.
    """
    return OnnxNetwork(with_one_input(read_onnx(path), path.name), path.name)
