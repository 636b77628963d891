"""The page as a folder of files, with the model inside: any file server serves it, and images never leave the browser.

index.html, page/       the page of the service; ``page/local.js`` answers in place of the service
model.json              what ``/model`` would answer, and the names of the decisions
model-any-size.onnx     the exported graph
onnxruntime/            ONNX Runtime in WebAssembly, from the npm package onnxruntime-web
examples.json, examples/
"""

from __future__ import annotations

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Final

from app.http.model import MAX_FILE_BYTES, describe_model, examples_in
from psc_core.bundle import write_files
from psc_core.errors import UsageError
from psc_core.export.folder import images_below
from psc_core.export.graph import ANY_SIZE, export_graphs
from psc_core.model import FittedModel

_RUNTIME_FILES: Final = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
_PAGE: Final = Path(str(files("app.http") / "page"))
_DOCS: Final = "docs."  # what files of the service's own documentation begin with
# Nothing may be asked for or sent elsewhere.
_POLICY: Final = (
    "default-src 'self'; script-src 'self' 'wasm-unsafe-eval' blob:; worker-src 'self' blob:; "
    "img-src 'self' data: blob:; style-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'"
)

# Of a page that was opened as a file, no script runs.
_NOTE: Final = (
    '<p id="local" class="muted small" role="status">The model is being loaded into this browser, once. If this line '
    "stays long after that, JavaScript is off, or the page was opened as a file: it needs a web server.</p>"
)
_OF_SERVICE: Final = re.compile(r"  <noscript>.*?</noscript>\n|    <nav aria-label=\"More\">.*?</nav>\n")


def find_runtime(folder: Path) -> Path:
    """Return the folder of the runtime's files in an npm package."""
    found = next((each for each in (folder / "dist", folder) if (each / _RUNTIME_FILES[0]).is_file()), None)
    if found is None or not all((found / file).is_file() for file in _RUNTIME_FILES):
        raise UsageError(
            f"{folder} holds no onnxruntime-web; run npm install onnxruntime-web here, or give --runtime DIR"
        )
    return found


def write_page(model: FittedModel, folder: Path, *, runtime: Path, examples: Path) -> None:
    """Write the folder; the first image files below ``examples`` are offered to try."""
    found = find_runtime(runtime)
    offered = examples_in(examples, examples)
    if not offered and images_below(examples, must=False):
        raise UsageError(f"expected images to try of at most {MAX_FILE_BYTES >> 20} MiB below {examples}; shrink them")
    graph = export_graphs(model, [ANY_SIZE])[ANY_SIZE]
    for part in ("page", "onnxruntime", "examples"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for file in _PAGE.iterdir():
        if not file.name.startswith((_DOCS, "index.")):
            shutil.copyfile(file, folder / "page" / file.name)
    for name in _RUNTIME_FILES:
        # Some file servers do not know .mjs, and browsers refuse a module of another type.
        shutil.copyfile(found / name, folder / "onnxruntime" / name.replace(".mjs", ".js"))
    if (listed := folder / "examples.json").exists():  # What is offered no longer shall not stay there to be found.
        for name in json.loads(listed.read_text())["files"]:
            (folder / "examples" / Path(name).name).unlink(missing_ok=True)
    for name, file in offered.items():
        shutil.copyfile(file, folder / "examples" / name)
    write_files(folder, {ANY_SIZE: graph.SerializeToString()})
    listed.write_text(json.dumps({"files": list(offered)}))
    described = describe_model(model, model.policy, name=model.name, backend="onnxruntime-web", models=[model.name])
    about = described.model_dump(mode="json") | {"decisions": model.calibration.decision_names, "report": {}}
    (folder / "model.json").write_text(json.dumps(about))
    page = _OF_SERVICE.sub("", (_PAGE / "index.html").read_text(encoding="utf-8"))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n  '
    start = '<script type="module" src="page/page.js">'
    page = page.replace(start, policy + start.replace("page.js", "local.js"))
    (folder / "index.html").write_text(page.replace("  <main>", f"  {_NOTE}\n\n  <main>", 1), encoding="utf-8")
