from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network import LIBRARIES
from psc_core.network.load import BUILDERS, load_network

HERE = __name__


def tiny(num_classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))


def not_a_network(num_classes: int) -> int:
    return num_classes


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "vgg16_bn"])
def test_small_stem_reads_small_grey_images(name: str, size: int) -> None:
    net = load_network(f"torchvision:{name}", num_classes=7, model_args={"stem": "small", "in_channels": 1})
    assert not net.training
    assert net(torch.randn(2, 1, size, size)).shape == (2, 7)


def test_small_resnet_keeps_resolution() -> None:
    net = load_network("torchvision:resnet18", num_classes=3, model_args={"stem": "small"})
    assert net.layer1(net.maxpool(net.conv1(torch.randn(1, 3, 32, 32)))).shape == (1, 64, 32, 32)


@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t", "mobilenet_v3_small"])
def test_in_channels_replaces_first_convolution(name: str) -> None:
    net = load_network(f"torchvision:{name}", num_classes=3, model_args={"in_channels": 2})
    assert net(torch.randn(1, 2, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(("ours", "factory"), [("resnet18", "resnet18"), ("vgg16_bn", "vgg16")])
def test_small_networks_equal_benchmark_networks(ours: str, factory: str) -> None:
    spec = f"benchmarks.networks:{factory}"
    trained = load_network(spec, num_classes=4, model_args={"in_channels": 1})
    net = load_network(f"torchvision:{ours}", num_classes=4, model_args={"stem": "small", "in_channels": 1})
    net.load_state_dict(trained.state_dict())
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(net(x), trained(x))


@pytest.mark.parametrize(
    ("spec", "model_args", "text"),
    [
        (f"{HERE}:absent", {}, "cannot import"),
        ("no_such_package.nets:net", {}, "cannot import"),
        (
            f"{HERE}:tiny",
            {"depth": 2},
            r"the arguments \(num_classes, depth\): .*; name a function",
        ),
        (f"{HERE}:not_a_network", {}, "return an nn.Module, got int"),
    ],
)
def test_rejects_bad_factories(spec: str, model_args: dict[str, object], text: str) -> None:
    with pytest.raises(NetworkError, match=text):
        load_network(spec, num_classes=3, model_args=model_args)


@pytest.mark.parametrize("line", ["raise OSError('no images')", "raise SystemExit('no images')"])
def test_says_that_a_training_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"script{len(line)}.py").write_text(line)
    with pytest.raises(NetworkError, match=r"importing script\d+ runs it, .*: no images; put .* below if __name__"):
        load_network(f"script{len(line)}:Net", num_classes=3)


@pytest.mark.parametrize("spec", ["./nets.py:build", "../nets:build", "nets.py:build", "/home/me/nets.py:build"])
def test_rejects_paths(spec: str) -> None:
    with pytest.raises(NetworkError, match=r"expected package\.module:factory, not a path"):
        load_network(spec, num_classes=3)


def test_missing_timm_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(NetworkError, match=r"pip install 'psc\[timm\]'"):
        load_network("timm:resnet18", num_classes=3)


def test_each_of_the_libraries_has_a_builder() -> None:
    assert tuple(BUILDERS) == LIBRARIES


def test_timm_networks_load() -> None:
    pytest.importorskip("timm")
    net = load_network("timm:resnet18", num_classes=3, model_args={"in_channels": 1})
    assert net(torch.randn(1, 1, 32, 32)).shape == (1, 3)
    with pytest.raises(NetworkError, match="timm has no network"):
        load_network("timm:resnet18x", num_classes=3)
    with pytest.raises(NetworkError, match="rejects the model arguments"):
        load_network("timm:resnet18", num_classes=3, model_args={"no_such_argument": 1})
