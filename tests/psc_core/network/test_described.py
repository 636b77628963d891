from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network import described
from psc_core.network.cut import readable_copy, trial_input, truncate
from psc_core.network.described import (
    DESCRIBERS,
    NetworkSpec,
    classes_of,
    describe,
    describe_hugging_face,
    describe_timm,
    folder_of,
    is_described,
    is_of_timm,
    read_json,
    weights_in,
)
from psc_core.network.layers import list_layers
from psc_core.network.load import load_network, spec_of
from tests import folders


def test_describes_without_the_library(
    hf_job: folders.Job, timm_job: folders.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "timm", "safetensors.torch"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for spec in (f"hf:{hf_job.model}", f"timm:local-dir:{timm_job.model}", f"hf:{timm_job.model}"):
        found = describe(spec)
        assert found.classes == folders.NAMES and found.num_classes == 10
        background = "black" if spec.endswith(str(hf_job.model)) else "none"
        assert (found.preprocess, found.unlike) == (replace(folders.SIZE, background=background), {})
        assert [file.name for file in found.weights] == ["model.safetensors"]


def test_number_of_classes_is_the_folders(hf_job: folders.Job, timm_job: folders.Job) -> None:
    for spec in (f"hf:{hf_job.model}", f"timm:local-dir:{timm_job.model}"):
        with pytest.raises(NetworkError, match="is for 10 classes, the data has 3"):
            load_network(spec, num_classes=3)
    with pytest.raises(NetworkError, match="torchvision:resnet18 does not say its number of classes"):
        load_network("torchvision:resnet18")


def test_a_folder_is_never_read_for_a_bundle(timm_job: folders.Job, hf_job: Path) -> None:
    from psc_core.network.load import build

    with pytest.raises(NetworkError, match="timm has no network 'local-dir:"):
        build(NetworkSpec(f"timm:local-dir:{timm_job.model}", 10))
    with pytest.raises(NetworkError, match="cannot import the factory hf:"):
        build(NetworkSpec("hf:net", 10))


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_of(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "net").mkdir()
    assert folder_of("~/net") == tmp_path / "net"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    hub = pytest.importorskip("huggingface_hub", reason="it keeps the cache")
    monkeypatch.setattr(hub.HfApi, "repo_info", Mock(side_effect=AssertionError("the hub was asked")))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def keep(cache: Path, **contents: str) -> Path:
    """Keep a model ACME/net in the cache as the hub's client does, by links."""
    repository = cache / "models--ACME--net"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for name, content in contents.items():
        (repository / "blobs" / name).write_text(content)
        (snapshot / name.replace("_json", ".json").replace("_safe", ".safetensors")).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_finds_a_model_in_the_cache(cache: Path) -> None:
    snapshot = keep(cache, config_json='{"a": 1}', model_safe="")
    found = folder_of("ACME/net")
    assert found == snapshot
    assert read_json(found / "config.json") == {"a": 1}
    assert weights_in(found, ["model.safetensors"]) == (found / "model.safetensors",)


def test_asks_the_hub_on_request_only(cache: Path) -> None:
    with pytest.raises(NetworkError, match="--allow-download"):
        folder_of("ACME/other")
    keep(cache, config_json="{}")
    with pytest.raises(NetworkError, match="--allow-download"):
        folder_of("ACME/net")
    with pytest.raises(AssertionError, match="the hub was asked"):
        folder_of("ACME/other", allow_download=True)


def test_downloads_pickles_only_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it downloads")
    asked: list[list[str]] = []

    def snapshot(_name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    folder_of("ACME/net", allow_download=True)
    assert asked == [["*.json", "*.safetensors"], ["pytorch_model*.bin"]]
    (tmp_path / "model.safetensors").touch()
    folder_of("ACME/net", allow_download=True)
    assert len(asked) == 3


def test_reads_regular_files_of_a_bounded_size_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "large.json").write_text(json.dumps({"a": "b" * 100}))
    monkeypatch.setattr(described, "MAX_JSON", 100)
    for name in ("pipe.json", "large.json", "."):
        with pytest.raises(NetworkError, match="a regular file of at most 100 bytes"):
            read_json(tmp_path / name)
    with pytest.raises(NetworkError, match="No such file or directory; is that the folder of a network"):
        read_json(tmp_path / "absent.json")


def test_takes_the_first_weights(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
    names = ["absent", "model.safetensors", "pytorch_model.bin"]
    assert weights_in(tmp_path, names) == (tmp_path / "model.safetensors",)
    with pytest.raises(NetworkError, match="has no weights, expected one of absent"):
        weights_in(tmp_path, ["absent"])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": 1}}, "has no weight_map"),
        ({"weight_map": {"a": "absent"}}, "'absent', which is not beside it"),
        ({"weight_map": {"a": "../outside"}}, "outside', which is not beside it"),
    ],
)
def test_reads_an_index(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    folder = tmp_path / "net"
    folder.mkdir()
    for name in ("1", "2"):
        (folder / name).touch()
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"a": "2", "b": "1", "c": "2"}}))
    assert weights_in(folder, [file.name]) == (folder / "1", folder / "2")
    file.write_text(json.dumps(index))
    with pytest.raises(NetworkError, match=message):
        weights_in(folder, [file.name])


