"""Networks as ONNX graphs, run by ONNX Runtime alone; needs the extra ``psc[onnx]``.

::

    file or bundle ─▶ model (read, checked) ─▶ graph (layers, logits) ─▶ rewrite (cut) ─▶ backbone (run)
    network of PyTorch ─▶ export ─────────────────────────────────────────────────────────────▲
"""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, hint, needs
from psc_core.network.layers import LayeredNetwork, LayerInfo
from psc_core.network.onnx_check import BATCH, Shape, check_model, parse_model, read_onnx, sizes_of
from psc_core.network.onnx_graph import INPUT_NAME, Graph, cut, with_any_batch, with_one_input, with_size
from psc_core.network.output import See, dependence, first_dependent

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
# True if networks can be exported to ONNX and run; a folder that an uninstalled package left has no origin.
INSTALLED: Final = all((spec := importlib.util.find_spec(name)) and spec.origin for name in PACKAGES)
_CONVOLUTIONS: Final = frozenset({"Conv", "ConvInteger", "QLinearConv"})
_PLAIN_DIMENSIONS: Final = 3  # of a convolution for which ONNX Runtime has kernels of its own
_PRODUCTS: Final = frozenset({"Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"})


class Cost(NamedTuple):
    alive: int  # of one image: peak size of the tensors that exist at the same time, bytes
    operations: int  # additions and multiplications of convolutions and products; of other nodes, the largest tensor
    scratch: int  # of a batch of any size: the largest buffer that ONNX Runtime takes for a node, bytes


