import json
import sys
from functools import partial
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from psc_core import PRESETS, PSC, fit_projection, fit_psc, load_model, measure_collapse, open_dataset
from psc_core.bundle import read_bundle, write_bundle
from psc_core.data.dataset import ImageDataset
from psc_core.errors import BundleError, NetworkError
from psc_core.network.load import load_network
from psc_core.pipeline import available_backends, pipeline_on
from tests import tiny, warm
from tools import forge

Saved = tuple[PSC, Path]
Images = tuple[ImageDataset, ImageDataset]


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 10),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def images(data_root: Path) -> Images:
    opened = partial(open_dataset, f"mnist:{data_root}", preprocess=PRESETS["mnist"])
    return opened(split="train"), opened(split="val")


def fitted(net: nn.Module, images: Images, head: str | None = "duq", **more: str) -> PSC:
    train, val = images
    chosen = measure_collapse(net, train, val).choose()
    return fit_psc(net, chosen, fit_projection(net, chosen, train, val), train, val, head=head, **more)


@pytest.fixture(scope="module")
def trained(images: Images) -> nn.Module:
    """Features of an untrained network hardly differ, so that rounding counts."""
    net, train = sequential().train(), images[0]
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for batch in (batch for _ in range(4) for batch in train.batches(64)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(train.preprocess.standardise(batch.images)), batch.labels).backward()
        optimiser.step()
    return net.eval()


@pytest.fixture(scope="module")
def live(trained: nn.Module, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model = fitted(trained, images)
    folder = tmp_path_factory.mktemp("live") / "bundle"
    model.save(folder)
    return model, folder


def test_a_live_module_gives_the_same_from_its_bundle(live: Saved, images: Images) -> None:
    model, folder = live
    loaded = load_model(folder)
    pixels = next(images[0].batches(100)).images
    before, after = model.compute(pixels), loaded.compute(pixels)
    torch.testing.assert_close(after.packed, before.packed, rtol=1e-3, atol=2e-3)
    assert loaded.predict(pixels).decision == model.predict(pixels).decision
    assert loaded.backbone.layers == model.backbone.layers
    assert available_backends(loaded) == ("onnx",) and pipeline_on(loaded, "onnx") is loaded.pipeline
    assert {file.name for file in folder.iterdir()} >= {"backbone.onnx", "manifest.json"}
    assert not (folder / "backbone.safetensors").exists()
    again = folder.with_name("again")
    assert loaded.save(again).version == read_bundle(folder).manifest.version


def test_original_predictions_keep_the_logits(images: Images, tmp_path: Path) -> None:
    model = fitted(sequential(), images, head=None, predictions="original")
    model.save(tmp_path / "bundle")
    pixels = next(images[0].batches(20)).images
    loaded = PSC.load(tmp_path / "bundle")
    torch.testing.assert_close(loaded.compute(pixels).probabilities, model.compute(pixels).probabilities)


def test_a_bundle_needs_neither_torchvision_nor_the_code(live: Saved) -> None:
    program = (
        "import sys\n"
        "for name in ('torchvision', 'timm', 'tests'): sys.modules[name] = None\n"
        "from psc_core import load_model\n"
        f"model = load_model({str(live[1])!r})\n"
        "import numpy as np\n"
        "print(model.predict([np.zeros((28, 28), np.uint8)]).decision)\n"
    )
    found = warm.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "abstain" in found.stdout or "accept" in found.stdout


def test_nothing_of_this_machine_is_in_the_graph(live: Saved) -> None:
    data = (live[1] / "backbone.onnx").read_bytes()
    assert str(Path(__file__).parents[3]).encode() not in data and b"site-packages" not in data


def test_a_hostile_graph_is_refused_by_name(live: Saved, tmp_path: Path) -> None:
    bundle = read_bundle(live[1])
    assert bundle.graph is not None
    model = onnx.load_model_from_string(bundle.graph)
    model.graph.node.append(onnx.helper.make_node("NonZero", [model.graph.output[0].name], ["more"]))
    fields = json.loads((live[1] / "manifest.json").read_text())
    del fields["version"], fields["files"]
    write_bundle(tmp_path / "bundle", fields, bundle.parts, model.SerializeToString())
    with pytest.raises(BundleError, match="the operator 'NonZero' is not supported"):
        load_model(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("network", {"spec": "torchvision:resnet18", "num_classes": 10, "model_args": {}}, "files"),
        ("hooks", {"stop": None, "dropped": []}, "backbone.hooks"),
    ],
)
def test_the_manifest_says_what_the_network_is(
    live: Saved, tmp_path: Path, field: str, value: object, message: str
) -> None:
    bundle = read_bundle(live[1])
    fields = json.loads((live[1] / "manifest.json").read_text())
    del fields["version"], fields["files"]
    fields["backbone"][field] = value
    with pytest.raises(ValueError, match=message):
        write_bundle(tmp_path / "bundle", fields, bundle.parts, bundle.graph)


