"""What psc-export writes around a graph, and how it is checked.

A folder has the graphs, images with their answers, and a README; :func:`check` compares the runtimes of a machine with
the answers that travel along.  Triton, and OpenVINO's model server, read a repository instead,

    NAME/config.pbtxt     of Triton alone
    NAME/1/model.onnx

whose inputs and outputs are named as by this project's own service in the v2 protocol, so that its clients need no
change.
"""

from __future__ import annotations

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
from torch import Tensor
from torch.nn import functional

from psc_core.bundle import homes_below, read_inside, tensors_of, write_files
from psc_core.errors import BundleError, NetworkError, UsageError, needs, shorten
from psc_core.export.graph import ANY_SIZE, GRAPH, METADATA, PIXELS, defaults, export_graphs
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below
from psc_core.images.preprocess import ImageLike, as_batch
from psc_core.model import MAX_BATCH, FittedModel
from psc_core.network.onnx_check import MAX_FILE_BYTES, check_model, parse_model, sizes_of
from psc_core.pipeline import smooth_noise
from psc_core.text import align

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

VECTORS: Final = "vectors.safetensors"
README: Final = "README.md"
VECTOR_IMAGES: Final = 64
LARGER_IMAGES: Final = 8  # images of another size than the network's, for the graph that resizes
LARGER: Final = "any-size/"  # before the names of what belongs to :data:`ANY_SIZE`


def images_below(folder: Path, *, must: bool = True, bundle: Path | None = None) -> list[str]:
    """Return the first image files below a folder, which may be missing unless it ``must`` have some.

    Links to files are followed, but in the folder of a ``bundle`` not to elsewhere: somebody else may have written it.
    """
    below = sorted(files_below(folder, linked=False)) if folder.is_dir() else []
    found = [file for file in below if file.lower().endswith(SUFFIXES)]
    if bundle is not None:
        homes = homes_below(bundle, folder)
        found = [file for file in found if any(map(Path(file).resolve().is_relative_to, homes))]
    if must and not found:
        raise UsageError(f"there are no images below {folder}; give a folder with some, or leave it out")
    return found[:VECTOR_IMAGES]


def export_model(model: FittedModel, folder: Path, images: Sequence[ImageLike] | Tensor = ()) -> dict[str, ModelProto]:
    """Write the graphs, images with their answers, and README to ``folder``; noise fills the images up.

    Returns the graphs by file.
    """
    written = (README, *(name for name in (GRAPH, ANY_SIZE) if not (folder / name).is_symlink()))  # Links are replaced.
    own = [name for name in written if (folder / name).exists()]
    if own and not (folder / VECTORS).exists():
        raise UsageError(f"{folder} has a {own[0]} that psc-export did not write; give a folder of its own")
    graphs = export_graphs(model)
    given = model.preprocess.to_pixels(as_batch(images[:VECTOR_IMAGES], model.preprocess))
    pixels = torch.cat([given, smooth_noise(model.preprocess, VECTOR_IMAGES)])[:VECTOR_IMAGES]
    larger = _enlarged(pixels[:LARGER_IMAGES])
    reduced = [model.preprocess.from_image(Image.fromarray(each.numpy())) for each in larger.squeeze(-1)]
    vectors = {PIXELS: pixels.permute(0, 2, 3, 1), **_answers_of(model, pixels)}
    quantile, step = model.calibration.quantile(model.policy.coverage), 1 / (len(model.calibration) + 1)
    limits = defaults(model) | {"quantile": quantile, "step": step}
    vectors |= {name: torch.tensor(limit) for name, limit in limits.items()}
    answers = {PIXELS: larger, **_answers_of(model, torch.from_numpy(np.stack(reduced)))}
    vectors |= {LARGER + name: each for name, each in answers.items()}
    proof = save({name: each.contiguous() for name, each in vectors.items()})
    files = {name: graph.SerializeToString() for name, graph in graphs.items()}
    write_files(folder, {VECTORS: proof, README: _readme(model).encode(), **files})
    return graphs


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
    decisions = ", ".join(f"{at} `{name}`" for at, name in enumerate(model.calibration.decision_names))
    title = "".join(each if each.isprintable() else " " for each in model.name)
    title = re.sub(r"[\\`*_\[\]<>&#~|]", r"\\\g<0>", title)  # what Markdown reads
    inputs = ", ".join(f"`{name}` ({value:.6g})" for name, value in defaults(model).items())
    return f"""# {title}

`{GRAPH}` answers as the bundle {model.version or "it is of"} does, without PSC.

* Input `{PIXELS}` of `{GRAPH}`: uint8 (n, {height}, {width}, {channels}), resized and cropped as `preprocess` in the
  metadata says. `{ANY_SIZE}` takes images of any size, those of a batch alike.
  Mean and standard deviation are applied inside. Before it, turn photographs upright (EXIF), blend an alpha channel
  onto the `background` of `preprocess`, and scale grey 16-bit samples to 8 as `load` does: Pillow alone makes them
  white. Tags of a TIFF may name another white than 65535.
* Thresholds, float32 inputs that may be left out: {inputs}.
* Output `decision`: {decisions}. The other outputs are named as in the service's answers.
* ONNX Runtime tells its makers how it is used unless `ORT_DISABLE_TELEMETRY=1` is set before it starts.
* `psc-export --check .` compares the runtimes of a machine on `{VECTORS}`.

```python
import json, numpy, onnxruntime
from PIL import Image, ImageOps

onnxruntime.set_default_logger_severity(3)  # It warns of every input with a default.
session = onnxruntime.InferenceSession("{ANY_SIZE}")
about = json.loads(session.get_modelmeta().custom_metadata_map["{METADATA}"])
names = [output.name for output in session.get_outputs()]

def load(file):
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode.startswith("I"):  # grey, 16 bits
        image = Image.fromarray((numpy.asarray(image) / 257).round().astype("uint8"))
    return image.convert("{mode}")

image = Image.new("{mode}", (640, 480))  # Of a file: load(FILE)
pixels = numpy.asarray(image).reshape(1, image.height, image.width, {channels})
answers = dict(zip(names, session.run(None, {{"{PIXELS}": pixels}})))
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

In C++, with ONNX Runtime's headers and library (`g++ -std=c++17 main.cpp -lonnxruntime`):

```cpp
#include <cstdint>
#include <iostream>
#include <vector>
#include <onnxruntime_cxx_api.h>

int main() {{
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  Ort::Session session(env, ORT_TSTR("{GRAPH}"), Ort::SessionOptions{{}});
  std::vector<uint8_t> pixels({height} * {width} * {channels});
  const int64_t shape[] = {{1, {height}, {width}, {channels}}};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  auto images = Ort::Value::CreateTensor<uint8_t>(memory, pixels.data(), pixels.size(), shape, 4);
  const char *inputs[] = {{"{PIXELS}"}}, *outputs[] = {{"decision", "ood_p_value"}};
  auto answers = session.Run(Ort::RunOptions{{}}, inputs, &images, 1, outputs, 2);
  std::cout << "decision " << *answers[0].GetTensorData<int64_t>();
  std::cout << ", p-value " << *answers[1].GetTensorData<float>() << std::endl;
}}
```

In C# (`dotnet add package Microsoft.ML.OnnxRuntime`):

```cs
using System;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

class Program
{{
    static void Main()
    {{
        using var session = new InferenceSession("{GRAPH}");
        var pixels = new byte[{height} * {width} * {channels}];
        var images = new DenseTensor<byte>(pixels, new[] {{ 1, {height}, {width}, {channels} }});
        var inputs = new[] {{ NamedOnnxValue.CreateFromTensor("{PIXELS}", images) }};
        using var answers = session.Run(inputs, new[] {{ "decision", "ood_p_value" }});
        Console.WriteLine($"decision {{answers[0].AsTensor<long>()[0]}}, p-value {{answers[1].AsTensor<float>()[0]}}");
    }}
}}
```
"""


