"""A bundle's decision as one ONNX file: pixels in; scores, prediction set or interval, and decision out.

    images uint8 (n, h, w, c) ─▶ inputs of the network ─▶ network ─▶ everything after it
                                 :class:`Inputs`          its graph  :class:`Answers`

Three graphs become one, of which PyTorch exports the first and the last.  A second file differs in the first: it takes
images of any size, and resizes and crops them.  Everything after the network is float32 there, though the service
computes up to the difference from a class mean in float64; :func:`check` says what that costs.  What ONNX lacks,
:mod:`psc_core.linalg` exports as something else.  Where a threshold is an input with a default, a caller may give
another.

A folder has the graphs, :data:`VECTORS` with images and their answers by the bundle, and a README.  :func:`check` sends
these images through every runtime that is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from psc_core.bundle import EXPORTED, read_inside, tensors_of, write_files
from psc_core.conformal import conformal_p_values
from psc_core.errors import BundleError, NetworkError, UsageError, needs, shorten
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below
from psc_core.images.graph import Resize
from psc_core.images.preprocess import MAKE_KNOWN, ImageLike, Preprocess, as_batch
from psc_core.model import FittedModel
from psc_core.network.export import silent
from psc_core.network.onnx import PACKAGES
from psc_core.network.onnx_check import MAX_FILE_BYTES, check_model, parse_model, sizes_of
from psc_core.network.onnx_graph import remove_notes
from psc_core.pipeline import ood_score_of, smooth_noise, storable_backbone
from psc_core.text import align

if TYPE_CHECKING:
    from onnx import ModelProto

GRAPH: Final = EXPORTED
ANY_SIZE: Final = "model-any-size.onnx"
VECTORS: Final = "vectors.safetensors"
README: Final = "README.md"
PIXELS: Final = "images"  # the input
METADATA: Final = "psc"  # the key of what the graph says of itself, in JSON
VECTOR_IMAGES: Final = 64
LARGER_IMAGES: Final = 8  # images of another size than the network's, for the graph that resizes
_LARGER: Final = "any-size/"  # before the names of what belongs to :data:`ANY_SIZE`
_LOOSER: Final = 100  # times that, where levels of pixels may be rounded otherwise
_NUMBERS: Final = ("mean", "lower", "upper")
# What two runtimes may differ by; the numbers of a regression in standard deviations.
CLOSE: Final = {"probabilities": 1e-4, "ood_p_value": 1e-3, **dict.fromkeys(_NUMBERS, 1e-3)}
# The axes of what is compared.  A p-value may differ by a ``step``: rounding may move a score past another.
_COMMON: Final = {"alpha": "", "step": "", PIXELS: "nhwc", **dict.fromkeys(("decision", "is_ood", "ood_p_value"), "n")}
_OF_CLASSES: Final = {"quantile": "", "ambiguity_threshold": "", "predictive_entropy": "n", "class_index": "n",
                      "probabilities": "nk", "prediction_set": "nk"}  # fmt: skip
_OF_NUMBERS: Final = {"max_width": "", **dict.fromkeys((*_NUMBERS, "aleatoric", "epistemic"), "n")}


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


def export_graphs(model: FittedModel, files: Sequence[str] = (GRAPH, ANY_SIZE)) -> dict[str, ModelProto]:
    """Return graphs of a fitted model by file name: for images of the network's size, and of any size."""
    needs("an ONNX graph", "onnx", *PACKAGES, error=NetworkError)
    from onnx import compose, load_from_string, version_converter

    if not model.preprocess.is_known:
        raise UsageError(f"a graph has to say how files become inputs; {MAKE_KNOWN}")
    if model.pipeline.scorer.precision != "fp32":
        raise UsageError("an ONNX graph computes in float32, and this model in bfloat16; fit it with precision fp32")
    if not (head := model.pipeline.scorer.head).has_graph:
        raise UsageError(f"ONNX lacks operations of the head {head.kind!r}; fit the model with another head")
    network = load_from_string(storable_backbone(model, graph=True).onnx or b"")
    if network.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1:
        raise UsageError(f"the network of {model.name} takes one image at a time; fit one with a dynamic batch axis")
    after = _answers(model)
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
        for file in files:
            before = _inputs(model, resize=file == ANY_SIZE)
            before.ir_version = rest.ir_version
            pixels = [(before.graph.output[0].name, network.graph.input[0].name)]
            found[file] = compose.merge_models(before, rest, pixels)
    except Exception as error:  # the packages' errors have no common base class
        raise NetworkError(f"the graphs of {model.name} do not fit together: {str(error)[:300]}") from error
    for graph in found.values():
        remove_notes(graph)
        _give_defaults(graph, model)
    return found


