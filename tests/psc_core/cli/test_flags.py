from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["--unknown"]])
@pytest.mark.parametrize(
    "command",
    [
        "evaluate.main",
        "evaluate.report_main",
        "fit.main",
        "log.main",
        "log.recalibrate_main",
        "log.replay_main",
        "score.main",
    ],
)
def test_help_the_version_and_usage_errors_import_no_torch(command: str, arguments: list[str]) -> None:
    module, function = command.split(".")
    program = f"""
import sys
from psc_core.cli.{module} import {function} as main
try:
    main({arguments!r})
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == (0 if arguments in (["--help"], ["--version"]) else 2)
    assert done.stderr.splitlines()[-1] == "False"
