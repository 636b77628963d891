"""A folder with the graphs, images with their answers, and a README."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from psc_core.bundle import write_files
from psc_core.errors import UsageError
from psc_core.export.graph import ANY_SIZE, GRAPH, METADATA, PIXELS, defaults, export_graphs
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below
from psc_core.images.preprocess import ImageLike, as_batch
from psc_core.model import FittedModel
from psc_core.pipeline import smooth_noise

VECTORS: Final = "vectors.safetensors"
README: Final = "README.md"
VECTOR_IMAGES: Final = 64
LARGER_IMAGES: Final = 8  # images of another size than the network's, for the graph that resizes
LARGER: Final = "any-size/"  # before the names of what belongs to :data:`ANY_SIZE`


def images_below(folder: Path, *, must: bool = True) -> list[str]:
    """Return the first image files below a folder, which may be missing unless it ``must`` have some."""
    found = [file for file in sorted(files_below(folder)) if file.lower().endswith(SUFFIXES)] if folder.is_dir() else []
    if must and not found:
        raise UsageError(f"there are no images below {folder}; give a folder with some, or leave it out")
    return found[:VECTOR_IMAGES]


def export_model(model: FittedModel, folder: Path, images: Sequence[ImageLike] | Tensor = ()) -> None:
    """Write the graphs, images with their answers, and README to ``folder``; noise fills the images up."""
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
  onto the `background` of `preprocess`, and scale 16-bit samples to 8, as the service does.
* Thresholds, float32 inputs that may be left out: {inputs}.
* Output `decision`: {decisions}. The other outputs are named as in the service's answers.
* `psc-export --check .` compares the runtimes of a machine on `{VECTORS}`.

```python
import json, numpy, onnxruntime
from PIL import Image, ImageOps

onnxruntime.set_default_logger_severity(3)  # It warns of every input with a default.
session = onnxruntime.InferenceSession("{ANY_SIZE}")
about = json.loads(session.get_modelmeta().custom_metadata_map["{METADATA}"])
names = [output.name for output in session.get_outputs()]
image = Image.new("{mode}", (640, 480))  # Of a file: ImageOps.exif_transpose(Image.open(FILE)).convert("{mode}")
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
