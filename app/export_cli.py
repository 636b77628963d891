"""``psc-export``: write a bundle's decision for other programs, and compare the runtimes that are installed.

What needs torch is imported when a bundle is read: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from psc_core.cli import flags
from psc_core.errors import UsageError

if TYPE_CHECKING:
    from onnx import ModelProto

    from psc_core.model import FittedModel

_EXAMPLE = """examples:
  psc-export --bundle bundle --out exported --images images/val
  psc-export --check exported          (on the machine that will run it)
  psc-export --bundle bundle --out site --for web
"""
# What each target is, and the files and folders that are written over in a folder that has them.
_TARGETS: Final = {
    "onnx": (
        "one ONNX file, with test images and README",
        ("README.md", "model.onnx", "model-any-size.onnx", "vectors.safetensors"),
    ),
    "web": (
        "a static web page with the model inside",
        ("index.html", "model.json", "examples.json", "model-any-size.onnx", "page", "onnxruntime", "examples"),
    ),
    "triton": ("a repository of Triton", ("{name}/config.pbtxt", "{name}/1/model.onnx")),
    "openvino": ("a repository of OpenVINO's model server", ("{name}/1/model.onnx",)),
    "mlflow": ("a model of MLflow", ("MLmodel",)),
}
_NEXT: Final = {
    "web": "python3 -m http.server --directory",
    "triton": "tritonserver --model-repository",
    "mlflow": "mlflow models serve --env-manager local --model-uri",
}
"""Commands that serve a folder, whose name follows."""


def parser() -> argparse.ArgumentParser:
    what = "Write a bundle's decision for other programs: pixels in, decision out."
    cli = flags.command("psc-export", what, _EXAMPLE)
    cli.add_argument("--bundle", type=Path, metavar="DIR", help="bundle to export")
    cli.add_argument("--out", type=Path, metavar="DIR", help="folder to write")
    text = "; ".join(f"{name}: {does}" for name, (does, _) in _TARGETS.items())
    text = f"what to write (default: onnx). {text}"
    cli.add_argument("--for", dest="target", choices=_TARGETS, default="onnx", help=text)
    text = "folder whose first images travel along, at most 64 with their answers, or 12 to try on the web page "
    cli.add_argument("--images", type=Path, metavar="DIR", help=text + "(default: the bundle's examples)")
    text = "the npm package onnxruntime-web, for the web page (default: node_modules/onnxruntime-web)"
    cli.add_argument("--runtime", type=Path, metavar="DIR", default=Path("node_modules/onnxruntime-web"), help=text)
    text = "compare the runtimes of this machine on a folder that was exported for onnx, instead of exporting"
    cli.add_argument("--check", type=Path, metavar="DIR", help=text)
    cli.add_argument("--overwrite", action="store_true", help="replace an exported folder at --out")
    flags.add_model_flags(cli)
    return cli


def export(args: argparse.Namespace) -> None:
    if (args.check is None) == (args.bundle is None) or (args.bundle is None) != (args.out is None):
        raise UsageError("give --bundle DIR and --out DIR to export, or --check DIR")
    if args.check is None:
        _write(args)
    if args.check is not None or args.target == "onnx":
        _check(args.check or args.out)


def _write(args: argparse.Namespace) -> None:
    from psc_core.bundle import TRY_FOLDER, read_bundle
    from psc_core.export.folder import export_model, images_below, write_repository
    from psc_core.export.graph import ANY_SIZE, GRAPH
    from psc_core.model import FittedModel

    if args.images is not None and args.target not in ("onnx", "web"):
        raise UsageError(f"no images travel along for {args.target}; leave out --images")
    if args.target == "web":
        find_runtime(args.runtime)
    bundle = read_bundle(args.bundle)
    if not args.overwrite:
        _, written = _TARGETS[args.target]
        flags.check_free(args.out, [name.format(name=bundle.manifest.name) for name in written])
    model = FittedModel.from_bundle(bundle, device="cpu", allow_factories=args.allow_factories).probed()
    examples = args.bundle / TRY_FOLDER if args.images is None else args.images
    own = args.bundle if args.images is None else None
    images = images_below(examples, must=args.images is not None, bundle=own)
    if args.target in ("web", "triton", "openvino"):  # Their folders hold no answers to compare with.
        with TemporaryDirectory(prefix="psc-") as compared:
            graphs = export_model(model, Path(compared), images)
            _check(Path(compared))
    match args.target:
        case "onnx":
            export_model(model, args.out, images)
        case "web":
            write_page(model, graphs[ANY_SIZE], args.out, runtime=args.runtime, examples=examples, bundle=own)
        case "mlflow":
            from psc_core.export.pyfunc import save_pyfunc

            save_pyfunc(model, args.out, overwrite=args.overwrite)
        case _:
            write_repository(model, graphs[GRAPH], args.out, triton=args.target == "triton")
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"wrote {args.out} ({size / 2**20:.1f} MiB) of {args.bundle} (version {model.version})")
    if (command := _NEXT.get(args.target)) is not None:
        print(f"next: {command} {args.out}")


def _check(folder: Path) -> None:
    from psc_core.export.folder import check, check_equal, table

    compared = check(folder)
    print(table(compared))
    check_equal(compared)


_RUNTIME_FILES: Final = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
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


def write_page(
    model: FittedModel, graph: ModelProto, folder: Path, *, runtime: Path, examples: Path, bundle: Path | None = None
) -> None:
    """Write the service's page as a folder that any file server serves; no image leaves the browser.

    ::

        index.html, page/       the page of the service; ``page/local.js`` answers in place of the service
        model.json              what ``/model`` would answer, and the names of the decisions
        model-any-size.onnx     the exported graph
        onnxruntime/            ONNX Runtime in WebAssembly, from the npm package onnxruntime-web
        examples.json, examples/    the first image files below ``examples``, which are offered to try

    If the examples are those of a ``bundle``, their folder itself may not lead out of it.
    """
    from app.http.model import MAX_FILE_BYTES, PAGE, describe_model, examples_in
    from psc_core.bundle import write_files
    from psc_core.export.folder import images_below
    from psc_core.export.graph import ANY_SIZE
    from psc_core.images import SUFFIXES

    found = find_runtime(runtime)
    shown = [suffix for suffix in SUFFIXES if not suffix.startswith(".tif")]  # by browsers
    offered = {name: file.read_bytes() for name, file in examples_in(examples, bundle or examples, shown).items()}
    if not offered and images_below(examples, must=False, bundle=bundle):
        raise UsageError(
            f"expected images to try of at most {MAX_FILE_BYTES >> 20} MiB below {examples}, and none of TIFF, "
            "which browsers do not read; shrink or convert them"
        )
    for part in ("page", "onnxruntime"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for file in PAGE.iterdir():
        if not file.name.startswith((_DOCS, "index.")):
            shutil.copyfile(file, folder / "page" / file.name)
    for name in _RUNTIME_FILES:
        # Some file servers do not know .mjs, and browsers refuse a module of another type.
        shutil.copyfile(found / name, folder / "onnxruntime" / name.replace(".mjs", ".js"))
    if (listed := folder / "examples.json").exists():  # What is offered no longer shall not stay there to be found.
        for name in json.loads(listed.read_text())["files"]:
            (folder / "examples" / Path(name).name).unlink(missing_ok=True)
    write_files(folder / "examples", offered)
    write_files(folder, {ANY_SIZE: graph.SerializeToString()})
    listed.write_text(json.dumps({"files": list(offered)}))
    described = describe_model(model, model.policy, name=model.name, backend="onnxruntime-web", models=[model.name])
    about = described.model_dump(mode="json") | {"decisions": model.calibration.decision_names, "report": {}}
    (folder / "model.json").write_text(json.dumps(about))
    page = _OF_SERVICE.sub("", (PAGE / "index.html").read_text(encoding="utf-8"))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n  '
    start = '<script type="module" src="page/page.js">'
    page = page.replace(start, policy + start.replace("page.js", "local.js"))
    (folder / "index.html").write_text(page.replace("  <main>", f"  {_NOTE}\n\n  <main>", 1), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(export, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
