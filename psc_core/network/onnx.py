"""A truncated network in ONNX Runtime, which on a CPU takes less time than PyTorch; needs the extra ``psc[onnx]``.

A process of its own exports the network, because exporting changes PyTorch's state for all threads.  It builds the
network as a bundle's is built: ``python -m psc_core.network.onnx FOLDER`` reads :data:`SPEC` and :data:`WEIGHTS` from
a folder and writes :data:`MODEL` beside them.

Exporting takes seconds, so its result is kept in the user's cache folder (``$XDG_CACHE_HOME/psc``, else
``~/.cache/psc``), by the digest of spec, weights and versions; the folder may be deleted at any time, and need not be
writable.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.images.preprocess import Inputs
from psc_core.network.backbone import Backbone, FeaturesAndLogits, rebuild_backbone
from psc_core.version import __version__

PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
INSTALLED: Final = all(importlib.util.find_spec(name) for name in PACKAGES)
SPEC: Final = "spec.json"
WEIGHTS: Final = "weights.safetensors"
MODEL: Final = "model.onnx"


class OnnxBackbone(nn.Module):
    """A truncated network on the CPU, called like :class:`psc_core.network.backbone.Backbone`.

    A session keeps its number of threads, so there is one for each number that PyTorch uses.  ``model`` is from
    :func:`to_onnx`; its last output is the logits with ``keep_output``.
    """

    is_traced = True

    def __init__(self, model: bytes, *, keep_output: bool) -> None:
        super().__init__()
        self.keep_output = keep_output
        self._model = model
        self._sessions: dict[int, Any] = {}

    def forward(self, x: Inputs) -> FeaturesAndLogits:
        """Canonical features (batch, channels, spatial) of each layer, and the logits if the network keeps them."""
        arrays = self._session(torch.get_num_threads()).run(None, {"images": x.contiguous().numpy()})
        outputs = [torch.from_numpy(array) for array in arrays]
        return (outputs[:-1], outputs[-1]) if self.keep_output else (outputs, None)

    def _session(self, threads: int) -> Any:
        if threads not in self._sessions:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # Decoders need the cores.
            cpu = ["CPUExecutionProvider"]
            self._sessions[threads] = onnxruntime.InferenceSession(self._model, options, providers=cpu)
        return self._sessions[threads]


def to_onnx(backbone: Backbone, size: tuple[int, int, int]) -> OnnxBackbone:
    """Export a truncated network.

    Args:
        backbone: As it was fitted, traced, float32; it does not change.
        size: (channels, height, width) of its input; any number of images of this size can be computed.

    Raises:
        NetworkError: The network cannot be exported.
    """
    spec = json.dumps({**backbone.spec(), "size": size}, sort_keys=True).encode()
    weights = save({key: value.contiguous() for key, value in backbone.state_dict().items()})
    kept = cache_file(spec, weights)
    model = read_checked(kept)
    if model is None:
        model = export_apart(spec, weights, "+".join(backbone.layers))
        write_checked(kept, model)
    return OnnxBackbone(model, keep_output=backbone.keep_output)


def cache_file(spec: bytes, weights: bytes) -> Path:
    """Return the path at which the model of a network is kept."""
    versions = [importlib.metadata.version(name) for name in ("torch", *PACKAGES)]
    key = hashlib.sha256(b"\0".join([json.dumps([__version__, *versions]).encode(), spec, weights])).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return folder / "psc" / f"{key}.onnx"


def read_checked(file: Path) -> bytes | None:
    """Return what :func:`write_checked` wrote; None where there is no such file or it has changed."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, model = data[:32], data[32:]
    return model if hashlib.sha256(model).digest() == digest else None


def write_checked(file: Path, model: bytes) -> None:
    """Write a model behind its digest, whole or not at all; without a writable cache folder, not at all."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as part:
            try:
                part.write(hashlib.sha256(model).digest() + model)
                part.flush()
                Path(part.name).replace(file)
            except OSError:
                Path(part.name).unlink()


def export_apart(spec: bytes, weights: bytes, layers: str) -> bytes:
    """The ONNX model of a network, exported by a process of its own.

    Raises:
        NetworkError: The network after ``layers`` cannot be exported.
    """
    with TemporaryDirectory(prefix="psc-onnx-") as name:
        folder = Path(name)
        (folder / SPEC).write_bytes(spec)
        (folder / WEIGHTS).write_bytes(weights)
        command = [sys.executable, "-m", __name__, name]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NetworkError(f"no process could be run to export the network to ONNX: {error}") from error
        if result.returncode:
            reason = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
            raise NetworkError(f"the network after {layers} has no ONNX model: {reason}")
        return (folder / MODEL).read_bytes()


def export(folder: Path) -> None:
    """Write the ONNX model, for any number of images, of the network whose spec and weights lie in ``folder``."""
    spec = json.loads((folder / SPEC).read_text())
    backbone = rebuild_backbone(spec, load_file(folder / WEIGHTS), allow_factories=[spec["network"]["spec"]])
    images = torch.zeros(2, *spec["size"])
    any_number = ({0: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        program = torch.onnx.export(
            _SideBySide(backbone), (images,), dynamo=True, input_names=["images"], dynamic_shapes=any_number
        )
    if program is None:
        raise NetworkError("PyTorch gave no ONNX program; use --backend folded")
    (folder / MODEL).write_bytes(program.model_proto.SerializeToString())


class _SideBySide(nn.Module):
    """A backbone whose features and logits are one tuple of tensors."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features, logits = self.backbone(images)
        return tuple(features) if logits is None else (*features, logits)


if __name__ == "__main__":
    export(Path(sys.argv[1]))