def cost_of(model: ModelProto, sizes: Mapping[str, tuple[int, Shape]], batch: int) -> Cost:
    """Count the cost of a graph, divided by ``batch``, the number of images for which ``sizes`` were found."""
    from onnx import helper

    def nbytes(name: str) -> int:
        dtype, shape = sizes.get(name, (0, ()))
        return math.prod(shape) * helper.tensor_dtype_to_np_dtype(dtype).itemsize if dtype else 0

    def shape(name: str) -> Shape:
        return weights.get(name) or sizes.get(name, (0, ()))[1]

    nodes, kept = model.graph.node, {value.name for value in model.graph.output}
    last = {name: index for index, node in enumerate(nodes) for name in node.input}
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    alive = most = nbytes(model.graph.input[0].name)
    operations = scratch = 0
    for index, node in enumerate(nodes):
        alive += sum(nbytes(name) for name in node.output)
        most = max(most, alive)
        ended = {name for name in (*node.input, *node.output) if last.get(name, index) == index}
        alive -= sum(nbytes(name) for name in ended - kept)
        operations += _operations(node, shape)
        scratch = max(scratch, _scratch(node, shape))
    return Cost(-(-most // batch), -(-operations // batch), scratch)


def _operations(node: NodeProto, shape: Callable[[str], Shape]) -> int:
    if node.op_type in _CONVOLUTIONS:
        return 2 * math.prod(shape(node.output[0])) * math.prod(shape(_weight(node))[1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(shape(node.input[0])) * math.prod(shape(node.input[1])[1:])
    if node.op_type in _PRODUCTS:
        return 2 * math.prod(shape(node.output[0])) * (shape(node.input[0]) or (1,))[-1]
    return max((math.prod(shape(name)) for name in (*node.input, *node.output) if name), default=0)


def _scratch(node: NodeProto, shape: Callable[[str], Shape]) -> int:
    """Count the columns that a convolution on the CPU makes of one image and group, bytes; measured."""
    if node.op_type == "ConvTranspose":
        return 4 * math.prod(shape(node.input[1])[1:]) * math.prod(shape(node.input[0])[2:])
    if node.op_type not in _CONVOLUTIONS:
        return 0
    weight, sides = shape(_weight(node)), shape(node.output[0])[2:]
    columns = math.prod(weight[1:]) * math.prod(sides)
    if node.op_type == "ConvInteger":
        return columns
    if node.op_type == "QLinearConv":  # It may make addresses of all channels in place of their numbers.
        return max(columns, 8 * math.prod(weight[2:]) * math.prod(sides))
    # With few filters and up to three dimensions, a thread makes a small part of them at a time.
    return 4 * columns if len(sides) > _PLAIN_DIMENSIONS or math.prod(weight[:1]) > math.prod(sides) else 0


def _weight(node: NodeProto) -> str:
    name: str = node.input[3 if node.op_type == "QLinearConv" else 1]
    return name


MAX_SESSIONS: Final = 2  # each with its own weights: a service runs small batches on fewer threads
_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxBody(nn.Module):
    """A graph from float32 ``images`` in ONNX Runtime, on this module's device; thread-safe."""

    place: Tensor

    def __init__(self, model: bytes, *, cost: Cost | None = None) -> None:
        super().__init__()
        self.model = model
        self.cost = cost
        self._sessions: dict[tuple[torch.device, int], Any] = {}
        self._starting = threading.Lock()
        self.register_buffer("place", torch.empty(0), persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_sessions", "_starting")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._sessions, self._starting = {}, threading.Lock()  # neither can be copied

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        session = self._session()
        if not len(x):
            return tuple(x.new_empty((0, *output.shape[1:]), dtype=torch.float32) for output in session.get_outputs())
        if session.get_inputs()[0].shape[0] == 1 and len(x) != 1:
            return tuple(map(torch.cat, zip(*(self(x[at : at + 1]) for at in range(len(x))), strict=True)))
        x = x.float().contiguous()  # ONNX Runtime reads raw memory
        where = x.device.type, x.device.index or 0, np.float32
        binding = session.io_binding()
        binding.bind_input(INPUT_NAME, *where, tuple(x.shape), x.data_ptr())
        outputs = []
        for output in session.get_outputs():
            values = x.new_empty((len(x), *output.shape[1:]))
            binding.bind_output(output.name, *where, tuple(values.shape), values.data_ptr())
            outputs.append(values)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()  # ONNX Runtime has its own stream
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # its errors have no public base class
            raise NetworkError(f"ONNX Runtime cannot compute the network: {str(error)[:300]}") from error
        return tuple(outputs)

    def _session(self) -> Any:
        device = self.place.device
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        with self._starting:
            session = self._sessions.pop((device, threads), None)
            if session is None:
                # The one not used for longest goes first; a thread that is running it keeps it alive until it is done.
                while len(self._sessions) >= MAX_SESSIONS:
                    del self._sessions[next(iter(self._sessions))]
                session = _start(self.model, device, threads)
            self._sessions[device, threads] = session
            return session


def keep_from_compiler(network: nn.Module) -> None:
    """Exclude graphs from ``torch.compile``; a decorator on ``forward`` would load the compiler with this module."""
    for part in network.modules():
        if isinstance(part, OnnxBody):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign, no-untyped-call]


def _start(model: bytes, device: torch.device, threads: int) -> Any:
    onnxruntime = needs("an ONNX network", "onnx", "onnxruntime", error=NetworkError)
    provider = _PROVIDERS.get(device.type, device.type)
    if provider not in onnxruntime.get_available_providers():
        raise NetworkError(
            f"ONNX Runtime has no {provider}, so the network does not run on {device}; for a GPU pip install "
            "onnxruntime-gpu in place of onnxruntime, or choose --device cpu"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only; its warnings are about its own rewrites
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # decoders need the cores
    try:
        session = onnxruntime.InferenceSession(
            model, options, providers=[(provider, {"device_id": device.index or 0} if device.type == "cuda" else {})]
        )
        shapes = [value.shape for value in (*session.get_inputs(), *session.get_outputs())]
    except Exception as error:  # its errors have no public base class
        raise NetworkError(f"ONNX Runtime cannot load the network: {str(error)[:300]}") from error
    if provider not in session.get_providers():  # it falls back to the CPU if a CUDA library is missing
        raise NetworkError(f"ONNX Runtime cannot start its {provider}; install the CUDA that it was built for")
    for shape in shapes:
        if not all(isinstance(side, int) for side in shape[1:]):
            raise NetworkError(f"expected inputs and outputs of known shapes, got {shape}")
    return session


Size = tuple[int, int, int]
_MAX_OUTPUTS: Final = 64  # of a file
_APART = 1e-4  # maximum difference between images computed in a batch and alone, relative to the largest value


@dataclass(frozen=True)
class _Sized:
    model: ModelProto
    graph: Graph
    logits: OnnxBody


class OnnxNetwork(LayeredNetwork):
    """A whole network from standardised images (batch, channels, height, width) to logits (batch, classes)."""

    place: Tensor

    def __init__(self, model: ModelProto, origin: str, classes: int | None = None) -> None:
        super().__init__()
        self.origin = origin
        self.classes = classes
        self._model = model
        self._sized: dict[Size, _Sized] = {}
        self.register_buffer("place", torch.empty(0), persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, even if the network ends in a softmax."""
        logits: Tensor = self._of_size(_size(x)).logits.to(x.device)(x)[0]
        return logits

    def list_layers(self, trial: Tensor, granularity: str) -> list[LayerInfo]:
        return self._of_size(_size(trial)).graph.layers(granularity)

    def cut(self, layers: Sequence[str], trial: Tensor, *, keep_output: bool) -> OnnxBody:
        """Cut the network after ``layers``: the result returns canonical features of each layer, then the logits."""
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
        notes = {
            **{f"has several outputs, {each.output!r} is taken": len(each.outputs) > 1 for each in graphs},
            "ends in a softmax, whose input is taken as the logits": any(each.logits != each.output for each in graphs),
            "takes one image at a time": any(each.batch == 1 for each in graphs),
        }
        return tuple(note for note, holds in notes.items() if holds)

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
        axis = model.graph.input[0].type.tensor_type.shape.dim[0]
        if not axis.HasField("dim_value"):
            return _sized(model, self.origin, BATCH, self.classes)
        one = _sized(model, self.origin, axis.dim_value, self.classes)
        if one.graph.batch != 1:
            raise NetworkError(
                f"{self.origin} takes batches of {one.graph.batch} images only; export it with one image, images[:1], "
                "or a dynamic batch axis"
            )
        try:
            several = _sized(with_any_batch(model), self.origin, BATCH, self.classes)
            alike = _agree(one.logits, several.logits, size) and _first_dependent(several.logits, [""], size) is None
            return several if alike else one
        except NetworkError:
            return one  # the graph fixes the batch size of one somewhere


def _sized(model: ModelProto, origin: str, batch: int, classes: int | None) -> _Sized:
    noun, shape = ("numbers", "(batch, 1)") if classes == 1 else ("logits", "(batch, classes)")
    remedy = f"export it again so that it returns {noun} {shape} alone"
    if not 0 < (count := len(model.graph.output)) <= _MAX_OUTPUTS:
        raise NetworkError(f"{origin} has {count} outputs; {remedy}")
    graph = Graph(model, sizes_of(model, origin), batch)
    logits = {name: graph.logits_of(name) for name in graph.outputs}
    shapes = {name: graph.sizes.get(logits[name], (0, ()))[1] for name in graph.outputs}
    fitting = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == batch]
    fitting = [name for name in fitting if shapes[name][1] == classes] or fitting
    if len({logits[name] for name in fitting}) != 1:
        several = ", ".join(f"{name} {shapes[name]}" for name in fitting or graph.outputs)
        what = f"several outputs that may be the {noun}" if fitting else f"no output of {noun} {shape}"
        raise NetworkError(f"{origin} has {what}, got {several}; {remedy}")
    graph.output = next((name for name in fitting if name == logits[name]), fitting[0])
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


def open_onnx(path: Path, classes: int | None = None) -> OnnxNetwork:
    """Open a network; of several outputs the logits are the one with so many ``classes``."""
    return OnnxNetwork(with_one_input(read_onnx(path), path.name), path.name, classes)


_ORIGIN: Final = "backbone.onnx"
_FLOAT: Final = 1


def restore_body(data: bytes, size: Size, *, outputs: int) -> OnnxBody:
    """Check a stored graph without computing anything; ``outputs``: the number of layers, plus one for the logits."""
    model = parse_model(data, _ORIGIN)
    check_model(model, _ORIGIN)
    if [value.name for value in model.graph.input] != [INPUT_NAME]:
        raise NetworkError(f"{_ORIGIN}: expected one input named {INPUT_NAME}; fit the bundle again")
    sizes = sizes_of(model, _ORIGIN)
    dtype, (batch, *got) = sizes[INPUT_NAME]
    if dtype != _FLOAT or tuple(got) != size:
        raise NetworkError(f"{_ORIGIN}: expected images of the shape {size}, got {tuple(got)}; fit the bundle again")
    found = [sizes.get(value.name) for value in model.graph.output]
    if len(found) != outputs or any(each is None or each[0] != _FLOAT or each[1][:1] != (batch,) for each in found):
        raise NetworkError(f"{_ORIGIN}: expected {outputs} outputs (batch, …) of float32; fit the bundle again")
    return OnnxBody(data, cost=cost_of(model, sizes, batch))