def _exported(model: FittedModel, module: nn.Module, examples: tuple[Any, ...], **settings: Any) -> ModelProto:
    """Return the graph of a module, traced with ``examples``, with the default opset of PyTorch."""
    with silent(), torch.inference_mode(False), torch.no_grad():
        try:
            program = torch.onnx.export(module.eval(), examples, dynamo=True, verbose=False, **settings)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise NetworkError(f"{model.name} cannot be exported to ONNX: {reason[:300]}") from error
    assert program is not None
    return program.model_proto


def _answers(model: FittedModel) -> ModelProto:
    """Return the graph of :class:`Answers`, whose inputs are the features and then the thresholds."""
    from onnx import compose, helper

    scorer = model.pipeline.scorer
    with torch.inference_mode():
        features, output = scorer.features(scorer.standardise(smooth_noise(model.preprocess, 2).to(model.device)))
    examples = [each.float().cpu().clone() for each in (*features, *([] if output is None else [output]))]
    thresholds = [torch.tensor(float(value)) for value in _defaults(model).values()]
    answers = Answers(model).eval()
    with torch.inference_mode(False), torch.no_grad():
        names = list(answers([each.clone() for each in examples], thresholds))
    inputs = [*(f"features_{at}" for at in range(len(examples))), *_defaults(model)]
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


def _defaults(model: FittedModel) -> dict[str, float]:
    """Return the thresholds by input; what a policy leaves open is no limit."""
    policy = model.policy.model_dump()
    values = {name: policy[name] for name in model.calibration.graph_inputs}
    return {name: float(np.finfo(np.float32).max) if value is None else value for name, value in values.items()}


def _give_defaults(graph: ModelProto, model: FittedModel) -> None:
    """Make the thresholds optional, and let the graph say what a program needs to know of it."""
    from onnx import helper, numpy_helper

    for name, value in _defaults(model).items():
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


def images_below(folder: Path, *, must: bool = True) -> list[str]:
    """Return the first image files below a folder, which may be missing unless it ``must`` have some."""
    found = [file for file in sorted(files_below(folder)) if file.lower().endswith(SUFFIXES)] if folder.is_dir() else []
    if must and not found:
        raise UsageError(f"there are no images below {folder}; give a folder with some, or leave it out")
    return found[:VECTOR_IMAGES]


def export_model(model: FittedModel, folder: Path, images: Sequence[ImageLike] | Tensor = ()) -> None:
    """Write the graphs, images with their answers, and README to ``folder``; noise fills the images up."""
    if (folder / README).exists() and not (folder / VECTORS).exists():
        raise UsageError(f"{folder} has a {README} that psc-export did not write; give a folder of its own")
    graphs = export_graphs(model)
    given = model.preprocess.to_pixels(as_batch(images[:VECTOR_IMAGES], model.preprocess))
    pixels = torch.cat([given, smooth_noise(model.preprocess, VECTOR_IMAGES)])[:VECTOR_IMAGES]
    larger = _enlarged(pixels[:LARGER_IMAGES])
    reduced = [model.preprocess.from_image(Image.fromarray(each.numpy())) for each in larger.squeeze(-1)]
    vectors = {PIXELS: pixels.permute(0, 2, 3, 1), **_answers_of(model, pixels)}
    quantile, step = model.calibration.quantile(model.policy.coverage), 1 / (len(model.calibration) + 1)
    limits = _defaults(model) | {"quantile": quantile, "step": step}
    vectors |= {name: torch.tensor(limit) for name, limit in limits.items()}
    answers = {PIXELS: larger, **_answers_of(model, torch.from_numpy(np.stack(reduced)))}
    vectors |= {_LARGER + name: each for name, each in answers.items()}
    proof = save({name: each.contiguous() for name, each in vectors.items()})
    files = {name: graph.SerializeToString() for name, graph in graphs.items()}
    write_files(folder, {VECTORS: proof, README: _readme(model).encode(), **files})


def _enlarged(pixels: Tensor) -> Tensor:
    """Return images of another size and shape, (n, h, w, c)."""
    height, width = (1 + round(factor * side) for factor, side in zip((2.3, 1.7), pixels.shape[2:], strict=True))
    return functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True).permute(0, 2, 3, 1)


def _answers_of(model: FittedModel, pixels: Tensor) -> dict[str, Tensor]:
    outputs = model.compute(pixels)
    decisions = model.decide(model.outputs(outputs.packed.numpy()))
    answers = {name: outputs[name] for name in outputs.scores}
    answers |= {name: torch.as_tensor(value) for name, value in vars(decisions).items()}
    answers |= {"probabilities": outputs.probabilities} if model.num_probabilities else {}
    return answers | ({"checks": outputs.check_p_values} if model.checks else {})