def test_a_network_with_a_name_may_be_a_graph_too(images: Images, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fitted(load_network("tests.tiny:network", num_classes=10), images)
    by_name, as_graph = model.save(tmp_path / "name"), model.save(tmp_path / "graph", graph=True)
    assert by_name.backbone.network is not None and as_graph.backbone.network is None
    with pytest.raises(BundleError, match="allow-list"):
        load_model(tmp_path / "name")
    pixels = next(images[1].batches(20)).images
    outputs = load_model(tmp_path / "graph").compute(pixels)
    torch.testing.assert_close(outputs.probabilities, model.compute(pixels).probabilities, rtol=1e-3, atol=1e-4)


def test_a_graph_computes_in_float32(live: Saved, images: Images) -> None:
    with pytest.raises(NetworkError, match="computes in float32"):
        load_model(live[1]).backbone.fused("bf16")
    with pytest.raises(NetworkError, match="in float32 only"):
        fitted(sequential(), images, precision="bf16").save(live[1].with_name("half"))


@pytest.mark.parametrize("change", ["activation", "logits"])
def test_a_network_that_was_changed_is_no_longer_built_by_its_name(images: Images, tmp_path: Path, change: str) -> None:
    torch.manual_seed(0)
    net = load_network("tests.tiny:network", num_classes=10)
    if change == "activation":
        net.set_submodule(next(name for name, each in net.named_modules() if isinstance(each, nn.ReLU)), nn.SiLU())
    else:
        net.register_forward_hook(lambda _module, _inputs, logits: logits.flip(1))
    model = fitted(net, images, None, predictions="original")
    assert model.save(tmp_path / "bundle").backbone.network is None
    pixels = next(images[1].batches(20)).images
    outputs = load_model(tmp_path / "bundle").compute(pixels)
    torch.testing.assert_close(outputs.probabilities, model.compute(pixels).probabilities, rtol=1e-3, atol=1e-4)


def test_tokens_before_images_are_served_from_a_bundle(images: Images, tmp_path: Path) -> None:
    train, val = images
    net = load_network("tests.tiny:Tokens", num_classes=10)
    net.load_state_dict(tiny.train(train, factory=tiny.Tokens).state_dict())
    chosen = measure_collapse(net, train, val).choose("blocks.1")
    model = fit_psc(net, chosen, fit_projection(net, chosen, train, val), train, val)
    model.save(tmp_path / "bundle")
    loaded = load_model(tmp_path / "bundle", allow_factories=["tests.tiny:Tokens"])
    assert loaded.backbone.spec()["tokens_first"] == [*loaded.backbone.layers] and "texture" in loaded.checks
    pixels = next(val.batches(100)).images
    assert torch.equal(loaded.compute(pixels).packed, model.compute(pixels).packed)
    assert available_backends(loaded) == ("folded", "plain", "onnx")
    for backend in ("plain", "onnx"):
        assert pipeline_on(loaded, backend)(pixels).shape[0] == 100  # it compares both
    forge.assign(tmp_path / "bundle", "backbone.tokens_first", ["blocks.2"])
    with pytest.raises(BundleError, match=r"backbone\.tokens_first to be \[\], got \['blocks\.2'\]"):
        load_model(tmp_path / "bundle", allow_factories=["tests.tiny:Tokens"])
    forge.assign(tmp_path / "bundle", "backbone.tokens_first", [])
    with pytest.raises(BundleError):
        load_model(tmp_path / "bundle", allow_factories=["tests.tiny:Tokens"])
