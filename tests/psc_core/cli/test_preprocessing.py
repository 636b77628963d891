import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from psc_core.cli.flags import add_flags, preprocess_from
from psc_core.errors import UsageError
from psc_core.images.described import Aspect
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.described import NetworkSpec


def parsed(*words: str, described: NetworkSpec | None = None) -> Preprocess:
    cli = argparse.ArgumentParser()
    add_flags(cli)
    return preprocess_from(cli.parse_args(words), described)


IMAGENET = PRESETS["imagenet"]
DROPPED = replace(IMAGENET, background="none")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", IMAGENET),
        ("--preset mnist", PRESETS["mnist"]),
        ("--size 64", replace(IMAGENET, height=64, width=64, resize=None)),
        ("--resize 232 --crop 200", replace(IMAGENET, height=200, width=200, resize=232)),
        ("--preset cifar10 --resize 40 --crop 32", replace(PRESETS["cifar10"], resize=40, crop_rounding="even")),
        ("--interpolation bicubic", replace(IMAGENET, interpolation="bicubic")),
        ("--background none", replace(IMAGENET, background="none")),
        ("--preset mnist --background white", replace(PRESETS["mnist"], background="white")),
        ("--preset mnist --mean 0.5 --std 0.25", replace(PRESETS["mnist"], mean=(0.5,), std=(0.25,))),
        ("--preprocess torchvision:ResNet50_Weights.IMAGENET1K_V2", replace(DROPPED, resize=232)),
        ("--preprocess timm:resnet50.a1_in1k", replace(DROPPED, interpolation="bicubic", resize=235)),
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
    on_white = replace(PRESETS["cifar10"], interpolation="bicubic", background="white")
    file.write_text(json.dumps(on_white.to_json()))
    assert parsed("--preprocess", str(file)) == on_white
    file.write_text('{"mode": "RGB", "size": 3}')
    with pytest.raises(UsageError, match=r"preprocess.json: field height: expected a value, got none"):
        parsed("--preprocess", str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--size 64 --crop 32", "leave one out"),
        ("--crop 32", "for no crop use --size"),
        ("--preset mnist --preprocess nowhere.json", "expected --preset or --preprocess, got both"),
        ("--preprocess nowhere.json", r"nowhere.json: No such file"),
        ("--preprocess torchvision:ResNet50", "torchvision has no weights 'ResNet50'"),
        ("--preprocess torchvision:Raft_Large_Weights.C_T_V1", "not those of a classifier"),
        ("--preprocess timm:resnet51", "timm has no model 'resnet51'"),
        ("--preprocess timm:resnet50.a9", "timm has no model 'resnet50.a9'"),
        ("--preprocess torchvision:ResNet50_Weights.V9", "torchvision has no weights"),
        ("--mean 0.5", "expected 3 means"),
        ("--resize 10 --crop 32", "expected resize from the crop"),
    ],
)
def test_says_what_is_wrong(words: str, message: str) -> None:
    if "timm" in words:
        pytest.importorskip("timm")
    with pytest.raises(UsageError, match=message):
        parsed(*words.split())


OWN = Preprocess("RGB", 96, 96, 100, (0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", OWN),
        ("--preset mnist", PRESETS["mnist"]),
        ("--preprocess torchvision:ResNet50_Weights.IMAGENET1K_V2", replace(DROPPED, resize=232)),
        ("--size 64", replace(OWN, height=64, width=64, resize=None)),
        ("--mean 0.1 0.2 0.3", replace(OWN, mean=(0.1, 0.2, 0.3))),
        ("--preset cifar10 --resize 40 --crop 32", replace(PRESETS["cifar10"], resize=40, crop_rounding="even")),
        ("--interpolation bicubic", replace(OWN, interpolation="bicubic")),
    ],
)
def test_flags_replace_what_the_network_says(words: str, expected: Preprocess) -> None:
    assert parsed(*words.split(), described=NetworkSpec("a:b", preprocess=OWN)) == expected


@pytest.mark.parametrize(("spec", "rounding"), [("timm:resnet18", "even"), ("hf:folder", "down")])
def test_a_crop_is_rounded_as_the_library_of_the_network_does(spec: str, rounding: str) -> None:
    described = NetworkSpec(spec, preprocess=replace(OWN, resize=None))
    assert parsed("--resize", "100", "--crop", "96", described=described).crop_rounding == rounding


@pytest.mark.parametrize(
    ("part", "remedy", "enough", "not_enough"),
    [
        ("whole", "--preset or --preprocess", "--preset imagenet", "--size 64 --interpolation bicubic"),
        ("size", "--resize 100 --crop 96, which is near", "--resize 100 --crop 96", "--interpolation bicubic"),
        ("interpolation", "--interpolation bilinear or bicubic", "--interpolation bicubic", "--size 64"),
        ("statistics", "--mean and --std", "--mean 0 0 0 --std 1 1 1", "--mean 0 0 0"),
    ],
)
def test_what_cannot_be_done_needs_a_flag(part: Aspect, remedy: str, enough: str, not_enough: str) -> None:
    described = NetworkSpec("a:b", preprocess=OWN, unlike={part: "net/config.json says something else"})
    for words in ("", not_enough):
        with pytest.raises(UsageError, match=f"^net/config.json says something else; say .* by {remedy}"):
            parsed(*words.split(), described=described)
    for words in (enough, "--preset mnist"):
        assert isinstance(parsed(*words.split(), described=described), Preprocess)


def test_a_timm_model_that_psc_cannot_prepare_images_for() -> None:
    pytest.importorskip("timm")
    with pytest.raises(UsageError, match="crops by 'border'; give a JSON file"):
        parsed("--preprocess", "timm:deepseek_vit_412m")
