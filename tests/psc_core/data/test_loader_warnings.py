import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from psc_core import PRESETS, open_dataset, open_loader
from psc_core.data.cache import check_disjoint, warn_of_repeated
from psc_core.data.loaders import check_apart, warn_of_random, warn_of_uncompared
from psc_core.errors import LoaderWarning, UsageError
from psc_core.images.preprocess import Preprocess, as_batch

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


def save_noise(folder: Path, count: int, odd: Callable[[int, Image.Image], Image.Image | None]) -> None:
    """Save images of two classes; ``odd`` returns another one in place of some."""
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            image = Image.effect_noise((16, 16), 60 + index).convert("RGB")
            (odd(index, image) or image).save(folder / label / f"{index:03}.png", exif=image.getexif())


def cut_out(index: int, image: Image.Image) -> Image.Image | None:
    """Every eighth image has a transparent frame, of white pixels that show through a semi-transparent one."""
    if index % 8 != 1:
        return None
    image.paste((255, 255, 255), (0, 0, 16, 8))
    alpha = Image.new("L", image.size, 255)
    alpha.paste(0, (0, 0, 16, 6))
    alpha.paste(128, (0, 8, 16, 10))
    image.putalpha(alpha)
    return image


def wide(index: int, image: Image.Image) -> Image.Image | None:
    """Every eighth image has 16 bits; Pillow's ``convert("RGB")`` clips them to white."""
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257) if index % 8 == 1 else None


def turned(index: int, image: Image.Image) -> Image.Image | None:
    """Every eighth image lies on its side."""
    image.getexif()[ExifTags.Base.Orientation] = 6 if index % 8 == 1 else 1
    return None


TRANSFORM = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


@pytest.mark.parametrize(("odd", "named"), [(cut_out, 'background="none"'), (wide, "I;16"), (turned, "EXIF")])
@pytest.mark.parametrize(
    "loader_of",
    [
        lambda images: DataLoader(images, 8),
        lambda images: Subset(images, range(48)[::-1]),
        lambda images: ConcatDataset([images, images]),
    ],
)
def test_a_minority_of_files_that_is_read_in_another_way_is_seen(
    tmp_path: Path,
    odd: Callable[[int, Image.Image], Image.Image | None],
    named: str,
    loader_of: Callable[[ImageFolder], Any],
) -> None:
    save_noise(tmp_path, 24, odd)
    with pytest.warns(LoaderWarning) as caught:
        open_loader(loader_of(ImageFolder(tmp_path, TRANSFORM)), mean=0.0, std=1.0)
    (told,) = map(str, (each.message for each in caught))
    assert named in told and "12.5%" in told


@pytest.mark.parametrize("background", ["white", "none"])
def test_the_background_of_the_loader_is_found(tmp_path: Path, background: str) -> None:
    """The preprocess that the warning names gives the loader's inputs, and no warning."""

    def load(path: str) -> Image.Image:
        image = Image.open(path)
        if background == "none" or image.mode != "RGBA":
            return image.convert("RGB")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")

    def framed(index: int, image: Image.Image) -> Image.Image | None:
        cut = cut_out(index, image)
        if cut is not None:
            cut.paste((0, 90, 200, 0), (0, 0, 16, 6))
        return cut

    save_noise(tmp_path, 24, framed)
    loader = DataLoader(ImageFolder(tmp_path, TRANSFORM, loader=load), 8)
    with pytest.warns(LoaderWarning, match=f'background="{background}"'):
        open_loader(loader, mean=0.0, std=1.0)
    preprocess = Preprocess("RGB", 16, 16, None, (0.0,) * 3, (1.0,) * 3, background=background)
    opened = open_loader(loader, preprocess=preprocess)
    paths = [path for path, _ in ImageFolder(tmp_path).samples]
    pixels = preprocess.standardise(as_batch(paths, preprocess))
    assert abs(torch.from_numpy(np.array(opened.source.images)) - pixels).max() <= 1.01 / 255  # type: ignore[attr-defined]


