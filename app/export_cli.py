"""``psc-export``: write a bundle's decision for other programs, and compare the runtimes that are installed.

What needs torch is imported when a bundle is read: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psc_core.cli import flags
from psc_core.errors import UsageError

_EXAMPLE = """examples:
  psc-export --bundle bundle --out exported --images images/val
  psc-export --check exported          (on the machine that will run it)
  psc-export --bundle bundle --out site --for web
"""
# What each target is, and the files that are written over in a folder that has them.
_TARGETS: Final = {
    "onnx": (
        "one ONNX file, with test images and README",
        ("README.md", "model.onnx", "model-any-size.onnx", "vectors.safetensors"),
    ),
    "web": (
        "a static web page with the model inside",
        ("index.html", "model.json", "examples.json", "model-any-size.onnx"),
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
    from psc_core.export.folder import export_model, images_below
    from psc_core.export.repository import write_repository
    from psc_core.model import FittedModel

    if args.images is not None and args.target not in ("onnx", "web"):
        raise UsageError(f"no images travel along for {args.target}; leave out --images")
    if args.target == "web":
        from app.static_page import find_runtime, write_page

        find_runtime(args.runtime)
    bundle = read_bundle(args.bundle)
    if not args.overwrite:
        _, written = _TARGETS[args.target]
        flags.check_free(args.out, [name.format(name=bundle.manifest.name) for name in written])
    model = FittedModel.from_bundle(bundle, device="cpu", allow_factories=args.allow_factories).probed()
    examples = args.bundle / TRY_FOLDER if args.images is None else args.images
    images = images_below(examples, must=args.images is not None)
    match args.target:
        case "onnx":
            export_model(model, args.out, images)
        case "web":
            write_page(model, args.out, runtime=args.runtime, examples=examples)
        case "mlflow":
            from psc_core.export.pyfunc import save_pyfunc

            save_pyfunc(model, args.out, overwrite=args.overwrite)
        case _:
            write_repository(model, args.out, triton=args.target == "triton")
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"wrote {args.out} ({size / 2**20:.1f} MiB) of {args.bundle} (version {model.version})")
    if (command := _NEXT.get(args.target)) is not None:
        print(f"next: {command} {args.out}")


def _check(folder: Path) -> None:
    from psc_core.export.check import check, check_equal, table

    compared = check(folder)
    print(table(compared))
    check_equal(compared)


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(export, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
