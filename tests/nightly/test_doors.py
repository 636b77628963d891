"""A ResNet-50 and a vision transformer of usual size, their weights moved to every library, through every door."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from psc_core import load_model, load_network
from tests import folders
from tests.doors import Images, as_checkpoint, as_onnx, check_same, copied, fitted, in_memory

pytestmark = pytest.mark.slow

SIZE: Final = replace(folders.SIZE, height=64, width=64)
TENSORS = Mapping[str, Tensor]


def resnet_of_transformers(state: TENSORS) -> dict[str, Tensor]:
    """The weights of a ResNet of torchvision and timm by the names that transformers gives them."""
    kinds = {"conv": "convolution", "bn": "normalization", "0": "convolution", "1": "normalization"}

    def renamed(name: str) -> str:
        if found := re.fullmatch(r"layer(\d)\.(\d+)\.(?:downsample\.([01])|(conv|bn)(\d))\.(\w+)", name):
            stage, block, shortcut, kind, number, rest = found.groups()
            place = "shortcut" if shortcut else f"layer.{int(number) - 1}"
            return f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}.{place}.{kinds[shortcut or kind]}.{rest}"
        kind, rest = name.split(".")
        return f"classifier.1.{rest}" if kind == "fc" else f"resnet.embedder.embedder.{kinds[kind[:-1]]}.{rest}"

    return {renamed(name): tensor for name, tensor in state.items()}


def vit_of_transformers(state: TENSORS) -> dict[str, Tensor]:
    """The weights of a vision transformer of timm by the names that transformers gives them."""
    names = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
        "attn.proj": "attention.o_proj",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    given: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place, last = name, ""
        if place not in names:
            place, _, last = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)\.", place)
        prefix = f"vit.layers.{block[1]}." if block else ""
        place = place.removeprefix(block[0]) if block else place
        if place == "attn.qkv":
            for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
                given[f"{prefix}attention.{part}_proj.{last}"] = chunk.contiguous()
        else:
            given[f"{prefix}{names[place]}.{last}".rstrip(".")] = tensor
    return given


@dataclass(frozen=True)
class Case:
    """A network of timm, and how the same is built elsewhere.

    Attributes:
        timm: Its name in timm.
        model_args: Of timm's builder.
        kind: Its name in transformers.
        config: Of transformers' builder.
        renamed: Gives the weights for transformers.
        others: Specs of other libraries that take the same checkpoint.
        epochs: How long it is trained.
        rate: Of its training.
        is_folded: Whether an export folds its batch normalisation, so that layers have other features in ONNX.
    """

    timm: str
    model_args: Mapping[str, Any]
    kind: str
    config: Mapping[str, Any]
    renamed: Callable[[TENSORS], dict[str, Tensor]]
    others: tuple[str, ...]
    epochs: int
    rate: float
    is_folded: bool


RESNET: Final = Case("resnet50", {}, "resnet", {}, resnet_of_transformers, ("torchvision:resnet50",), 4, 3e-3, True)
VIT: Final = Case(
    "vit_tiny_patch16_224",
    {"img_size": 64},
    "vit",
    {
        "image_size": 64,
        "patch_size": 16,
        "hidden_size": 192,
        "num_hidden_layers": 12,
        "num_attention_heads": 3,
        "intermediate_size": 768,
        "layer_norm_eps": 1e-6,
    },
    vit_of_transformers,
    (),
    12,
    3e-4,
    False,
)


@pytest.mark.parametrize("case", [RESNET, VIT], ids=lambda case: case.timm)
def test_every_door_gives_the_same_decisions(case: Case, data_root: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    job = folders.Job(
        tmp_path,
        *(folders.write_digits(tmp_path / split, data_root, split, n) for split, n in (("train", 600), ("val", 150))),
    )
    images = Images.of(job, tmp_path / "images", SIZE)
    torch.manual_seed(0)
    net: nn.Module = timm.create_model(case.timm, num_classes=len(folders.NAMES), **case.model_args)
    folders.train(net, job.train, case.epochs, SIZE, case.rate)
    folder = folders.save_timm(tmp_path / "timm", net, input_size=[*SIZE.shape])
    config = transformers.AutoConfig.for_model(case.kind, id2label=dict(enumerate(folders.NAMES)), **case.config)
    theirs = transformers.AutoModelForImageClassification.from_config(config).eval()
    theirs.load_state_dict(case.renamed(net.state_dict()))
    with torch.inference_mode():
        assert torch.allclose(theirs(torch.ones(2, *SIZE.shape)).logits, net(torch.ones(2, *SIZE.shape)), atol=1e-4)
    checkpoint = str(as_checkpoint(tmp_path / "last.pth", net))
    arguments = [word for name, value in case.model_args.items() for word in ("--model-arg", f"{name}={value}")]
    doors = {
        "timm-folder": [f"timm:local-dir:{folder}"],
        "onnx": [f"onnx:{as_onnx(tmp_path / 'net.onnx', net, SIZE)}", *images.flags],
        "hf-timm": [f"hf:{folder}"],
        "hf": [f"hf:{folders.save_transformer(tmp_path / 'hf-net', theirs, SIZE)}"],
        **{
            spec.replace(":", "-"): [spec, "--weights", checkpoint, *arguments, *images.flags]
            for spec in (f"timm:{case.timm}", *case.others)
        },
    }
    bundles = {name: fitted(tmp_path / name, images, *words) for name, words in doors.items()}
    bundles["module"] = in_memory(tmp_path / "module", images, copied(load_network(f"timm:local-dir:{folder}")))
    for name, bundle in bundles.items():
        print(name, load_model(bundle, device="cpu").layer)
    check_same(bundles, images, tmp_path, ("onnx",) if case.is_folded else ())
