"""What the command lines share: complete help, which is there at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from psc_core.cli import evaluate as cli_eval
from psc_core.cli import fit as cli
from tests.psc_core.cli.support import run


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (
            cli.main,
            ["--model", "--weights", "--layer", "--epsilon", "--head", "--density", "--alpha", "--seed", "--out"],
        ),
        (cli_eval.main, ["--bundle", "--id", "--ood", "--out", "--weights"]),
    ],
)
def test_help_is_complete(capsys: pytest.CaptureFixture[str], main, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, main, ["--help"])
    assert code == 0
    for word in (*words, "130 interrupted"):
        assert word in out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["--unknown"]])
@pytest.mark.parametrize("command", ["evaluate", "fit", "log", "recalibrate", "replay", "report", "score"])
def test_help_the_version_and_usage_errors_import_no_torch(command: str, arguments: list[str]) -> None:
    program = f"""
import sys
from psc_core.cli.{command} import main
try:
    main({arguments!r})
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == (0 if arguments in (["--help"], ["--version"]) else 2)
    assert done.stderr.splitlines()[-1] == "False"
