"""What the tests of the command lines share."""

import pytest


def run(capsys: pytest.CaptureFixture[str], main, args: list[str]) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    try:
        code = main(args)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
