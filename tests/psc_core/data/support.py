"""Folders of tiny images."""

from pathlib import Path

from PIL import Image

from psc_core.images.preprocess import Preprocess

TINY = Preprocess("L", 2, 2, None, (0.5,), (0.5,))


def write_folder(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (3, 3), i).save(root / name / f"{i}.png")
    return root
