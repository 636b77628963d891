"""The command that a refused bundle names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from psc_core import FitSettings
from psc_core.bundle import fit_command
from psc_core.cli.fit import parser
from psc_core.settings import DEFAULTS, FACTS, Facts


def test_an_older_bundle_names_the_command_that_fits_it_again(shipped_bundle: Path) -> None:
    """With every setting that decides about it, as psc-fit itself reads them."""
    body = json.loads((shipped_bundle / "manifest.json").read_text())
    changed = {"task": "regression", "layer": "layer4.0.downsample.0", "layers": "layer4", "granularity": "blocks",
               "epsilon": 1e-05, "c_proj": 2, "d_proj": 3, "minimum_dim": 4, "no_second_scaling": True,
               "density": "mahalanobis++", "pca": 5, "head": "dve", "head_input": "z", "predictions": "original",
               "alpha": 0.1, "coverage": 0.9, "risk": 0.2, "max_width": 1.5, "ood_score": "density",
               "precision": "bf16", "max_images": 6, "stored_images": 12, "seed": 7}  # fmt: skip
    assert {*FitSettings().recorded()} - {*changed} == {"batch_images", "max_memory"}
    body["provenance"]["settings"] = {**changed, "batch_images": 8, "flag_of_before": 9, "out": "mine"}
    program, *words = shlex.split(fit_command(body))
    args = vars(parser().parse_args(words))
    assert program == "psc-fit"
    assert {name: args[name] for name in changed} == changed
    assert args["batch_images"] == DEFAULTS.batch_images
    assert (args["model"], args["model_arg"]) == ("torchvision:resnet18", ["stem=small", "in_channels=1"])
    assert {str(args[name]) for name in ("weights", "preprocess", "train", "val", "out")} == {"FILE", "DIR"}


def test_a_setting_that_is_added_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "passes", Facts())
    recorded = {"model": "SPEC", "model_args": {}, "settings": {"passes": 3, "max_memory": 5, "device": "cuda:1"}}
    command = fit_command({"provenance": recorded})
    assert "--passes 3" in command and "--max-memory" not in command and "--device" not in command


GENERAL = "psc-fit --model SPEC --weights FILE --preprocess FILE --train DIR --val DIR --out DIR"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("layers", "layer[34]"),
        ("head", "$(reboot)"),
        ("head", "a b"),
        ("head", "\x1b[2J"),
        ("head", "laplace\n"),
        ("head", "--fresh"),
        ("head", ""),
        ("head", ["laplace"]),
        ("head", "x" * 2000),
    ],
)
def test_a_recorded_flag_that_is_no_plain_word_is_not_repeated(where: str, value: Any) -> None:
    recorded = {"model": "timm:resnet50.a1_in1k", "model_args": {}, "settings": {"alpha": 0.1}}
    assert fit_command({"provenance": recorded}).startswith("psc-fit --model timm:resnet50.a1_in1k --alpha 0.1 ")
    recorded["settings"][where] = value  # type: ignore[index]
    assert fit_command({"provenance": recorded}) == GENERAL


@pytest.mark.parametrize("provenance", [None, [], {}, {"settings": 1}, {"settings": {}, "model": 1, "model_args": {}}])
def test_a_manifest_without_provenance_names_a_general_command(provenance: Any) -> None:
    assert fit_command({"provenance": provenance}) == fit_command({}) == GENERAL


@pytest.mark.parametrize("model", ["os:system", "torchvision:resnet18;reboot", "timm:../x", "torchvision:"])
def test_only_networks_of_a_library_are_named(model: str) -> None:
    assert fit_command({"provenance": {"settings": {}, "model": model, "model_args": {}}}) == GENERAL


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("hf:my-vit", "psc-fit --model hf:DIR --alpha 0.1 --train DIR --val DIR --out DIR"),
        ("hf:$(reboot)", "psc-fit --model hf:DIR --alpha 0.1 --train DIR --val DIR --out DIR"),
        ("onnx:net.onnx", "psc-fit --model onnx:FILE --alpha 0.1 --preprocess FILE --train DIR --val DIR --out DIR"),
    ],
)
def test_a_network_that_has_its_weights_needs_none(model: str, expected: str) -> None:
    provenance = {"model": model, "model_args": {}, "settings": {"alpha": 0.1}}
    assert fit_command({"provenance": provenance}) == expected
    assert vars(parser().parse_args(shlex.split(expected)[1:]))["weights"] is None
