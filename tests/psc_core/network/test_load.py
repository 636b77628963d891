from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network.backbone import truncate
from psc_core.network.load import Recipe, load_network, recipe_of

HERE = __name__


def tiny(num_classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))


def test_initialisation_follows_global_seed() -> None:
    def weight() -> torch.Tensor:
        torch.manual_seed(5)
        return load_network("torchvision:resnet18", num_classes=3).conv1.weight.detach()

    assert torch.equal(weight(), weight())


@pytest.mark.parametrize(
    ("spec", "model_args", "text"),
    [
        ("resnet18", {}, "torchvision:NAME"),
        ("torchvision:", {}, "torchvision:NAME"),
        (":net", {}, "torchvision:NAME"),
        ("torchvision:resnet19", {}, "did you mean resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "no classification network"),
        ("torchvision:resnet18", {"stem": "tiny"}, "stem=small"),
        ("torchvision:convnext_tiny", {"stem": "small"}, "ResNets and VGGs"),
        ("torchvision:resnet18", {"depth": 3}, "rejects the model arguments"),
        ("no.such.module:net", {}, "cannot import"),
    ],
)
def test_rejects_bad_specs(spec: str, model_args: dict[str, object], text: str) -> None:
    with pytest.raises(NetworkError, match=text):
        load_network(spec, num_classes=3, model_args=model_args)


def test_a_factory_that_the_caller_names_needs_no_permission() -> None:
    net = load_network(f"{HERE}:tiny", num_classes=3, model_args={"width": 5})
    assert net(torch.randn(2, 1, 4, 4)).shape == (2, 3)


def test_recipe_round_trip() -> None:
    net = load_network("torchvision:resnet18", num_classes=3, model_args={"stem": "small"})
    recipe = recipe_of(net)
    assert recipe is not None
    assert (
        recipe
        == Recipe(**json.loads(json.dumps(asdict(recipe))))
        == Recipe("torchvision:resnet18", 3, {"stem": "small"})
    )
    assert not recipe.is_factory
    assert Recipe("a.b:c", 3).is_factory
    assert truncate(net, ["layer3"], keep_output=False).recipe == recipe
    assert recipe_of(tiny(3)) is None
    with pytest.raises(NetworkError, match="no name builds"):
        _ = truncate(tiny(3), ["1"], keep_output=False).recipe


def normed(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))


SPEC = f"{HERE}:tiny"


def load(path: Path, num_classes: int = 3) -> nn.Module:
    return load_network(SPEC, weights=path, num_classes=num_classes)


def save(path: Path, state: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(state, path)
    return path


def test_weights_round_trip(tmp_path: Path) -> None:
    state = tiny(3).state_dict()
    net = load(save(tmp_path / "w.safetensors", state))
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_half_precision_weights_are_converted(tmp_path: Path) -> None:
    state = {key: value.half() for key, value in tiny(3).state_dict().items()}
    assert load(save(tmp_path / "w.safetensors", state)).get_parameter("1.weight").dtype == torch.float32


def test_network_with_versioned_weights(tmp_path: Path) -> None:
    trained = load_network("torchvision:mnasnet0_5", num_classes=3)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "net.safetensors")
    net = load_network("torchvision:mnasnet0_5", weights=tmp_path / "net.safetensors", num_classes=3)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in trained.state_dict().items())


def test_batch_counters_may_be_absent(tmp_path: Path) -> None:
    state = load_network("torchvision:resnet18", num_classes=3).state_dict()
    kept = {key: value for key, value in state.items() if "num_batches" not in key}
    path = save(tmp_path / "w.safetensors", kept)
    net = load_network("torchvision:resnet18", weights=path, num_classes=3)
    assert torch.equal(net.state_dict()["fc.weight"], state["fc.weight"])


def test_rejects_weights_that_do_not_fit(tmp_path: Path) -> None:
    state = tiny(3).state_dict()
    path = tmp_path / "w.safetensors"
    cases = {
        "1 missing": {key: value for key, value in state.items() if key != "1.bias"},
        "1 unexpected": {**state, "extra": torch.zeros(1)},
        "prefix 'module.'": {f"module.{key}": value for key, value in state.items()},
        r"1.bias of shape \(4,\), got \(2,\)": {**state, "1.bias": torch.zeros(2)},
        "NaN or infinity": {**state, "1.bias": torch.tensor([0.0, torch.nan, 0.0, 0.0])},
    }
    for text, bad in cases.items():
        with pytest.raises(NetworkError, match=text):
            load(save(path, bad))
    with pytest.raises(NetworkError, match=r"is for 3 classes .* the data has 10"):
        load(save(path, state), num_classes=10)


def test_suggests_prefix_despite_batch_counters(tmp_path: Path) -> None:
    """Safetensors puts integers, the counters, first."""
    path = save(tmp_path / "w.safetensors", {f"module.{key}": value for key, value in normed(3).state_dict().items()})
    spec = f"{HERE}:normed"
    with pytest.raises(NetworkError, match=r"prefix 'module\.': remove it"):
        load_network(spec, weights=path, num_classes=3)


def test_rejects_other_files(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="no file"):
        load(tmp_path / "absent.safetensors")
    junk = tmp_path / "junk.pt"
    junk.write_bytes(b"PK\x03\x04 not safetensors at all")
    with pytest.raises(NetworkError, match="save_file"):
        load(junk)
