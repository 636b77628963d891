"""Folders of tiny networks as transformers and timm write them, and folders of images to fit them on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from torch import nn

from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess

NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""Names of the digits in the order of the networks' outputs, which is not the order of names."""

SIZE: Final = Preprocess("RGB", 32, 32, None, (0.5,) * 3, (0.5,) * 3)  # How images reach the networks

_TRANSFORMER: Final = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_STAGES: Final = {"hidden_sizes": [8, 16, 24], "depths": [1, 2, 1]}

CONFIGURATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "vit": _TRANSFORMER,
    "deit": {**_TRANSFORMER, "architectures": ["DeiTForImageClassification"]},
    "beit": {**_TRANSFORMER, "use_relative_position_bias": True},
    "resnet": {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
    "convnext": {**_STAGES, "num_stages": 3, "patch_size": 2},
    "swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 12,
        "depths": [1, 2],
        "num_heads": [2, 3],
        "window_size": 4,
    },
}
"""Kind of network of transformers → its configuration, small."""


@dataclass(frozen=True)
class Job:
    """The folder of a trained network and images for it, in folders with the names of its classes."""

    model: Path
    train: Path
    val: Path


def write_digits(root: Path, data_root: Path, split: str, images: int) -> Path:
    """Write digits of MNIST as files, in folders with their names."""
    data = open_dataset(f"mnist:{data_root}", split=split, preprocess=PRESETS["mnist"])
    for index, label in enumerate(data.first_labels()[:images].tolist()):
        folder = root / NAMES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.image(index)[0]).save(folder / f"{index}.png")
    return root


def train(net: nn.Module, root: Path, epochs: int, size: Preprocess = SIZE, rate: float = 3e-3) -> None:
    """Train a network on images in folders; its outputs are in the order of :data:`NAMES`."""
    data = open_dataset(str(root), split="train", preprocess=size).in_order(NAMES)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    batches = [(size.standardise(batch.images), batch.labels) for batch in data.batches(64, order=order)]
    net.train()
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            logits = net(images)
            loss = nn.functional.cross_entropy(getattr(logits, "logits", logits), labels)
            loss.backward()
            optimizer.step()
    net.eval()


def transformer(kind: str, classes: Sequence[str] = NAMES, **changes: Any) -> Any:
    """A network of transformers with random weights; ``kind`` is one of :data:`CONFIGURATIONS`."""
    from transformers import AutoConfig, AutoModelForImageClassification

    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    config = AutoConfig.for_model(kind, **CONFIGURATIONS[kind], **names, **changes)
    return AutoModelForImageClassification.from_config(config).eval()


def save_transformer(folder: Path, net: Any, size: Preprocess = SIZE, **options: Any) -> Path:
    """Save a network of transformers with an image processor for images as ``size`` gives them."""
    net.save_pretrained(folder, **options)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": size.height, "width": size.width},
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def save_timm(folder: Path, net: Any, **written: Any) -> Path:
    """Save a network of timm for images as :data:`SIZE` gives them."""
    from timm.models import save_for_hf

    save_for_hf(net, str(folder), model_config={"label_names": [*NAMES]}, safe_serialization=True)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    size = {"input_size": [3, 32, 32], "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}
    config["pretrained_cfg"] |= {**size, "mean": SIZE.mean, "std": SIZE.std, **written}
    file.write_text(json.dumps(config))
    return folder


def timm_network() -> Any:
    """A small network of timm with random weights."""
    import timm

    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=len(NAMES)).eval()
