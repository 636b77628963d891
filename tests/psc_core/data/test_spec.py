from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from psc_core.data.spec import open_dataset
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS, Preprocess

TINY = Preprocess("L", 2, 2, None, (0.5,), (0.5,))


def test_spec_can_name_split(data_root: Path) -> None:
    chosen = open_dataset(f"mnist:{data_root}#test", split="train", preprocess=PRESETS["mnist"])
    assert len(chosen) == 800
    with pytest.raises(DataError, match="expected a split"):
        open_dataset(f"mnist:{data_root}#exam", split="train", preprocess=PRESETS["mnist"])


def write_folder(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (3, 3), i).save(root / name / f"{i}.png")
    return root


def test_directory_name_may_contain_number_sign(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set#val", {"a": 1, "b": 1})
    assert len(open_dataset(str(root), split="train", preprocess=TINY)) == 2
    assert len(open_dataset(f"{root}#val", split="train", preprocess=TINY)) == 2


@pytest.mark.parametrize("spec", [".x:make", "..x.y:make", ":make"])
def test_rejects_paths_as_factories(spec: str) -> None:
    with pytest.raises(DataError, match=r"expected package\.module:factory, not a path"):
        open_dataset(spec, split="train", preprocess=TINY)


@pytest.mark.parametrize("spec", ["nowhere.module:make", "psc_core.data.spec:nothing"])
def test_rejects_unknown_factories(spec: str) -> None:
    with pytest.raises(DataError, match="cannot be imported"):
        open_dataset(spec, split="train", preprocess=TINY)