_LOOSER: Final = 100  # times that, where levels of pixels may be rounded otherwise
_NUMBERS: Final = ("mean", "lower", "upper")
# What two runtimes may differ by; the numbers of a regression in standard deviations.
CLOSE: Final = {"probabilities": 1e-4, "ood_p_value": 1e-3, **dict.fromkeys(_NUMBERS, 1e-3)}
# The axes of what is compared.  A p-value may differ by a ``step``: rounding may move a score past another.
_COMMON: Final = {"alpha": "", "step": "", PIXELS: "nhwc", **dict.fromkeys(("decision", "is_ood", "ood_p_value"), "n")}
_OF_CLASSES: Final = {"quantile": "", "ambiguity_threshold": "", "predictive_entropy": "n", "class_index": "n",
                      "probabilities": "nk", "prediction_set": "nk"}  # fmt: skip
_OF_NUMBERS: Final = {"max_width": "", **dict.fromkeys((*_NUMBERS, "aleatoric", "epistemic"), "n")}
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
            for file in [ANY_SIZE if name.startswith(LARGER) else GRAPH] if each.ndim else given:
                values = each.float() if each.is_floating_point() else each
                given[file][name.removeprefix(LARGER)] = values.numpy()
        for file, vectors in given.items():
            _check_file(folder, file, vectors)
    except (BundleError, NetworkError) as error:
        reason = str(error).partition(";")[0]
        raise BundleError(f"{folder} is no exported folder: {reason}; export the bundle for onnx again") from error
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


def check_equal(compared: Sequence[Compared]) -> None:
    """Raise :class:`NetworkError` if a runtime answers otherwise than the bundle."""
    if others := [f"{each.runtime} with {each.graph}" for each in compared if not each.agrees]:
        raise NetworkError(
            f"a runtime answers differently, {', '.join(others)}; do not use it for this graph, and please report it"
        )


def table(compared: Sequence[Compared]) -> str:
    """Return one line for each runtime."""
    head = ["runtime", "graph", "other answers", *(f"{name} apart" for name in compared[0].columns), ""]
    return "\n".join(align([head, *(each.row() for each in compared)]))


CONFIG: Final = "config.pbtxt"
VERSION: Final = "1"
_QUEUE_MICROSECONDS: Final = 1000  # for which an image waits for others to share its batch


def write_repository(model: FittedModel, graph: ModelProto, folder: Path, *, triton: bool) -> None:
    """Write the folder of one model below ``folder``; ``triton`` adds to the graph the names of labels."""
    if "/" in model.name or model.name in (".", ".."):
        raise UsageError(f"{model.name!r} can be no folder's name; fit the model with another --name")
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
