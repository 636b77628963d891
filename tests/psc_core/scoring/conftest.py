"""Images, and their outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from tests.conftest import ROOT
from tests.psc_core.scoring.support import COUNT, run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in two folders, a damaged image, and a file that is no image."""
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    data = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    for index in range(COUNT):
        file = root / f"{index % 2}" / f"{index:03d}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(data.image(index)[0]).save(file)
    (root / "0" / "damaged.png").write_bytes((root / "0" / "000.png").read_bytes()[:80])
    (root / "0" / "notes.txt").write_text("no image")
    return root


@pytest.fixture(scope="session")
def scored(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its outputs as JSON lines, from one uninterrupted process."""
    out = tmp_path_factory.mktemp("out") / "scores"
    run(folder, out)
    return out
