"""What the tests of the command lines share."""

import re
from pathlib import Path

import pytest


def undated(report: Path) -> str:
    """Return a report without its first date, that of its writing, which changes at midnight."""
    return re.sub(r"\b20\d\d-\d\d-\d\d\b", "date", report.read_text(), count=1)


def run(capsys: pytest.CaptureFixture[str], main, args: list[str]) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    try:
        code = main(args)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
