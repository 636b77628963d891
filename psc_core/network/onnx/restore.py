"""Restore a bundle's network from its ONNX file, which is untrusted."""

from __future__ import annotations

from typing import Final

from psc_core.errors import NetworkError
from psc_core.network.onnx.body import OnnxBody
from psc_core.network.onnx.cost import cost_of
from psc_core.network.onnx.model import check_model, parse_model
from psc_core.network.onnx.network import Size
from psc_core.network.onnx.rewrite import INPUT_NAME
from psc_core.network.onnx.sizes import sizes_of

_ORIGIN: Final = "backbone.onnx"
_FLOAT: Final = 1


def restore_body(data: bytes, size: Size, *, outputs: int) -> OnnxBody:
    """Check a stored graph and prepare to run it, without computing anything.

    Args:
        data: The content of the file.
        size: (channels, height, width) of the images.
        outputs: The number of layers, plus one if the logits are kept.

    Raises:
        NetworkError: If :mod:`.model` refuses the graph, or its inputs or outputs are not those of a bundle.
    """
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