def _readme(model: FittedModel) -> str:
    channels, height, width = model.preprocess.shape
    mode = model.preprocess.mode
    of_classes = 'print([about["classes"][k] for k in answers["prediction_set"][0].nonzero()[0]])'
    of_numbers = 'print(*(answers[name][0] for name in ("mean", "lower", "upper")))'
    line = of_classes if model.num_probabilities else of_numbers
    title = "".join(each if each.isprintable() else " " for each in model.name)
    title = re.sub(r"[\\`*_\[\]<>&#~|]", r"\\\g<0>", title)  # what Markdown reads
    inputs = ", ".join(f"`{name}` ({value:.6g})" for name, value in _defaults(model).items())
    return f"""# {title}

`{GRAPH}` answers as the bundle {model.version or "it is of"} does, without PSC.

* Input `{PIXELS}`: uint8 (n, {height}, {width}, {channels}), resized and cropped as `preprocess` in the metadata says.
  Mean and standard deviation are applied inside.
* Thresholds, inputs that may be left out: {inputs}.
* Output `decision`: a position in `decisions` of the metadata. The other outputs are named as in the service's answers.
* `psc-export --check .` compares the runtimes of a machine on `{VECTORS}`.

```python
import json, numpy, onnxruntime

onnxruntime.set_default_logger_severity(3)  # It warns of every input with a default.
session = onnxruntime.InferenceSession("{GRAPH}")
about = json.loads(session.get_modelmeta().custom_metadata_map["{METADATA}"])
names = [output.name for output in session.get_outputs()]
pixels = numpy.zeros(({height}, {width}, {channels}), "uint8")
# Of a file: numpy.asarray(PIL.Image.open(FILE).convert("{mode}").resize(({width}, {height}))).reshape(pixels.shape)
answers = dict(zip(names, session.run(None, {{"{PIXELS}": pixels[None]}})))
print(about["decisions"][answers["decision"][0]], answers["ood_p_value"][0])
{line}
```

In a browser or Node, `pixels` a Uint8Array of height, width and channels in this order:

```js
import * as ort from "onnxruntime-web";

const session = await ort.InferenceSession.create("{GRAPH}", {{ executionProviders: ["wasm"] }});
const images = new ort.Tensor("uint8", pixels, [1, {height}, {width}, {channels}]);
const answers = await session.run({{ images }});
console.log(`decision ${{answers.decision.data[0]}}, p-value ${{answers.ood_p_value.data[0]}}`);
```
"""


Run = Callable[[npt.NDArray[np.uint8]], Mapping[str, npt.NDArray[Any]]]


def _onnx_runtime(graph: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # It warns of every input with a default.
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(None, {PIXELS: images}), strict=True))


def _openvino(graph: Path) -> Run:
    import openvino

    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: {name: value for out, value in compiled({PIXELS: images}).items() for name in out.names}


RUNTIMES: Final[Mapping[str, Callable[[Path], Run]]] = {"onnxruntime": _onnx_runtime, "openvino": _openvino}


@dataclass(frozen=True)
class Compared:
    """What a runtime answers beside the bundle."""

    runtime: str
    graph: str
    others: int  # number of images with another class, decision or set that is not as near to a limit as :data:`CLOSE`
    apart: Mapping[str, float]  # largest difference by output
    images: int
    agrees: bool  # whether the differences are as small as they should be, and finite

    def row(self) -> list[str]:
        numbers = (f"{self.apart[name]:.1e}" for name in self.columns)
        return [
            self.runtime,
            self.graph,
            f"{self.others} of {self.images}",
            *numbers,
            "equal" if self.agrees else "◀ DIFFERS",
        ]

    @property
    def columns(self) -> list[str]:
        """The outputs that a table shows."""
        return [name for name in (*CLOSE, "log_density") if name in self.apart]


def check(folder: Path) -> list[Compared]:
    """Compare each installed runtime with the answers that travel along."""
    needs("--check", "onnx", "onnx", error=NetworkError)
    if not (installed := [name for name in RUNTIMES if importlib.util.find_spec(name)]):
        raise NetworkError(f"no runtime is installed of {', '.join(RUNTIMES)}; pip install onnxruntime")
    given: dict[str, dict[str, npt.NDArray[Any]]] = {GRAPH: {}, ANY_SIZE: {}}
    try:
        for name, each in tensors_of(folder / VECTORS, read_inside(folder, VECTORS, MAX_FILE_BYTES)).items():
            for file in [ANY_SIZE if name.startswith(_LARGER) else GRAPH] if each.ndim else given:
                values = each.float() if each.is_floating_point() else each
                given[file][name.removeprefix(_LARGER)] = values.numpy()
        for file, vectors in given.items():
            _check_file(folder, file, vectors)
    except (BundleError, NetworkError) as error:
        reason = str(error).partition(";")[0]
        raise BundleError(f"{folder} is no exported folder: {reason}; export the bundle again") from error
    return [_compare(name, folder / file, vectors) for name in installed for file, vectors in given.items()]


