"""The command lines that fit, measure and calibrate; ``psc COMMAND`` is ``psc-COMMAND``, those of the service too."""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from typing import Any, Final

from psc_core import __version__
from psc_core.errors import hint

_PREFIX: Final = "psc-"
_DOES: Final = {
    "fit": "fit uncertainty to a trained network, and write a bundle",
    "serve": "serve a bundle: a page, POST /predict, /metrics",
    "predict": "send images to a service",
    "eval": "measure a bundle on images of your own",
    "score": "write the answers to many images",
    "export": "write a bundle's decision as one ONNX file",
    "report": "write the report of a bundle again",
    "log": "list, label and export what a service has logged",
    "recalibrate": "compute new thresholds from labelled images",
    "replay": "show which logged answers other thresholds would change",
}


def main() -> Any:
    """Run ``psc-COMMAND`` for ``psc COMMAND``, or list the commands."""
    found = {point.name.removeprefix(_PREFIX): point for point in distribution("psc").entry_points}
    commands = {name: point for name, point in found.items() if name != "psc"}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in commands:
        sys.argv = [f"{_PREFIX}{name}", *sys.argv[2:]]
        return commands[name].load()()
    listed = "\n".join(f"  {each:<12} {does}" for each, does in _DOES.items())
    usage = f"usage: psc COMMAND [flag ...]\n\n{listed}\n\npsc COMMAND --help explains one"
    if name in ("-h", "--help", "--version"):
        print(f"psc {__version__}" if name == "--version" else usage)
        return 0
    print(f"psc: no command {name!r}; {hint(name, [*commands])}", file=sys.stderr)
    return 2