def test_files_that_are_read_alike_give_no_warning(tmp_path: Path) -> None:
    """Alpha that is opaque, and one odd file among many."""

    def opaque(index: int, image: Image.Image) -> Image.Image | None:
        if index % 3 == 1:
            image.putalpha(255)
        return image

    save_noise(tmp_path, 101, opaque)
    Image.fromarray(np.full((16, 16), 9999, np.uint16)).save(tmp_path / "a" / "000.png")
    open_loader(DataLoader(ImageFolder(tmp_path, TRANSFORM), 8), mean=0.0, std=1.0)


def test_dropped_images_are_counted() -> None:
    with pytest.warns(LoaderWarning, match="images drops 4 images of its last batch; give one with drop_last=False"):
        open_loader(DataLoader(PAIRS, batch_size=12, drop_last=True))
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


def test_repeated_images_are_counted() -> None:
    drawn = DataLoader(PAIRS, batch_size=8, sampler=RandomSampler(PAIRS, replacement=True, num_samples=200))
    with pytest.warns(LoaderWarning, match="1[6-9].* of 200 validation images are repeated"):
        warn_of_repeated(open_loader(drawn))
    warn_of_repeated(open_loader(PAIRS))


def test_copies_of_files_and_rows_that_repeat_are_counted(tmp_path: Path) -> None:
    names = [f"{index}.png" for index in range(6)]
    for index, name in enumerate(names):
        Image.fromarray(np.full((28, 28), 40 * index, np.uint8)).save(tmp_path / name)
    (tmp_path / "6.png").write_bytes((tmp_path / names[0]).read_bytes())
    for rows, count in ((names, 0), (names * 3, 12), ([*names, "6.png"], 1)):
        lines = [f"{name},{'ab'[int(name[0]) % 2]}" for name in rows]
        (tmp_path / "val.csv").write_text("\n".join(["file,label", *lines]))
        val = open_dataset(str(tmp_path / "val.csv"), split="val", preprocess=PRESETS["mnist"])
        text = f"^{count} of {len(rows)} validation images are repeated"
        with pytest.warns(LoaderWarning, match=text) if count else nullcontext():
            warn_of_repeated(val)


@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.35), (0.5, 0.5)])
def test_pixels_that_are_only_divided_are_told(mean: float, std: float) -> None:
    """Of those that are standardised, or by mean 0 and deviation 1 need not be, none."""
    pixels = torch.randint(160, 256, (20, 1, 4, 4), generator=torch.Generator().manual_seed(0)) / 255
    labels = torch.arange(20) % 2
    with pytest.warns(LoaderWarning, match=r"inputs of images from 0\.6.* to 1 are pixels divided by 255"):
        open_loader(TensorDataset(pixels, labels), mean=mean, std=std)
    open_loader(TensorDataset(pixels, labels), mean=0.0, std=1.0)
    open_loader(TensorDataset((pixels - mean) / std, labels), mean=mean, std=std)


class Own(Dataset):  # type: ignore[type-arg]
    """Inputs that may come from files."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], index % 2


def test_inputs_that_nobody_compared_with_files_are_told() -> None:
    for data in (Own(), DataLoader(Own(), batch_size=8), Subset(Own(), range(20)), iter(DataLoader(Own()))):
        images = open_loader(data, mean=0.0, std=1.0, name="the training data")
        with pytest.warns(
            LoaderWarning, match=r"of the training data were not compared .* psc.predict\(files\) answers"
        ):
            warn_of_uncompared(data, images)


def test_inputs_without_files_are_not_compared() -> None:
    held = Own()
    held.data = INPUTS  # type: ignore[attr-defined]
    parts = Subset(Subset(PAIRS, range(20)), range(9)), ConcatDataset([PAIRS, Subset(PAIRS, range(9))])
    for data in (PAIRS, *parts, [*DataLoader(PAIRS)], held):
        warn_of_uncompared(data, open_loader(data, mean=0.0, std=1.0))
    warn_of_uncompared(Own(), open_loader(Own()))
    pictures = [(Image.new("L", (4, 4), at), at % 2) for at in range(4)]
    preprocess = Preprocess("L", 4, 4, None, (0.0,), (1.0,))
    warn_of_uncompared(iter(pictures), open_loader(iter(pictures), preprocess=preprocess))
    images = open_loader(PAIRS, mean=0.0, std=1.0)
    warn_of_uncompared(images, images)