CONFIG_HF: dict[str, Any] = {"model_type": "vit", "id2label": {"0": "cat", "1": "dog"}, "image_size": 32}


def write_hf(folder: Path, **changes: Any) -> Path:
    config = {name: value for name, value in {**CONFIG_HF, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def copied(job: folders.Job, folder: Path) -> Path:
    return Path(shutil.copytree(job.model, folder / "net"))


def test_gives_the_logits_of_transformers(hf_job: folders.Job) -> None:
    from transformers import AutoModelForImageClassification

    theirs = AutoModelForImageClassification.from_pretrained(hf_job.model, local_files_only=True).eval()
    net = load_network(f"hf:{hf_job.model}")
    images = torch.randn(3, 3, 32, 32)
    assert torch.allclose(net(images), theirs(images).logits, atol=1e-6)
    assert not net.training and spec_of(net) is None


@pytest.mark.parametrize("form", ["shards", "pickle", "half"])
def test_weights_in_other_forms(form: str, hf_job: folders.Job, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    from transformers import AutoModelForImageClassification

    theirs = AutoModelForImageClassification.from_pretrained(hf_job.model, local_files_only=True).eval()
    if form == "shards":
        folder = folders.save_transformer(tmp_path, theirs, max_shard_size="20kB")
        assert len(describe_hugging_face(folder).weights) > 2
    else:
        folder = copied(hf_job, tmp_path)
        if form == "half":
            folders.save_transformer(folder, theirs.half())
            theirs.float()
        else:
            (folder / "model.safetensors").unlink()
            torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    capfd.readouterr()
    net = load_network(f"hf:{folder}")
    assert capfd.readouterr() == ("", ""), "transformers reports"
    images = torch.randn(3, 3, 32, 32)
    assert torch.allclose(net(images), theirs(images).logits, atol=1e-6)


def test_other_weights(hf_job: folders.Job, tmp_path: Path) -> None:
    tensors = {name: tensor + 0 for name, tensor in load_network(f"hf:{hf_job.model}").model.state_dict().items()}
    tensors["classifier.bias"] += 1
    save_file(tensors, tmp_path / "w.safetensors")
    net = load_network(f"hf:{hf_job.model}", weights=tmp_path / "w.safetensors")
    assert torch.equal(net.model.classifier.bias, tensors["classifier.bias"])
    with pytest.raises(NetworkError, match="has its own arguments; leave out depth"):
        load_network(f"hf:{hf_job.model}", model_args={"depth": 1})


def test_missing_transformers_names_the_extra(hf_job: folders.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(NetworkError, match=r"pip install 'psc\[hf\]'"):
        load_network(f"hf:{hf_job.model}")


def test_settings_of_outputs_and_kernels_change_no_logits(hf_job: folders.Job, tmp_path: Path) -> None:
    folder = copied(hf_job, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    settings = {"return_dict": False, "attn_implementation": "eager"}
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    images = torch.randn(3, 3, 32, 32)
    expected = load_network(f"hf:{hf_job.model}")(images)
    assert torch.allclose(load_network(f"hf:{folder}")(images), expected, atol=1e-5)


BLOCKS = {
    "vit": ("model.vit.layers.1", "tokens", (32, 17), 3),
    "deit": ("model.deit.layers.1", "tokens", (32, 18), 3),
    "beit": ("model.beit.layers.1", "tokens", (32, 17), 3),
    "resnet": ("model.resnet.encoder.stages.1.layers.1", "map", (16, 16), 4),
    "convnext": ("model.convnext.encoder.stages.1.layers.1", "map", (16, 64), 4),
    "swin": ("model.swin.encoder.layers.1.blocks.0", "tokens", (24, 64), 3),
}


@pytest.mark.parametrize("kind", folders.CONFIGURATIONS)
def test_layers_are_found_and_cut(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the networks are transformers'")
    folder = folders.save_transformer(tmp_path, folders.transformer(kind))
    net = load_network(f"hf:{folder}")
    trial = trial_input(folders.SIZE)
    blocks = list_layers(net, trial, granularity="blocks")
    name, of_kind, shape, count = BLOCKS[kind]
    found = {layer.name: layer for layer in blocks}
    assert (found[name].form, found[name].shape) == (of_kind, shape)
    assert len([layer for layer in blocks if layer.role in ("hidden", "trunk")]) == count
    operations = list_layers(net, trial)
    assert [layer.role for layer in operations[-2:]] == ["penultimate", "output"]
    penultimate = operations[-2]
    backbone = truncate(net, [name, penultimate.name], keep_output=False, trial=trial)
    with torch.inference_mode():
        first, again = backbone(trial)[0], backbone(trial)[0]
        logits = net(trial)
        (whole,), kept = truncate(net, [name], keep_output=True, trial=trial)(trial)
    assert kept is not None and torch.equal(kept, logits) and torch.equal(whole, first[0])
    assert all(torch.equal(left, right) for left, right in zip(first, again, strict=True))
    classifier = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    with torch.inference_mode():
        assert torch.allclose(classifier(first[1].flatten(1)), logits, atol=1e-6)


def write_timm(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


CONFIG_TIMM = {"architecture": "resnet18", "num_classes": 3, "pretrained_cfg": {"input_size": [3, 64, 64]}}


def test_gives_what_timm_gives(timm_job: folders.Job) -> None:
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(f"local-dir:{timm_job.model}", pretrained=True).eval()
    ours = load_network(f"timm:local-dir:{timm_job.model}")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images)) and not ours.training
    assert spec_of(ours) == NetworkSpec("timm:test_resnet", 10, {"in_chans": 3, "global_pool": "avg"})
    assert classes_of(readable_copy(ours)) == folders.NAMES


def test_a_fixed_size_is_an_argument(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=1, in_chans=1)
    folders.save_timm(tmp_path, net, input_size=[1, 32, 32], mean=[0.5], std=[0.5])
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"] = {"depth": 1}  # as files before timm 1.0.30
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe_timm(tmp_path)
    assert described.preprocess is not None
    assert described.preprocess.shape == (1, 32, 32)
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(load_network(f"timm:local-dir:{tmp_path}")(images), net.eval()(images))


def test_a_size_among_the_arguments(tmp_path: Path) -> None:
    pretrained = {"input_size": [3, 224, 224], "fixed_input_size": True, "crop_pct": 1.0}
    for size in (96, [96, 96]):
        arguments = {"img_size": size, "num_classes": 5, "in_chans": 3}
        found = describe_timm(
            write_timm(tmp_path, {**CONFIG_TIMM, "pretrained_cfg": pretrained, "model_args": arguments})
        )
        assert found.num_classes == 5 and found.model_args == {"img_size": size, "in_chans": 3}
        assert found.preprocess is not None and found.preprocess.shape == (3, 96, 96)


def test_oldest_files_have_one_level(tmp_path: Path) -> None:
    flat = {"architecture": "resnet18", "num_classes": 2, "input_size": [3, 96, 96], "labels": ["cat", "dog"]}
    found = describe_timm(write_timm(tmp_path, flat))
    assert (found.spec, found.num_classes, found.classes) == ("timm:resnet18", 2, ("cat", "dog"))
    assert found.preprocess is not None and found.preprocess.height == 96


def test_arguments_that_load_files_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    write_timm(tmp_path, {**CONFIG_TIMM, "model_args": {"checkpoint_path": "x.pth"}})
    with pytest.raises(NetworkError, match="checkpoint_path are not allowed"):
        load_network(f"timm:local-dir:{tmp_path}")


def test_weights_of_another_network_and_other_weights(timm_job: folders.Job, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(timm_job.model, tmp_path / "net"))
    tensors = load_file(folder / "model.safetensors")
    changed = {**tensors, "fc.bias": tensors["fc.bias"] + 1}
    save_file(changed, tmp_path / "other.safetensors")
    net = load_network(f"timm:local-dir:{folder}", weights=tmp_path / "other.safetensors")
    assert torch.equal(net.fc.bias, changed["fc.bias"])
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.bias"}, folder / "model.safetensors")
    with pytest.raises(NetworkError, match=r"model.safetensors does not fit the network: 1 missing \(fc.bias\)"):
        load_network(f"timm:local-dir:{folder}")


def test_tells_timm_from_others() -> None:
    assert is_of_timm({"architecture": "resnet18"})
    assert is_of_timm({"architecture": "resnet18", "model_type": "timm_wrapper"})
    assert not is_of_timm({"model_type": "vit"})
    assert not is_of_timm({"architecture": "x", "model_type": "vit"})


LABELS: Final = {"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1}}
IMAGENET: Final = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUARE: Final = {"height": 224, "width": 224}


def on_the_hub(kind: str, **fields: Any) -> dict[str, Any]:
    """The files of a folder of transformers."""
    config = {"model_type": kind, "num_channels": 3, "image_size": 224, **LABELS}
    processor = {"do_normalize": True, "do_rescale": True, "do_resize": True, **IMAGENET, **fields}
    return {"config.json": config, "preprocessor_config.json": processor}


VIT: Final = on_the_hub(
    "vit", image_processor_type="ViTFeatureExtractor", resample=2, rescale_factor=1 / 255, size=SQUARE
)


CONVNEXT: Final = on_the_hub(
    "convnext", feature_extractor_type="ConvNextFeatureExtractor", crop_pct=0.875, resample=3,
    size={"shortest_edge": 224},
)  # fmt: skip


EFFICIENTNET: Final = on_the_hub(
    "efficientnet", image_processor_type="EfficientNetImageProcessor", crop_size={"height": 289, "width": 289},
    do_center_crop=False, include_top=True, resample=0, rescale_factor=1 / 255, rescale_offset=False, size=SQUARE,
)  # fmt: skip


LEVIT: Final = on_the_hub(
    "levit", image_processor_type="LevitImageProcessor", crop_size=SQUARE, do_center_crop=True, resample=3,
    size={"shortest_edge": 224},
)  # fmt: skip
HALF = [0.5] * 3
PRETRAINED: Final = {
    "input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.9, "mean": HALF, "std": HALF,
}  # fmt: skip


TIMM: Final = {
    "config.json": {
        "architecture": "vit_tiny_patch16_224", "num_classes": 2, "global_pool": "token",
        "model_args": {"img_size": [224, 224], "in_chans": 3, "num_classes": 2},
        "label_names": {"0": "cat", "1": "dog"},
        "pretrained_cfg": {**PRETRAINED, "custom_load": True, "fixed_input_size": True, "crop_mode": "center",
                           "num_classes": 2, "pool_size": None, "classifier": "head"},
    }
}  # fmt: skip


OLDEST_TIMM: Final = {
    "config.json": {"architecture": "resnet50", "num_classes": 2, "labels": ["cat", "dog"], **PRETRAINED}
}
FOLDERS: Final = (VIT, CONVNEXT, EFFICIENTNET, LEVIT, TIMM, OLDEST_TIMM)
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 4, 224, 1 << 31, 1 << 63, 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308, 1e-5, 0.9]),
    st.integers(-(10**20), 10**20),
    st.floats(),  # json reads NaN and Infinity too
)


ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "cat", "224", "vit", "é\ud800", "x" * 5000])),
    lambda inside: st.one_of(
        st.lists(inside, max_size=4),
        st.dictionaries(st.sampled_from(["0", "1", "height", "width", "shortest_edge", ""]), inside, max_size=3),
    ),
    max_leaves=4,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each field of a JSON document."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(value[key], (*above, key))


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    files = copy.deepcopy(draw(st.sampled_from(FOLDERS)))
    for _ in range(draw(st.integers(1, 3))):
        fields = [place for place in places(files) if len(place) > 1]
        if fields:
            replaced(files, draw(st.sampled_from(fields)), draw(ODD))
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("net")
    (made / "model.safetensors").touch()
    return made


