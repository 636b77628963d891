"""Hostile networks: what a bundle names is never code, never a file, never larger than what it brings."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import PSC, load_network
from psc_core.errors import BundleError, NetworkError
from tools import forge

MARK = Path("pwned")


class Payload:
    """Pickled, it creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (MARK,)


@pytest.fixture(autouse=True)
def nothing_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not MARK.exists()


def rejection(bundle: Path, **network: Any) -> str:
    forge.edit(bundle, lambda body: body["backbone"]["network"].update(network))
    with pytest.raises(BundleError) as caught:
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    return str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        "os:system", "builtins:exec", "pickle:loads", "subprocess:Popen", "psc_core.network.load:load_network",
        "tests.tiny:train", "tests.tiny:network ", "torch.hub:load",
    ],
)  # fmt: skip
def test_rejects_other_factories(bundle: Path, spec: str) -> None:
    assert "allow-list" in rejection(bundle, spec=spec)


@pytest.mark.parametrize("spec", ["tests.tiny.network", "", ":", "a:", ":b"])
def test_rejects_other_specs(bundle: Path, spec: str) -> None:
    assert "package.module:factory" in rejection(bundle, spec=spec)


@pytest.mark.parametrize("name", ["os.system", "quantization.resnet18", "../resnet18", "resnet18\x00", "detection.fcn"])
def test_rejects_other_torchvision_names(bundle: Path, name: str) -> None:
    assert "torchvision" in rejection(bundle, spec=f"torchvision:{name}")


@pytest.mark.parametrize(
    "argument",
    [{"weights": "DEFAULT"}, {"progress": True}, {"norm_layer": "os:system"}, {"stem": ["small"]}, {"in_channels": -1},
     {"zero_init_residual": {"a": 1}}, {"width_per_group": 0}, {"groups": 0}, {"in_channels": "x"}, {"": 1}],
    ids=str,
)  # fmt: skip
def test_rejects_arguments_that_fail(bundle: Path, argument: dict[str, Any]) -> None:
    rejection(bundle, spec="torchvision:resnet18", model_args=argument)


def test_rejects_timm_arguments_that_load_files(bundle: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.save({"state_dict": Payload()}, "evil.pth")
    Path("evil.pkl").write_bytes(pickle.dumps(Payload()))
    arguments: list[dict[str, Any]] = [
        {"checkpoint_path": "evil.pth"},
        {"checkpoint_path": "evil.pkl"},
        {"pretrained": True},
        {"pretrained_cfg": {"url": "http://127.0.0.1:9/x"}},
        {"pretrained_cfg_overlay": {"file": "evil.pth"}},
        {"cache_dir": "/tmp"},
    ]
    for argument in arguments:
        assert "they read or download files" in rejection(bundle, spec="timm:resnet18", model_args=argument)
        with pytest.raises(NetworkError):
            load_network("timm:resnet18", num_classes=2, model_args=argument)
    assert "timm has no network" in rejection(bundle, spec="timm:hf_hub:evil/net", model_args={})
    assert timm.is_model("resnet18")


@pytest.mark.parametrize("layer", ["nowhere", "", ".", "2:input:input", "0.weight", "__class__", "2.forward"])
@pytest.mark.parametrize("hooks", [None, {"stop": None, "dropped": []}])
def test_rejects_unknown_layers(bundle: Path, layer: str, hooks: Any, caplog: pytest.LogCaptureFixture) -> None:
    def change(body: dict[str, Any]) -> None:
        body["layers"], body["backbone"]["layers"] = [layer], [layer, *body["backbone"]["layers"][1:]]
        body["backbone"]["hooks"], body["head"]["layers"] = hooks, [layer]

    forge.edit(bundle, change)
    own = f"tracing Sequential does not reach {re.escape(layer)}\n"
    told = "no attribute|not an nn.Module|backbone does not fit the network" if hooks else own
    with pytest.raises(BundleError) as raised:
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    assert re.search(told, f"{raised.value}\n{caplog.text}")  # Text of an unknown failure is in the log alone.


@pytest.mark.parametrize(
    ("hooks", "told"),
    [
        ({"stop": "2", "dropped": ["0"]}, "backbone does not fit the network"),
        ({"stop": "no", "dropped": ["nowhere.at.all"]}, "no attribute `nowhere`"),
        ({"stop": "", "dropped": [""]}, "backbone does not fit the network"),
        ({"stop": "2", "dropped": ["_modules"]}, "no attribute '_modules'"),
        ({"stop": "2", "dropped": ["forward", "__class__", "training"]}, "cannot assign .* 'training'"),
        ({"stop": "2", "dropped": ["0.weight"]}, "cannot assign .* 'weight'"),
        ({"stop": "2", "dropped": ["0._parameters"]}, "'_Dropped' object has no attribute"),
    ],
    ids=str,
)
def test_rejects_wrong_hooks(bundle: Path, hooks: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    forge.edit(bundle, lambda body: body["backbone"].update(hooks=hooks))
    with pytest.raises(BundleError) as raised:
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    assert re.search(told, f"{raised.value}\n{caplog.text}")
