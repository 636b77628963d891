"""What the command lines share: complete help."""

from __future__ import annotations

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