def described_by_each(folder: Path, files: dict[str, Any]) -> list[NetworkSpec]:
    """The descriptions by each reader; an error has to name the folder's file, and to be of a bounded length."""
    for file in folder.glob("*.json"):
        file.unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    found = []
    readers: list[Callable[[Path], NetworkSpec]] = [describe_hugging_face, describe_timm]
    for read in readers:
        try:
            found.append(read(folder))
        except NetworkError as error:
            assert ".json" in str(error) and len(str(error)) < 2000 and "Error" not in str(error), str(error)
    return found


def changed(files: dict[str, Any], *changes: tuple[tuple[Any, ...], Any]) -> dict[str, Any]:
    files = copy.deepcopy(files)
    for place, value in changes:
        replaced(files, place, value)
    return files


@given(files=mutated())
@example(files=changed(TIMM, (("config.json", "model_args", "img_size"), {"height": 3})))
@example(files=changed(TIMM, (("config.json", "model_args", "img_size"), 2.5)))
@example(files=changed(TIMM, (("config.json", "model_args", "num_classes"), 10**18)))
@example(files=changed(TIMM, (("config.json", "model_args", "num_classes"), True)))
@example(files=changed(TIMM, (("config.json", "pretrained_cfg", "crop_pct"), 1e-320)))
@example(files=changed(CONVNEXT, (("preprocessor_config.json", "crop_pct"), 1e-320)))
@example(files=changed(LEVIT, (("preprocessor_config.json", "size"), {"shortest_edge": 10**400})))
@example(files=changed(EFFICIENTNET, (("preprocessor_config.json", "rescale_factor"), 1e-320)))
@example(files=changed(EFFICIENTNET, (("preprocessor_config.json", "image_std"), [1e308] * 3)))
@example(files=changed(VIT, (("config.json", "id2label"), {})))
def test_odd_fields_are_described_or_refused(folder: Path, files: dict[str, Any]) -> None:
    assert all(each.num_classes == 2 for known in FOLDERS for each in described_by_each(folder, known))
    for each in described_by_each(folder, files):
        assert type(each.num_classes) is int and each.num_classes > 0
        assert each.classes is None or len(each.classes) == each.num_classes
        assert each.preprocess is not None


