"""The graphs of a fitted model: everything from pixels to the decision.

:class:`Resize` resizes and crops as :class:`.Preprocess` does, in matrix products, which every runtime of ONNX has.
ONNX's own ``Resize`` does not serve: with ``antialias`` OpenVINO computes something else, by up to 120 of 255 levels,
and ONNX Runtime's is off by up to 9.  A row of the result is a weighted mean of rows of the image, so that

    pixels = V · image · Hᵀ,   weight ∝ f((x + ½ − (i + ½) · scale) / max(scale, 1))

with one matrix for each axis.  As in Pillow and PyTorch, the rows are done first and rounded to whole levels.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from psc_core.conformal import conformal_p_values
from psc_core.errors import EXPORTED, NetworkError, UsageError, needs
from psc_core.images.preprocess import MAKE_KNOWN, Preprocess
from psc_core.model import FittedModel
from psc_core.network.export import reason_of, silent
from psc_core.network.onnx import PACKAGES
from psc_core.network.onnx_graph import remove_notes
from psc_core.pipeline import ood_score_of, smooth_noise
from psc_core.storage import storable_backbone

if TYPE_CHECKING:
    from onnx import ModelProto

GRAPH, ANY_SIZE = EXPORTED
PIXELS: Final = "images"  # the input
METADATA: Final = "psc"  # the key of what the graph says of itself, in JSON
_SHARPNESS: Final = -0.5  # of the bicubic filter, as in Pillow; Keys (1981) calls it a


class Resize(nn.Module):
    """The host half of a preprocessing for decoded images of any size; one batch has one size.

    While a graph is made, sizes are symbols of PyTorch, of which types and shapes say nothing.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess = preprocess

    def forward(self, images: Tensor) -> Tensor:
        """Return pixels (n, channels, height, width), whole levels as floats, of images (n, h, w, channels)."""
        height, width = images.shape[1:3]
        planes = images.permute(0, 3, 1, 2).float()
        shorter: Any = torch.sym_min(height, width)
        size = self.preprocess.resize
        across = self.preprocess.width if size is None else size * width // shorter
        down = self.preprocess.height if size is None else size * height // shorter
        planes = _whole(planes @ self._weights(width, across, self.preprocess.width).T)
        return _whole(self._weights(height, down, self.preprocess.height) @ planes)

    def _weights(self, size: Any, resized: Any, cropped: int) -> Tensor:
        """Return the weight of each of ``size`` pixels in each of ``resized`` ones, those of the central crop only."""
        scale = size / resized
        centres = (torch.arange(cropped) + self.preprocess.offset(resized - cropped) + 0.5) * scale
        wide: Any = torch.sym_max(scale, 1.0)
        distance: Tensor = ((torch.arange(size) + 0.5 - centres[:, None]) / wide).abs()
        weights = (1 - distance).relu()
        if self.preprocess.interpolation == "bicubic":
            a, near, far = _SHARPNESS, distance.clamp(max=1), distance.clamp(1, 2)
            weights = ((a + 2) * near - (a + 3)) * near * near + 1 + a * (((far - 5) * far + 8) * far - 4)
        return weights / weights.sum(dim=1, keepdim=True)


def _whole(levels: Tensor) -> Tensor:
    return (levels + 0.5).floor().clamp(0, 255)


class Inputs(nn.Module):
    """Everything before the network: from pixels, or decoded images of any size, to its inputs."""

    def __init__(self, preprocess: Preprocess, *, resize: bool) -> None:
        super().__init__()
        self.resize = Resize(preprocess) if resize else None
        self.scale, self.shift = (nn.Buffer(part) for part in preprocess.scale_and_shift())

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2) if self.resize is None else self.resize(images)
        return pixels.float() * self.scale + self.shift


class Answers(nn.Module):
    """Everything after the network, in float32 and in operations that ONNX has."""

    def __init__(self, model: FittedModel) -> None:
        super().__init__()
        self.pipeline = copy.deepcopy(model.pipeline).cpu().float()
        self.calibration, self.keeps_output = model.calibration, model.backbone.keep_output

    def forward(self, features: Sequence[Tensor], thresholds: Sequence[Tensor]) -> dict[str, Tensor]:
        *layers, last = features
        layers, output = (layers, last) if self.keeps_output else ([*layers, last], None)
        scorer = self.pipeline.scorer
        scored = scorer.score(scorer.embedding(layers, output))
        found = {name: scored.scores[name] for name in scorer.head.score_names if name in scored.scores}
        found["ood_score"], check_p_values = ood_score_of(scored.scores, self.pipeline.checks)
        found["ood_p_value"] = conformal_p_values(self.pipeline.calibration_scores, found["ood_score"])
        found |= dict(zip(["checks"], check_p_values, strict=False))  # none without checks
        given = dict(zip(self.calibration.graph_inputs, thresholds, strict=True))
        return found | self.calibration.decide_in_graph(found, scored.probabilities, given)


