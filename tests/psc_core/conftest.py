"""A fitted model and images."""

from pathlib import Path

import pytest
import torch

from psc_core import PSC
from tests import folders
from tests.conftest import made_once
from tests.opened import opened

ALLOW = ("tests.tiny:network",)


@pytest.fixture(scope="session")
def psc(tiny_bundle: Path) -> PSC:
    return PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


@pytest.fixture(scope="session")
def digits() -> torch.Tensor:
    test = opened("mnist")
    return next(iter(test.batches(100))).images


@pytest.fixture(scope="session")
def digit_folders(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> tuple[Path, Path]:
    """Folders of training and validation images with the names of digits."""

    def write(root: Path) -> None:
        for split, images in (("train", 600), ("val", 150)):
            folders.write_digits(root / split, data_root, split, images)

    root = made_once(tmp_path_factory, "digits", write)
    return root / "train", root / "val"


@pytest.fixture(scope="session")
def hf_job(tmp_path_factory: pytest.TempPathFactory, digit_folders: tuple[Path, Path]) -> folders.Job:
    """A vision transformer of transformers, trained on digits."""
    pytest.importorskip("transformers", reason="folders of transformers need it: pip install 'psc[hf]'")

    def train(root: Path) -> None:
        net = folders.transformer("vit")
        folders.train(net, digit_folders[0], epochs=6)
        folders.save_transformer(root / "my-vit", net)

    return folders.Job(made_once(tmp_path_factory, "hf", train) / "my-vit", *digit_folders)


@pytest.fixture(scope="session")
def timm_job(tmp_path_factory: pytest.TempPathFactory, digit_folders: tuple[Path, Path]) -> folders.Job:
    """A residual network of timm, trained on digits."""
    pytest.importorskip("timm", reason="folders of timm need it: pip install 'psc[timm]'")

    def train(root: Path) -> None:
        net = folders.timm_network()
        folders.train(net, digit_folders[0], epochs=3)
        folders.save_timm(root / "my-net", net)

    return folders.Job(made_once(tmp_path_factory, "timm", train) / "my-net", *digit_folders)