@pytest.mark.parametrize(
    "read",
    [
        *(lambda name=name: folder_of(name) for name in ("nowhere", "/no/where/at/all", "a/b/c", "../x")),
        *(lambda prefix=prefix: describe(f"{prefix}nowhere") for prefix in DESCRIBERS),
    ],
)
def test_a_folder_not_there(read: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NetworkError, match=r"there is no (folder|file)"):
        read()


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_rejects_what_is_no_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(NetworkError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("error", [OSError("no route\nto host"), ValueError("401: gated")])
def test_says_why_it_cannot_download(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it downloads")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(NetworkError, match=r"^cannot download ACME/net: (no route|401: gated)$"):
        folder_of("ACME/net", allow_download=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "mine.Net"}}, "auto_map"),
        ({"attn_implementation": "acme/kernel"}, "attn_implementation 'acme/kernel'"),
        ({"parts": [{"_attn_implementation": {"a": "flash_attention_2"}}]}, "one of eager, sdpa"),
        ({"_experts_implementation_internal": 1}, "code from elsewhere"),
        ({"id2label": None, "num_labels": "many"}, "num_labels"),
        ({"id2label": None, "num_labels": -1}, "num_labels"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": None}, "model_type"),
        ({"id2label": {"0": "a", "2": "b"}}, "outputs 0, 1"),
        ({"id2label": ["a", "b"]}, "outputs 0, 1"),
        ({"id2label": {"0": "a", "1": 2}}, "names"),
        ({"num_channels": True}, "of 1 or 3 channels, got True"),
        ({"num_channels": 4}, "of 1 or 3 channels, got 4"),
    ],
)
def test_rejects_what_it_cannot_use(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "num_channels" in changes:
        (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(NetworkError, match=message):
        describe_hugging_face(write_hf(tmp_path, **changes))
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NetworkError, match="merge_and_unload"):
        describe_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": None}, "architecture"),
        *(({"num_classes": count}, "a positive num_classes") for count in (0, "3", True)),
        *(({"label_names": names}, "expected 3 label_names") for names in (["a"], "abc", [1, 2, 3])),
        ({"pretrained_cfg": []}, "JSON objects"),
        ({"model_args": [1]}, "JSON objects"),
        ({"pretrained_cfg": {"input_size": "224"}}, "field input_size"),
        ({"pretrained_cfg": {"mean": 0.5}}, "field mean"),
    ],
)
def test_rejects_what_is_malformed(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=message):
        describe_timm(write_timm(tmp_path, {**CONFIG_TIMM, **changes}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("classifier.weight"), "classifier.weight"),
        (
            lambda tensors: tensors.update({"classifier.weight": tensors["classifier.weight"][:7].clone()}),
            "classifier.weight",
        ),
        (lambda tensors: tensors["classifier.weight"].fill_(torch.inf), "classifier.weight has NaN or infinity"),
        (lambda tensors: tensors.update({"classifier.more": torch.ones(1)}), "no place for: classifier.more"),
    ],
)
def test_rejects_weights_that_are_not_all_there(change: Any, message: str, hf_job: folders.Job, tmp_path: Path) -> None:
    folder = copied(hf_job, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NetworkError, match=message):
        load_network(f"hf:{folder}")


