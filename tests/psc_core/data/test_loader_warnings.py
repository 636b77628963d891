"""What a loader does that costs images or guarantees is warned about, and nothing else."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, SubsetRandomSampler, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from psc_core import PRESETS, open_dataset, open_loader
from psc_core.data.loader_warnings import check_apart, warn_of_random, warn_of_repeated
from psc_core.data.overlap import check_disjoint
from psc_core.errors import LoaderWarning, UsageError

INPUTS = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
PAIRS = TensorDataset(INPUTS, torch.arange(40) % 2)


class Flipped(Dataset):  # type: ignore[type-arg]
    """Images that are flipped now and then, in one of the forms that data sets give."""

    def __init__(self, form: Any) -> None:
        self.form = form

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        image = INPUTS[index].flip(2) if random.random() < 0.5 else INPUTS[index]
        return self.form(image, index % 2)


@pytest.mark.parametrize(
    "form",
    [
        lambda image, label: (image, label),
        lambda image, label: {"image": image.numpy(), "label": label},
        lambda image, label: [Image.fromarray((255 * image[0]).byte().numpy()), label],
    ],
)
def test_augmentation_is_seen(form: Any) -> None:
    random.seed(0)
    with pytest.warns(LoaderWarning, match="the training data changes its images at random, example .* without augm"):
        warn_of_random(DataLoader(Flipped(form), batch_size=4), "the training data")


@pytest.mark.parametrize(
    "data", [DataLoader(PAIRS, batch_size=4, shuffle=True), PAIRS, list(PAIRS), iter(PAIRS), TensorDataset(INPUTS[:0])]
)
def test_what_does_not_change_is_not_warned_about(data: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_random(data, "images")


@pytest.mark.parametrize("letterbox", [False, True])
def test_files_that_are_read_in_another_way_are_seen(tmp_path: Path, letterbox: bool) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for index in range(3):
            Image.effect_noise((40, 30), 60 + index).save(tmp_path / label / f"{index}.png")
    steps = [v2.Pad((0, 5)) if letterbox else v2.Identity(), v2.Resize((16, 16)), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.4,) * 3, (0.2,) * 3)]
    loader = DataLoader(ImageFolder(tmp_path, v2.Compose(steps)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_loader(loader, mean=0.4, std=0.2)
    expected = [r"files of images read as RGB, resized to 16 × 16 .* differ from the loader's inputs by \d\d%"]
    for warned, text in zip(caught, expected if letterbox else (), strict=True):
        assert warned.category is LoaderWarning and re.match(text, str(warned.message))


def test_dropped_images_are_counted() -> None:
    with pytest.warns(LoaderWarning, match="images drops 4 images of its last batch; give one with drop_last=False"):
        open_loader(DataLoader(PAIRS, batch_size=12, drop_last=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_loader(DataLoader(PAIRS, batch_size=10, drop_last=True))


@pytest.mark.parametrize(
    ("train", "val", "count"),
    [
        (PAIRS, PAIRS, 40),
        (DataLoader(PAIRS, 4, shuffle=True), DataLoader(PAIRS, 8), 40),
        (Subset(PAIRS, range(30)), Subset(PAIRS, range(20, 40)), 10),
        (DataLoader(PAIRS, sampler=SubsetRandomSampler(range(30))), DataLoader(PAIRS, sampler=range(20, 40)), 10),
        (DataLoader(PAIRS, sampler=SubsetRandomSampler(range(30))), DataLoader(PAIRS, sampler=range(30, 40)), 0),
    ],
)  # fmt: skip
def test_validation_images_that_were_trained_on(train: Any, val: Any, count: int) -> None:
    opened = open_loader(train), open_loader(val)
    with pytest.raises(UsageError, match=f" {count} of ") if count else nullcontext():
        check_disjoint(*opened)


@pytest.mark.parametrize("wrapped", [lambda data: data, lambda data: DataLoader(data, batch_size=8, shuffle=True)])
def test_one_augmented_data_set_for_both_is_seen(wrapped: Any) -> None:
    with pytest.raises(UsageError, match="hold some images out"):
        check_apart(PAIRS, wrapped(PAIRS))
    check_apart(PAIRS, Subset(PAIRS, range(20)))
    check_apart(DataLoader(PAIRS, sampler=range(10)), DataLoader(PAIRS, sampler=range(10, 20)))


def test_one_folder_opened_for_both_is_seen(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for shade in range(10):
            Image.new("L", (28, 28), 10 * shade).save(tmp_path / name / f"{shade}.png")
    train, val = (open_dataset(str(tmp_path), split=split, preprocess=PRESETS["mnist"]) for split in ("train", "val"))
    with pytest.raises(UsageError, match="20 of the 20"):
        check_disjoint(train, val)


def test_repeated_images_are_counted() -> None:
    drawn = DataLoader(PAIRS, batch_size=8, sampler=RandomSampler(PAIRS, replacement=True, num_samples=200))
    with pytest.warns(LoaderWarning, match="1[6-9].* of 200 validation images are repeated"):
        warn_of_repeated(open_loader(drawn))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_repeated(open_loader(PAIRS))


CALLER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from psc_core import PSC, open_loader
images = TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 2)
open_loader(DataLoader(images, batch_size=12, drop_last=True))
others = DataLoader(TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 2), batch_size=12, drop_last=True)
PSC.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), images, others, layer="there is none")
"""


def test_warnings_point_at_the_line_that_called_the_package(tmp_path: Path) -> None:
    """In a process without the checks of shapes, whose frames lie between the caller and the package."""
    program = tmp_path / "caller.py"
    program.write_text(CALLER)
    told = subprocess.run([sys.executable, program], capture_output=True, text=True).stderr
    lines = [int(number) for number in re.findall(rf"^{re.escape(str(program))}:(\d+): LoaderWarning", told, re.M)]
    assert lines == [7, 9], told
