"""What ``psc-fit`` refuses before it looks at an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.cli import fit as cli
from tests.psc_core.cli.support import run


@pytest.mark.parametrize("flags", [[], ["--max-images", "200"], ["--dry-run"]])
def test_rejects_training_images_as_validation(  # type: ignore[no-untyped-def]
    tiny_job, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    same = f"mnist:{data_root}#train"
    args = [*tiny_job.args, "--train", same, "--val", same, "--out", str(tmp_path / "b"), *flags]
    code, printed, err = run(capsys, cli.main, args)
    assert code == 2
    assert "training images too" in err and "hold some images out" in err
    assert "comparing " in err, "its progress"
    assert "layer" not in printed