def _check_file(folder: Path, file: str, vectors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check a graph before a runtime runs whatever it holds, and that images and answers are those of such a graph."""
    graph, sizes = parse_model(read_inside(folder, file, MAX_FILE_BYTES), file), dict[str, int]()
    check_model(graph, file)
    odd = {
        name
        for name, axes in (_COMMON | (_OF_CLASSES if "prediction_set" in vectors else _OF_NUMBERS)).items()
        if (each := vectors.get(name)) is None
        or each.ndim != len(axes)
        or any(sizes.setdefault(axis, side) != side for axis, side in zip(axes, each.shape, strict=True))
    }
    odd |= {each.name for each in graph.graph.output} ^ {name for name, each in vectors.items() if each.ndim} - {PIXELS}
    odd |= {PIXELS} - {each.name for each in graph.graph.input[:1]}
    if odd or min(sizes["n"], sizes.get("k", 2)) < 2:
        names = shorten(", ".join(map(repr, sorted(odd or [PIXELS]))))
        raise BundleError(f"{names} of {VECTORS} and {file} do not fit together")
    for axis, side in zip(graph.graph.input[0].type.tensor_type.shape.dim[1:], vectors[PIXELS].shape[1:], strict=False):
        axis.dim_value = side
    sizes_of(graph, file)


def _compare(runtime: str, graph: Path, vectors: Mapping[str, npt.NDArray[Any]]) -> Compared:
    images = vectors[PIXELS]
    try:
        run = RUNTIMES[runtime](graph)
        one, others = run(images[:1]), run(images[1:])  # Some runtimes err for one image alone.
        answers = {name: np.concatenate([each, others[name]]) for name, each in one.items()}
    except Exception as error:  # a runtime's errors have no common base class
        raise NetworkError(f"{runtime} cannot run {graph.name}: {' '.join(str(error).split())[:300]}") from error
    expected = {name: each for name, each in vectors.items() if each.ndim and name != PIXELS}
    for name, each in expected.items():
        got = answers.get(name, images[:0])
        if got.shape != (len(images), *each.shape[1:]) or got.dtype.kind != each.dtype.kind:
            raise NetworkError(f"{runtime} gives other {shorten(repr(name))} than those in {VECTORS}; export again")
    deviation = np.hypot(expected["aleatoric"], expected["epistemic"]) if "lower" in expected else 1.0
    apart = {}
    with np.errstate(all="ignore"):  # NaN is no agreement.
        for name in (name for name, each in expected.items() if each.dtype.kind == "f"):
            gap = np.abs(answers[name].astype(float) - expected[name])
            apart[name] = float((gap / deviation if name in _NUMBERS else gap).max(initial=0.0))
    close = {name: limit * (_LOOSER if graph.name == ANY_SIZE else 1) for name, limit in CLOSE.items()}
    close["ood_p_value"] = max(close["ood_p_value"], 1.01 * float(vectors["step"]))
    differs = (answers["decision"] != expected["decision"]) | (answers["is_ood"] != expected["is_ood"])
    differs &= np.abs(expected["ood_p_value"] - vectors["alpha"]) > close["ood_p_value"]
    if "prediction_set" in expected:
        probabilities, within = expected["probabilities"], close["probabilities"]
        differs &= np.abs(expected["predictive_entropy"] - vectors["ambiguity_threshold"]) > within
        is_clear = np.abs(probabilities - vectors["quantile"]) > within
        differs |= ((answers["prediction_set"] != expected["prediction_set"]) & is_clear).any(axis=1)
        best = np.sort(probabilities, axis=1)[:, -2:]
        differs |= (answers["class_index"] != expected["class_index"]) & (best[:, -1] - best[:, 0] > 2 * within)
    else:
        width = expected["upper"] - expected["lower"]
        differs &= np.abs(width - vectors["max_width"]) > 2 * close["lower"] * deviation
    agrees = not differs.any() and all(each <= close.get(name, np.finfo(float).max) for name, each in apart.items())
    return Compared(runtime, graph.name, int(differs.sum()), apart, len(differs), agrees)


def table(compared: Sequence[Compared]) -> str:
    """Return one line for each runtime."""
    head = ["runtime", "graph", "other answers", *(f"{name} apart" for name in compared[0].columns), ""]
    return "\n".join(align([head, *(each.row() for each in compared)]))
