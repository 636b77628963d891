from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network.cut import truncate
from psc_core.network.described import NetworkSpec
from psc_core.network.load import load_network, notes_of, spec_of

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


def test_spec_round_trip() -> None:
    net = load_network("torchvision:resnet18", num_classes=3, model_args={"stem": "small"})
    spec = spec_of(net)
    assert spec is not None
    assert (
        spec
        == NetworkSpec(**json.loads(json.dumps(spec.to_json())))
        == NetworkSpec("torchvision:resnet18", 3, {"stem": "small"})
    )
    assert not spec.is_factory
    assert NetworkSpec("a.b:c", 3).is_factory
    assert truncate(net, ["layer3"], keep_output=False).network == spec
    assert spec_of(tiny(3)) is None
    with pytest.raises(NetworkError, match="no name builds"):
        _ = truncate(tiny(3), ["1"], keep_output=False).network


def test_says_how_the_weights_were_found(tmp_path: Path) -> None:
    path, spec = tmp_path / "net.pth", f"{HERE}:tiny"
    trained = tiny(3)
    torch.save(
        {"epoch": 9, "state_dict": {f"module.{key}": value for key, value in trained.state_dict().items()}}, path
    )
    net = load_network(spec, weights=path, num_classes=3)
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in net.state_dict().items())
    assert notes_of(net) == ('found under "state_dict" of net.pth', 'removed the prefix "module."')
    assert notes_of(tiny(3)) == notes_of(load_network(spec, num_classes=3)) == ()
    torch.save({"net": trained.state_dict()}, path)
    with pytest.raises(NetworkError, match=r"net\.pth \(found under \"net\" .*\) is for 3 classes .* the data has 10"):
        load_network(spec, weights=path, num_classes=10)


def test_network_with_versioned_weights(tmp_path: Path) -> None:
    trained = load_network("torchvision:mnasnet0_5", num_classes=3)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "net.safetensors")
    net = load_network("torchvision:mnasnet0_5", weights=tmp_path / "net.safetensors", num_classes=3)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in trained.state_dict().items())


@pytest.mark.parametrize("count", [0, -1])
def test_a_network_has_a_class(count: int) -> None:
    with pytest.raises(NetworkError, match=f"expected num_classes of at least 1, got {count}"):
        load_network("torchvision:resnet18", num_classes=count)