@pytest.mark.parametrize("changes", [{"model_type": "no_such_network"}, {"hidden_act": "none_of_them"}])
def test_says_why_transformers_cannot_load(changes: dict[str, Any], hf_job: folders.Job, tmp_path: Path) -> None:
    folder = copied(hf_job, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(NetworkError, match=r"transformers cannot load .*: (Value|Key)Error") as told:
        load_network(f"hf:{folder}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("labels", "outputs", "names"),
    [
        ({"1": "cat", "0": "dog", "2": "ant"}, 3, ("dog", "cat", "ant")),
        (None, 2, None),
        ({"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, 3, None),
        ({"0": "age"}, 1, None),
    ],
)
def test_classes_of_the_outputs(labels: Any, outputs: int, names: tuple[str, ...] | None, tmp_path: Path) -> None:
    found = describe_hugging_face(write_hf(tmp_path, id2label=labels))
    assert (found.num_classes, found.classes) == (outputs, names)


@pytest.mark.parametrize("names", [["a", "b", "c"], {"2": "c", "0": "a", "1": "b"}, {"0": "a", "9": "b"}, None, []])
def test_class_names_of_timm(names: Any, tmp_path: Path) -> None:
    expected = ("a", "b", "c") if len(names or ()) == 3 else None
    assert describe_timm(write_timm(tmp_path, {**CONFIG_TIMM, "label_names": names})).classes == expected
    assert not is_described("timm:resnet18") and describe("timm:resnet18") == NetworkSpec("timm:resnet18")
