"""A model repository that other servers read: Triton, and OpenVINO's model server, which both take

    NAME/config.pbtxt     of Triton alone
    NAME/1/model.onnx

Inputs and outputs are named as by this project's own service in the v2 protocol, so that its clients need no change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from psc_core.bundle import write_files
from psc_core.errors import UsageError
from psc_core.export.graph import GRAPH, PIXELS, export_graphs
from psc_core.model import MAX_BATCH, FittedModel

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

CONFIG: Final = "config.pbtxt"
VERSION: Final = "1"
_QUEUE_MICROSECONDS: Final = 1000  # for which an image waits for others to share its batch


def write_repository(model: FittedModel, folder: Path, *, triton: bool) -> None:
    """Write the folder of one model below ``folder``; ``triton`` adds what only that server has: names of labels."""
    if "/" in model.name or model.name in (".", ".."):
        raise UsageError(f"{model.name!r} can be no folder's name; fit the model with another --name")
    graph = export_graphs(model, [GRAPH])[GRAPH]
    if triton and "label" in model.task.tensors:
        _add_labels(graph, model.classes)
    write_files(folder / model.name / VERSION, {GRAPH: graph.SerializeToString()})
    if triton:
        write_files(folder / model.name, {CONFIG: _config(graph, model.name).encode()})


def _add_labels(graph: ModelProto, classes: Sequence[str]) -> None:
    """Add the output ``label``: the name of the class, in place of a table that a client would need."""
    from onnx import TensorProto, helper, numpy_helper

    names = numpy_helper.from_array(np.array(classes, object), "label/names")
    graph.graph.initializer.append(names)
    graph.graph.node.append(helper.make_node("Gather", [names.name, "class_index"], ["label"]))
    graph.graph.output.append(helper.make_tensor_value_info("label", TensorProto.STRING, ["n"]))


def _config(graph: ModelProto, name: str) -> str:
    """Return Triton's description of a model.

    Thresholds are left out: a request that gives its own could not share a batch with others.
    """
    (images,) = (each for each in graph.graph.input if each.name == PIXELS)
    inputs, outputs = _listed([images]), _listed(graph.graph.output)
    return f"""name: {json.dumps(name)}
platform: "onnxruntime_onnx"
max_batch_size: {MAX_BATCH}
input [
{inputs}
]
output [
{outputs}
]
dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_MICROSECONDS} }}
"""


def _listed(values: Sequence[ValueInfoProto]) -> str:
    """Return tensors without their first axis; one number for each image is a vector of one there."""
    from onnx import TensorProto

    lines = []
    for value in values:
        sizes = [axis.dim_value for axis in value.type.tensor_type.shape.dim[1:]]
        kind = TensorProto.DataType.Name(value.type.tensor_type.elem_type).replace("FLOAT", "FP32")
        shape = f"dims: {sizes}" if sizes else "dims: [ 1 ] reshape { shape: [ ] }"
        lines.append(f'  {{ name: "{value.name}" data_type: TYPE_{kind} {shape} }}')
    return ",\n".join(lines)
