import json
import os
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network import load
from psc_core.network.cut import truncate
from psc_core.network.described import NetworkSpec
from psc_core.network.load import cache_file, load_network, notes_of, read_checked, spec_of, version_of, write_checked

HERE = __name__


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


@pytest.mark.parametrize(("given", "told"), [({}, 1), ({"transform_input": True}, 0), ({"transform_input": False}, 0)])
def test_asks_if_inputs_are_rescaled(tmp_path: Path, given: dict[str, bool], told: int) -> None:
    args = {"aux_logits": False, "init_weights": False, **given}
    net = load_network("torchvision:googlenet", num_classes=3, model_args=args)
    torch.save(net.state_dict(), tmp_path / "net.pth")
    net = load_network("torchvision:googlenet", weights=tmp_path / "net.pth", num_classes=3, model_args=args)
    assert sum("--model-arg transform_input=true" in note for note in notes_of(net)) == told


def test_network_with_versioned_weights(tmp_path: Path) -> None:
    trained = load_network("torchvision:mnasnet0_5", num_classes=3)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "net.safetensors")
    net = load_network("torchvision:mnasnet0_5", weights=tmp_path / "net.safetensors", num_classes=3)
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in trained.state_dict().items())


def tiny(num_classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))


def not_a_network(num_classes: int) -> int:
    return num_classes


SMALL, TWO = {"stem": "small", "in_channels": 1}, {"in_channels": 2}


@pytest.mark.parametrize(
    ("name", "model_args", "shape"),
    [
        (f"{HERE}:tiny", {"width": 5}, (1, 4, 4)),  # The caller names the factory: that needs no permission.
        *(
            (f"torchvision:{name}", SMALL, (1, size, size))
            for name in ("resnet18", "vgg11_bn", "vgg16_bn")
            for size in (28, 32)
        ),
        *((f"torchvision:{name}", TWO, (2, 32, 32)) for name in ("convnext_tiny", "swin_t", "mobilenet_v3_small")),
        ("timm:resnet18", {"in_channels": 1}, (1, 32, 32)),
    ],
)
def test_networks_take_the_images_of_their_arguments(
    name: str, model_args: dict[str, object], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(5)
    net = load_network(name, num_classes=7, model_args=model_args)
    assert not net.training
    assert net(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("ours", "factory"), [("resnet18", "resnet18"), ("vgg16_bn", "vgg16")])
def test_small_networks_equal_benchmark_networks(ours: str, factory: str) -> None:
    spec = f"benchmarks.networks:{factory}"
    trained = load_network(spec, num_classes=4, model_args={"in_channels": 1})
    net = load_network(f"torchvision:{ours}", num_classes=4, model_args={"stem": "small", "in_channels": 1})
    net.load_state_dict(trained.state_dict())
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(net(x), trained(x))


@pytest.mark.parametrize("line", ["raise OSError('no images')", "raise SystemExit('no images')"])
def test_says_that_a_training_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"script{len(line)}.py").write_text(line)
    with pytest.raises(NetworkError, match=r"importing script\d+ runs it, .*: no images; put .* below if __name__"):
        load_network(f"script{len(line)}:Net", num_classes=3)


def test_a_cache_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "psc"
    folder.mkdir(mode=0o700)
    file = folder / "key.onnx"
    write_checked(file, b"graph")
    assert read_checked(file) == b"graph" and not caplog.records
    file.chmod(0o666)
    assert read_checked(file) is None
    file.chmod(0o600)
    folder.chmod(0o777)
    assert read_checked(file) is None
    folder.chmod(0o700)
    assert read_checked(file) == b"graph" and len(caplog.records) == 2
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_checked(file) is None
    monkeypatch.undo()
    (folder / "link.onnx").symlink_to(file)
    os.mkfifo(folder / "pipe.onnx")
    assert read_checked(folder / "link.onnx") is None and read_checked(folder / "pipe.onnx") is None


@pytest.mark.parametrize(
    ("spec", "model_args", "text"),
    [
        *((spec, {}, "torchvision:NAME") for spec in ("resnet18", "torchvision:", ":net")),
        ("torchvision:resnet19", {}, "did you mean resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "no classification network"),
        ("torchvision:resnet18", {"stem": "tiny"}, "stem=small"),
        ("torchvision:convnext_tiny", {"stem": "small"}, "ResNets and VGGs"),
        ("torchvision:resnet18", {"depth": 3}, "rejects the model arguments"),
        ("timm:resnet18x", {}, "timm has no network"),
        ("timm:resnet18", {"no_such_argument": 1}, "rejects the model arguments"),
        ("torchvision:resnet18", {"replace_stride_with_dilation": [True, False, False]}, "Dilation"),
        ("torchvision:vit_b_16", {"image_size": 100}, "indivisible"),
        ("timm:resnet18", {"act_layer": "foo"}, "rejects the model arguments"),
        ("timm:resnet18.foo", {}, "cannot be built: Invalid pretrained tag"),
        ("no.such.module:net", {}, "cannot import"),
        (f"{HERE}:absent", {}, "cannot import"),
        (f"{HERE}:tiny", {"depth": 2}, r"\(num_classes, depth\)"),
        (f"{HERE}:not_a_network", {}, "return an nn.Module, got int"),
        *((path, {}, "not a path") for path in ("./nets.py:build", "../nets:build", "nets.py:build", "/nets.py:build")),
    ],
)
def test_rejects_bad_specs(spec: str, model_args: dict[str, object], text: str) -> None:
    with pytest.raises(NetworkError, match=text):
        load_network(spec, num_classes=3, model_args=model_args)
    with pytest.raises(NetworkError, match="num_classes of at least 1"):
        load_network("torchvision:resnet18", num_classes=0)


def test_timm_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(NetworkError, match=r"pip install 'psc\[timm\]'"):
        load_network("timm:resnet18", num_classes=3)


def install(folder: Path, version: str, code: str) -> None:
    """Install a module ``standin`` by a distribution of another name."""
    (folder / "standin").mkdir(parents=True)
    (folder / "standin" / "__init__.py").write_text(code)
    info = folder / f"standin_gpu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: standin_gpu\nVersion: {version}\n")


def test_another_version_has_another_place_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PACKAGES", ("standin", "no_such_module"))
    places = []
    for version in ("1.22.0", "2.16.0.dev20260101", "2.15.0+cu132"):
        install(tmp_path / version, version, f"__version__ = {version!r}")
        with monkeypatch.context() as at:
            at.syspath_prepend(tmp_path / version)
            assert version_of("standin") == version
            assert cache_file("onnx", b"network") == cache_file("onnx", b"network")
            places.append(cache_file("onnx", b"network"))
            sys.modules.pop("standin", None)
    assert len({*places}) == 3
    for number, code in enumerate(("import no_such_module", "raise OSError('libcudnn.so.9: cannot open')", "pass")):
        install(tmp_path / str(number), "1.0", code)
        with monkeypatch.context() as at:
            at.syspath_prepend(tmp_path / str(number))
            assert cache_file("onnx", b"network").suffix == ".onnx", "a broken installation has a place too"
            sys.modules.pop("standin", None)
