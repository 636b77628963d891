"""Logged images."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from psc_core.errors import DataError
from psc_core.images.decode import DEFAULT_MAX_PIXELS
from psc_core.images.preprocess import PRESETS
from psc_core.log.store import INPUT, LoggedImages, file_of, image_path, is_stored, open_log, open_logged_image
from tests.logged import Logged, png, write_log


def test_reads_what_was_stored_and_nothing_else(tmp_path: Path) -> None:
    pixels = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)
    image = Logged(png(pixels))
    log = write_log(tmp_path, [image])
    path = image_path(image.sha256, "png")
    source = LoggedImages(log, [path])
    assert len(source) == 1 and source.fingerprint(0) == path.encode()
    assert np.array_equal(source.read(0, PRESETS["mnist"])[0], pixels)
    (tmp_path / path).write_bytes(png(pixels + 1))
    with pytest.raises(DataError, match="was changed since it was logged"):
        source.read(0, PRESETS["mnist"])
    (tmp_path / path).unlink()
    with pytest.raises(DataError, match=r"cannot read the image .*restore it or remove it"):
        source.read(0, PRESETS["mnist"])


def test_a_network_input_is_neither_resized_nor_cropped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224), dtype=np.uint8)
    file, log = file_of(pixels), open_log(tmp_path)
    paths = [image_path(hashlib.sha256(file).hexdigest(), extension) for extension in (INPUT, "bmp")]
    for path in paths:
        log.put(path, file)
    source = LoggedImages(log, paths)
    assert np.array_equal(source.read(0, PRESETS["imagenet"]), pixels)
    assert not np.array_equal(source.read(1, PRESETS["imagenet"]), pixels)
    with pytest.raises(
        DataError, match=r"\(3, 224, 224\), and the bundle's network reads \(1, 28, 28\); give a bundle"
    ):
        source.read(0, PRESETS["mnist"])


def test_an_image_that_only_the_service_was_told_to_allow_is_read(tmp_path: Path) -> None:
    pixels = np.zeros((5001, 5000), np.uint8)
    assert pixels.size > DEFAULT_MAX_PIXELS
    image = Logged(png(pixels))
    source = LoggedImages(write_log(tmp_path, [image]), [image_path(image.sha256, "png")])
    assert source.read(0, PRESETS["mnist"]).shape == (1, 28, 28)


def test_a_path_that_is_none_of_a_log_is_not_followed() -> None:
    digest = "ab" * 32
    assert is_stored(digest, f"images/ab/{digest}.png")
    for path in (None, "", "../secret", f"images/ab/../../{digest}.png", f"/images/ab/{digest}.png", "images/ab/x.png"):
        assert not is_stored(digest, path)
    assert not is_stored(None, "images/ab/x.png")


def test_opens_an_image_by_its_name_and_no_other_file(tmp_path: Path) -> None:
    content = png(np.zeros((4, 4), np.uint8))
    image = Logged(content)
    log = write_log(tmp_path, [image])
    name = f"{image.sha256}.png"
    file, size = open_logged_image(log, name)
    with file:
        assert (file.read(), size) == (content, len(content))
    folder = tmp_path / "images" / image.sha256[:2]
    other = f"{image.sha256[:2]}{'0' * 62}"
    (folder / f"{other}.png").symlink_to(tmp_path / "labels")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / f"{other}.gif").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / f"{other}.bmp")
    names = (
        f"{image.sha256}.gif",
        f"{other}.png",
        f"{other}.gif",
        f"{other}.bmp",
        "x.png",
        "",
        f"../../{name}",
        f"{name}\n",
    )
    for each in names:
        with pytest.raises(FileNotFoundError):
            open_logged_image(log, each)
    (folder / name).write_bytes(content + b"more")
    with pytest.raises(FileNotFoundError):
        open_logged_image(log, name)
