"""Run an ONNX graph as the body of a cut network: from images to one tensor per layer, and the logits."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, needs
from psc_core.network.onnx.cost import Cost
from psc_core.network.onnx.rewrite import INPUT_NAME

MAX_SESSIONS: Final = 2
"""Maximum number of sessions, each with its own copy of the weights: a service runs small batches on fewer threads."""

_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxBody(nn.Module):
    """A graph in ONNX Runtime, on the device of this module; thread-safe.

    A session has a fixed number of threads, so on a CPU there is one for each number that PyTorch has been set to.

    Args:
        model: The output of :mod:`.export` or :func:`.rewrite.cut`: a graph from float32 ``images`` (batch, channels,
            height, width) to float32 outputs (batch, …).  A graph for a single image is run once for each image.
        cost: The cost of one image, if it has been counted.
    """

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
        """Return the outputs for a batch, on the device of ``x``.

        Raises:
            NetworkError: If ONNX Runtime cannot compute them, or is not installed for this device.
        """
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
            if (device, threads) not in self._sessions:
                # The oldest session goes first; a thread that is running it keeps it alive until it is done.
                while len(self._sessions) >= MAX_SESSIONS:
                    del self._sessions[next(iter(self._sessions))]
                self._sessions[device, threads] = _start(self.model, device, threads)
            return self._sessions[device, threads]


def keep_from_compiler(network: nn.Module) -> None:
    """Exclude each graph in ``network`` from ``torch.compile``, because PyTorch computes nothing of it.

    A decorator on ``forward`` would do the same, but load the compiler wherever this module is imported.
    """
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
