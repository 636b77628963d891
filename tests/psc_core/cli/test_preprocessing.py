"""Flags of the preprocessing."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from psc_core.cli.preprocessing import add_flags, preprocess_from
from psc_core.errors import UsageError
from psc_core.images.preprocess import PRESETS, Preprocess


def parsed(*words: str) -> Preprocess:
    cli = argparse.ArgumentParser()
    add_flags(cli)
    return preprocess_from(cli.parse_args(words))


IMAGENET = PRESETS["imagenet"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", IMAGENET),
        ("--preset mnist", PRESETS["mnist"]),
        ("--size 64", replace(IMAGENET, height=64, width=64, resize=None)),
        ("--resize 232 --crop 200", replace(IMAGENET, height=200, width=200, resize=232)),
        ("--interpolation bicubic", replace(IMAGENET, interpolation="bicubic")),
        ("--preset mnist --mean 0.5 --std 0.25", replace(PRESETS["mnist"], mean=(0.5,), std=(0.25,))),
        ("--preprocess torchvision:ResNet50_Weights.IMAGENET1K_V2", replace(IMAGENET, resize=232)),
        (
            "--preprocess timm:resnet50.a1_in1k --crop 224 --resize 256",
            replace(IMAGENET, interpolation="bicubic"),
        ),
        ("--preprocess timm:resnet50.a1_in1k", replace(IMAGENET, interpolation="bicubic", resize=235)),
    ],
)
def test_flags(words: str, expected: Preprocess) -> None:
    if "timm" in words:
        pytest.importorskip("timm")
    assert parsed(*words.split()) == expected


def test_json_file_as_in_a_manifest(tmp_path: Path) -> None:
    file = tmp_path / "preprocess.json"
    file.write_text(json.dumps(PRESETS["cifar10"].to_json()))
    assert parsed("--preprocess", str(file)) == PRESETS["cifar10"]
    bicubic = replace(PRESETS["cifar10"], interpolation="bicubic")
    file.write_text(json.dumps(bicubic.to_json()))
    assert parsed("--preprocess", str(file)) == bicubic
    file.write_text('{"mode": "RGB", "size": 3}')
    with pytest.raises(UsageError, match=r"preprocess.json: field height: Field required"):
        parsed("--preprocess", str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--size 64 --crop 32", "leave one out"),
        ("--crop 32", "for no crop use --size"),
        ("--preprocess nowhere.json", r"nowhere.json: No such file"),
        ("--preprocess torchvision:ResNet50", "torchvision has no weights 'ResNet50'"),
        ("--preprocess torchvision:Raft_Large_Weights.C_T_V1", "not those of a classifier"),
        ("--preprocess timm:resnet51", "timm has no model 'resnet51'"),
        ("--mean 0.5", "expected 3 means"),
        ("--resize 10 --crop 32", "expected resize from the crop"),
    ],
)
def test_says_what_is_wrong(words: str, message: str) -> None:
    if "timm" in words:
        pytest.importorskip("timm")
    with pytest.raises(UsageError, match=message):
        parsed(*words.split())
