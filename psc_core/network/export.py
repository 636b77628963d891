"""Export a truncated PyTorch network to ONNX, whose runtime is faster on a CPU and needs no code of the network.

While serving, a separate process exports the network, because exporting changes PyTorch's state for all threads.  It
builds the network as a bundle's: ``python -m psc_core.network.export FOLDER`` reads :data:`SPEC` and
:data:`WEIGHTS_FILE` from a folder and writes :data:`MODEL` into it.  A network that no name can build is exported in
this process.

Exporting takes seconds, so the result is cached (:mod:`psc_core.network.load`) under the digest of spec and weights.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from psc_core.errors import NetworkError, needs, of_this_machine
from psc_core.network.cut import Backbone, HookedNetwork, HookPlan, onnx_backbone, rebuild_backbone, truncate
from psc_core.network.layers import list_layers
from psc_core.network.load import cache_file, read_checked, write_checked
from psc_core.network.onnx import PACKAGES, OnnxBody, OnnxNetwork, Size, restore_body
from psc_core.network.onnx_graph import INPUT_NAME, remove_notes

SPEC: Final = "spec.json"
WEIGHTS_FILE: Final = "weights.safetensors"
MODEL: Final = "model.onnx"


def to_onnx(backbone: Backbone, size: Size) -> Backbone:
    """Return a traced float32 network as one that ONNX Runtime runs, exported once, for any number of images."""
    spec = json.dumps({**backbone.spec(), "size": size}, sort_keys=True).encode()
    weights = save({key: value.contiguous() for key, value in backbone.state_dict().items()})
    kept = cache_file("onnx", spec, weights)
    model = read_checked(kept)
    if model is None:
        model = export_apart(spec, weights, "+".join(backbone.layers))
        write_checked(kept, model)
    return onnx_backbone(OnnxBody(model), backbone.layers, keep_output=backbone.keep_output)


def export_apart(spec: bytes, weights: bytes, layers: str) -> bytes:
    try:
        with TemporaryDirectory(prefix="psc-onnx-") as name:
            folder = Path(name)
            (folder / SPEC).write_bytes(spec)
            (folder / WEIGHTS_FILE).write_bytes(weights)
            command = [sys.executable, "-m", __name__, name]
            # The process must find the same modules, a factory's among them.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            living, lifeline = os.pipe()  # Its input ends with this process.
            try:
                result = subprocess.run(
                    command, env=environment, stdin=living, capture_output=True, text=True, check=False
                )
            except OSError as error:
                raise NetworkError(f"no process could be run to export the network to ONNX: {error}") from error
            finally:
                os.close(living)
                os.close(lifeline)
            if result.returncode:
                reason = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
                raise NetworkError(f"the network after {layers} has no ONNX model: {reason}")
            return (folder / MODEL).read_bytes()
    except OSError as error:
        raise NetworkError(
            f"the network after {layers} cannot be exported to ONNX here: {of_this_machine(error)}"
        ) from error


def export(folder: Path) -> None:
    """Write the ONNX model, for any number of images, of the network with the spec and the weights in ``folder``."""
    spec = json.loads((folder / SPEC).read_text())
    backbone = rebuild_backbone(spec, load_file(folder / WEIGHTS_FILE), allow_factories=[spec["network"]["spec"]])
    (folder / MODEL).write_bytes(_exported(backbone, spec["size"]))


def export_here(backbone: Backbone, size: Size) -> bytes:
    """Export a network in this process and return the ONNX model, for any number of images."""
    needs("a network that no name builds is stored as an ONNX graph, which", "onnx", *PACKAGES, error=NetworkError)
    try:
        with silent(), torch.inference_mode(False):
            return _exported(_without_stop(copy.deepcopy(backbone).cpu()), size)
    except Exception as error:  # the network's own code may raise any error
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outermost error only names the step
            cause = cause.__cause__
        raise NetworkError(
            f"the network after {'+'.join(backbone.layers)} has no ONNX model: {reason_of(cause)}"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, and the next one if the first is a heading."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join([first, *(others[:1] if first.endswith(":") else ())])[:300]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop what PyTorch says while it exports: of a network that it cannot hold, it prints the graph, by pages."""
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was_disabled, shapes.disabled = shapes.disabled, True
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        shapes.disabled = was_disabled


def check_exportable(net: nn.Module, trial: Tensor, precision: str) -> None:
    """Try to export a whole network that a bundle will hold as a graph, before hours are spent on fitting."""
    if precision != "fp32":
        raise NetworkError(f"an ONNX graph computes in float32, got precision {precision}; leave it out")
    if not isinstance(net, OnnxNetwork):
        layer, (_, channels, height, width) = list_layers(net, trial)[0].name, trial.shape
        size = channels, height, width
        model = export_here(truncate(net, [layer], keep_output=True, trial=trial), size)
        try:
            restore_body(model, size, outputs=2)
        except NetworkError as error:
            raise NetworkError(
                f"{error}; if it computes in bfloat16 or float16 inside, take autocast and casts out of its forward"
            ) from error


def _without_stop(backbone: Backbone) -> Backbone:
    """Return the network without the hook that stops it early, if it has one."""
    if not isinstance(backbone.body, HookedNetwork):
        return backbone
    whole = HookedNetwork(backbone.body.net, backbone.layers, HookPlan(), keep_output=backbone.keep_output)
    return Backbone(whole, backbone.cut)


def _exported(backbone: Backbone, size: Sequence[int]) -> bytes:
    whole, images, any_number = _SideBySide(backbone), (torch.zeros(2, *size),), ({0: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        program = torch.onnx.export(
            whole, images, dynamo=True, input_names=[INPUT_NAME], dynamic_shapes=any_number, verbose=False
        )
    if program is None:
        raise NetworkError("PyTorch gave no ONNX program")
    model = program.model_proto
    remove_notes(model)
    return bytes(model.SerializeToString())


class _SideBySide(nn.Module):
    """A backbone whose features and logits are returned as one tuple of tensors."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features, logits = self.backbone(images)
        return tuple(features) if logits is None else (*features, logits)


def _end_with_parent(folder: Path) -> None:
    """Remove the folder and end this process once nobody waits for it."""
    os.read(0, 1)  # not sys.stdin, whose lock the interpreter wants when it ends
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(Path(sys.argv[1]),), daemon=True).start()
    export(Path(sys.argv[1]))
