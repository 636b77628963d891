"""The command lines that fit, measure and calibrate; ``psc COMMAND`` is ``psc-COMMAND``, those of the service too."""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from typing import Any, Final

_PREFIX: Final = "psc-"


def main() -> Any:
    """Run ``psc-COMMAND`` for ``psc COMMAND``, or list the commands."""
    found = {point.name.removeprefix(_PREFIX): point for point in distribution("psc").entry_points}
    commands = {name: point for name, point in found.items() if name != "psc"}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in commands:
        sys.argv = [f"{_PREFIX}{name}", *sys.argv[2:]]
        return commands[name].load()()
    listed = (
        f"usage: psc COMMAND [flag ...]\n\ncommands: {', '.join(sorted(commands))}; psc COMMAND --help explains one"
    )
    if name in ("-h", "--help"):
        print(listed)
        return 0
    print(f"psc: no command {name!r}\n{listed}", file=sys.stderr)
    return 2
