"""``docs/method.md``: the names in it can be imported and its pseudo-code runs."""

import doctest
import re
import tarfile
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from psc_core.data.open import read_idx
from psc_core.network.load import load_network
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "method.md"
NAMES = sorted(set(re.findall(r"`(psc_core(?:\.\w+)+)`", PAGE.read_text())))
PER_CLASS = {"train": 12, "val": 6}


def test_names_can_be_imported() -> None:
    assert len(NAMES) > 30
    for name in NAMES:
        resolve_name(name)


def test_flags_exist() -> None:
    from psc_core.cli.fit import parser

    known = set(re.findall(r"--[a-z][a-z-]+", parser().format_help()))
    named = set(re.findall(r"`(--[a-z][a-z-]+)", PAGE.read_text()))
    assert len(named) > 5
    assert named <= known


@pytest.fixture
def workplace(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights and images, as the page says."""
    with tarfile.open(data_root / "cifar10-jpeg.tar.gz") as tar:
        for split, count in PER_CLASS.items():
            for member in (m for m in tar.getmembers() if m.isfile() and "/train/" in m.name):
                name = member.name.split("/")[-2]
                folder = tmp_path / "images" / split / name
                folder.mkdir(parents=True, exist_ok=True)
                taken = tmp_path / "images" / "train" / name / Path(member.name).name
                handle = tar.extractfile(member)
                if len(list(folder.iterdir())) < count and not taken.exists() and handle is not None:
                    (folder / taken.name).write_bytes(handle.read())
    shirts = read_idx(data_root / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte", ndim=3)
    (tmp_path / "images" / "new").mkdir()
    for number in range(12):
        Image.fromarray(shirts[number]).save(tmp_path / "images" / "new" / f"{number:02}.png")
    torch.manual_seed(0)
    save_file(load_network("torchvision:resnet18", num_classes=10).state_dict(), tmp_path / "net.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_pseudo_code_runs(workplace: Path) -> None:
    result = doctest.testfile(
        str(PAGE), module_relative=False, encoding="utf-8", optionflags=doctest.REPORT_ONLY_FIRST_FAILURE
    )
    assert result.attempted >= 14
    assert result.failed == 0
    assert (workplace / "bundle" / "manifest.json").exists()
