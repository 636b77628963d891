"""The images that clients send: PNG digits, and JPEG photographs."""

from __future__ import annotations

import io

from PIL import Image

from benchmarks.serving.processes import ROOT
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS

DATA = ROOT / "tests" / "data"


def digits(count: int) -> list[bytes]:
    """Real digits of 28 × 28 as PNG files."""
    data = open_dataset(f"mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
    files = []
    for index in range(min(count, len(data))):
        buffer = io.BytesIO()
        Image.fromarray(data.image(index)[0]).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files
