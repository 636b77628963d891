"""Provenance: data sets as a bundle names them, and what makes two fits the same job."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from psc_core import FitSettings
from psc_core.cli.job import digest_of, job_of, provenance_of, without_path
from psc_core.data.cache import Scratch
from psc_core.data.open import image_folder
from psc_core.fit_data import FitData
from psc_core.images.preprocess import PRESETS
from psc_core.network.described import NetworkSpec


def write_bitmaps(root: Path, shade: int) -> Path:
    """Files of one size, whatever they show."""
    for name in "ab":
        (root / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(np.full((28, 28), shade + i, np.uint8)).save(root / name / f"{i}.bmp")
    return root


def provenance(data: FitData, folder: Path) -> dict[str, Any]:
    weights = folder / "weights"
    weights.write_bytes(b"")
    return provenance_of(NetworkSpec("torchvision:resnet18", 2, weights=(weights,)), FitSettings(), data)


def test_undecodable_folder_name(tmp_path: Path) -> None:
    data = image_folder(write_bitmaps(tmp_path / os.fsdecode(b"caf\xe9"), 0), PRESETS["mnist"])
    assert provenance(FitData.of(data, data), tmp_path)["train"]["name"] == "caf\N{REPLACEMENT CHARACTER}"


def test_no_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "my-vit").mkdir()
    assert without_path(f"hf:{tmp_path}/my-vit/") == without_path(f"hf:{tmp_path}/my-vit/../my-vit") == "hf:my-vit"
    for spec in ("hf:acme/net", "timm:resnet18", "torchvision:resnet18", "package.module:factory"):
        assert without_path(spec) == spec


def test_digest_of_weights_in_parts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("1", "2", "whole")]
    for file, content in zip(files, (b"ab", b"c", b"abc"), strict=True):
        file.write_bytes(content)
    assert digest_of(files[:2]) == digest_of(files[2:]) == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize("cache", [None, Scratch()])
def test_edited_images_of_the_same_size_are_another_job(tmp_path: Path, cache: Scratch | None) -> None:
    roots = [write_bitmaps(tmp_path / str(n), n) for n in (10, 20)]
    settings = FitSettings(device="cpu")

    def job() -> dict[str, Any]:
        data, _ = FitData.of(*(image_folder(root, PRESETS["mnist"]) for root in roots)).cached(cache)
        return job_of(provenance(data, tmp_path), settings, data, settings.compute())

    before, edited = job(), roots[0] / "b" / "1.bmp"
    Image.fromarray(np.full((28, 28), 99, np.uint8)).save(edited)
    os.utime(edited, ns=(0, 1))  # Two writes may fall into one tick of the file system's clock.
    after = job()
    assert after["train"] == before["train"] and after != before
    assert job() == after


def test_another_configuration_is_another_job(tmp_path: Path) -> None:
    data = FitData.of(*(image_folder(write_bitmaps(tmp_path / str(n), n), PRESETS["mnist"]) for n in (10, 20)))
    file, settings = tmp_path / "config.json", FitSettings(device="cpu")
    jobs = []
    for config in ({"layer_norm_eps": 1e-6}, {"layer_norm_eps": 1e-12}, {"layer_norm_eps": 1e-6}):
        file.write_text(json.dumps(config))
        jobs.append(job_of(provenance(data, tmp_path), settings, data, settings.compute(), file))
    assert jobs[0] == jobs[2] != jobs[1]
    assert str(tmp_path) not in json.dumps(jobs)