def export_graphs(model: FittedModel) -> dict[str, ModelProto]:
    """Return graphs of a fitted model by file name: for images of the network's size, and of any size."""
    needs("an ONNX graph", "onnx", *PACKAGES, error=NetworkError)
    from onnx import compose, load_from_string, version_converter

    if not model.preprocess.is_known:
        raise UsageError(f"a graph has to say how files become inputs; {MAKE_KNOWN}")
    if model.pipeline.scorer.precision != "fp32":
        raise UsageError("an ONNX graph computes in float32, and this model in bfloat16; fit it with precision fp32")
    network = load_from_string(storable_backbone(model, graph=True).onnx or b"")
    if network.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1:
        raise UsageError(f"the network of {model.name} takes one image at a time; fit one with a dynamic batch axis")
    after, before = _answers(model), {file: _inputs(model, resize=file == ANY_SIZE) for file in (GRAPH, ANY_SIZE)}
    opset = next(each.version for each in after.opset_import if not each.domain)
    found = {}
    try:
        if any(each.version != opset for each in network.opset_import if not each.domain):
            network = version_converter.convert_version(network, opset)
        network = compose.add_prefix(network, "network/")
        after.ir_version = network.ir_version = max(each.ir_version for each in (network, after))
        features = [each.name for each in network.graph.output]
        names = [each.name for each in after.graph.input][: len(features)]
        rest: ModelProto = compose.merge_models(network, after, list(zip(features, names, strict=True)))
        for file, first in before.items():
            first.ir_version = rest.ir_version
            pixels = [(first.graph.output[0].name, network.graph.input[0].name)]
            found[file] = compose.merge_models(first, rest, pixels)
    except Exception as error:  # the packages' errors have no common base class
        raise NetworkError(f"the graphs of {model.name} do not fit together: {str(error)[:300]}") from error
    for graph in found.values():
        remove_notes(graph)
        del graph.graph.value_info[:]  # In each of the three graphs a name such as s14 stands for another size.
        _give_defaults(graph, model)
    return found


def _exported(model: FittedModel, module: nn.Module, examples: tuple[Any, ...], **settings: Any) -> ModelProto:
    """Return the graph of a module, traced with ``examples``, with the default opset of PyTorch."""
    from onnxscript import optimizer

    with silent(), torch.inference_mode(False), torch.no_grad():
        try:
            program = torch.onnx.export(module.eval(), examples, dynamo=True, optimize=False, verbose=False, **settings)
            assert program is not None
            optimizer.fold_constants(program.model)  # No more: its rules drop an addition of less than 1e-8.
            optimizer.remove_unused_nodes(program.model)
        except Exception as error:
            raise NetworkError(f"{model.name} cannot be exported to ONNX: {reason_of(error)}") from error
    return program.model_proto


def _answers(model: FittedModel) -> ModelProto:
    """Return the graph of :class:`Answers`, whose inputs are the features and then the thresholds."""
    from onnx import compose, helper

    scorer = model.pipeline.scorer
    with torch.inference_mode():
        features, output = scorer.features(scorer.standardise(smooth_noise(model.preprocess, 2).to(model.device)))
    examples = [each.float().cpu().clone() for each in (*features, *([] if output is None else [output]))]
    thresholds = [torch.tensor(float(value)) for value in defaults(model).values()]
    answers = Answers(model).eval()
    with torch.inference_mode(False), torch.no_grad():
        names = list(answers([each.clone() for each in examples], thresholds))
    inputs = [*(f"features_{at}" for at in range(len(examples))), *defaults(model)]
    any_number = [{0: torch.export.Dim.DYNAMIC}] * len(examples), [None] * len(thresholds)
    graph = _exported(model, answers, (examples, thresholds), dynamic_shapes=any_number, input_names=inputs)
    found: ModelProto = compose.add_prefix(graph, "answers/", rename_inputs=False)
    for name, output in zip(names, found.graph.output, strict=True):
        found.graph.node.append(helper.make_node("Identity", [output.name], [name]))
        output.name, output.type.tensor_type.shape.dim[0].dim_param = name, "n"
    return found


def _inputs(model: FittedModel, *, resize: bool) -> ModelProto:
    """Return the graph of :class:`Inputs`."""
    from onnx import compose

    channels, height, width = model.preprocess.shape
    dynamic = dict.fromkeys((0, 1, 2) if resize else (0,), torch.export.Dim.DYNAMIC)
    example = torch.zeros(2, height + 1 if resize else height, width + 2 if resize else width, channels).byte()
    graph = _exported(
        model, Inputs(model.preprocess, resize=resize), (example,), dynamic_shapes=(dynamic,), input_names=[PIXELS]
    )
    found: ModelProto = compose.add_prefix(graph, "before/", rename_inputs=False)
    sizes = found.graph.input[0].type.tensor_type.shape.dim
    for axis, name in zip(dynamic, "nhw", strict=False):
        sizes[axis].dim_param = name
    return found


def defaults(model: FittedModel) -> dict[str, float]:
    """Return the thresholds by input; what a policy leaves open is no limit."""
    policy = model.policy.model_dump()
    values = {name: policy[name] for name in model.calibration.graph_inputs}
    return {name: float(np.finfo(np.float32).max) if value is None else value for name, value in values.items()}


def _give_defaults(graph: ModelProto, model: FittedModel) -> None:
    """Make the thresholds optional, and let the graph say what a program needs to know of it."""
    from onnx import helper, numpy_helper

    for name, value in defaults(model).items():
        graph.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    described = {
        "name": model.name,
        "version": model.version,
        "task": model.task.name,
        "classes": list(model.classes),
        "decisions": list(model.calibration.decision_names),
        "checks": list(model.checks),
        "policy": model.policy.model_dump(),
        "preprocess": model.preprocess.to_json(),
    }
    helper.set_model_props(graph, {METADATA: json.dumps(described)})
    graph.producer_name, graph.doc_string = "psc", ""
