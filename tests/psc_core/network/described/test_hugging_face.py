"""Folders of transformers: the description, and the network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network.cut import trial_input, truncate
from psc_core.network.described import describe_hugging_face
from psc_core.network.layers import list_layers
from psc_core.network.load import load_network, spec_of
from tests import folders

CONFIG: dict[str, Any] = {"model_type": "vit", "id2label": {"0": "cat", "1": "dog"}, "image_size": 32}


def write(folder: Path, **changes: Any) -> Path:
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def copied(job: folders.Job, folder: Path) -> Path:
    return Path(shutil.copytree(job.model, folder / "net"))


def test_classes_in_the_order_of_the_outputs(tmp_path: Path) -> None:
    found = describe_hugging_face(write(tmp_path, id2label={"1": "cat", "0": "dog", "2": "ant"}))
    assert (found.num_classes, found.classes, found.spec) == (3, ("dog", "cat", "ant"), f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("labels", "outputs"), [(None, 2), ({"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, 3), ({"0": "age"}, 1)]
)
def test_outputs_without_names(labels: Any, outputs: int, tmp_path: Path) -> None:
    found = describe_hugging_face(write(tmp_path, id2label=labels))
    assert (found.num_classes, found.classes) == (outputs, None)


def test_a_folder_without_preprocessing_says_so(tmp_path: Path) -> None:
    assert describe_hugging_face(write(tmp_path)).unlike == {"whole": f"{tmp_path} has no preprocessor_config.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "mine.Net"}}, "names code of its own .auto_map., which PSC does not run"),
        (
            {"attn_implementation": "acme/kernel"},
            "elsewhere .attn_implementation 'acme/kernel'., which is not",
        ),
        ({"parts": [{"_attn_implementation": {"a": "flash_attention_2"}}]}, "one of eager, sdpa"),
        ({"_experts_implementation_internal": 1}, "code from elsewhere"),
        ({"id2label": None, "num_labels": "many"}, "num_labels of .* positive number, got 'many'"),
        ({"id2label": None, "num_labels": -1}, "num_labels of .* positive number, got -1"),
        ({"quantization_config": {"bits": 4}}, "belongs to a quantised network"),
        ({"model_type": None}, "has no model_type"),
        ({"id2label": {"0": "a", "2": "b"}}, "to name the outputs 0, 1"),
        ({"id2label": ["a", "b"]}, "to name the outputs 0, 1"),
        ({"id2label": {"0": "a", "1": 2}}, "to hold names"),
        ({"num_channels": True, "preprocessor": True}, "of 1 or 3 channels, got True"),
        ({"num_channels": 4, "preprocessor": True}, "of 1 or 3 channels, got 4"),
    ],
)
def test_rejects_what_it_cannot_use(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    if changes.pop("preprocessor", False):
        (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(NetworkError, match=message):
        describe_hugging_face(write(tmp_path, **changes))


def test_an_adapter_is_no_network(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NetworkError, match=r"holds an adapter .* merge_and_unload"):
        describe_hugging_face(tmp_path)


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


def absent(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["classifier.weight"]


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["classifier.weight"] = tensors["classifier.weight"][:7].clone()


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["classifier.weight"][0, 0] = torch.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (absent, "no weights of the right shape for classifier.weight; is it a trained classifier"),
        (narrow, "no weights of the right shape for classifier.weight"),
        (infinite, "expected finite weights, classifier.weight has NaN or infinity"),
    ],
)
def test_rejects_weights_that_are_not_all_there(change: Any, message: str, hf_job: folders.Job, tmp_path: Path) -> None:
    folder = copied(hf_job, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NetworkError, match=message):
        load_network(f"hf:{folder}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_network"}, "transformers cannot load .*: ValueError"),
        ({"model_type": "bert"}, "transformers cannot load .*: ValueError"),
        ({"hidden_act": "none_of_them"}, "transformers cannot load .*: KeyError: "),
    ],
)
def test_says_why_transformers_cannot_load(
    changes: dict[str, Any], message: str, hf_job: folders.Job, tmp_path: Path
) -> None:
    folder = copied(hf_job, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(NetworkError, match=message) as told:
        load_network(f"hf:{folder}")
    assert "\n" not in str(told.value)


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
