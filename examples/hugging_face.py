"""A Hugging Face image classifier: its folder gives the network, the class names and the preprocessing.

    python examples/hugging_face.py                   (a small ViT that learns digits first)
    python examples/hugging_face.py my-vit images     (a folder from save_pretrained; images/train/CLASS/, …)

Prints the layer that PSC reads, and how many images of test/ and other/ get each decision.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from digits import digit_folders, scratch, train
from torchvision.datasets import ImageFolder
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from psc_core import PSC, load_network, open_dataset
from psc_core.network.described import describe


def small_vit(images: Path) -> Path:
    """The folder of a small ViT that has learnt the digits."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    names = {index: str(index) for index in range(10)}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=28, patch_size=7, id2label=names, **sizes))
    processor = ViTImageProcessor(size={"height": 28, "width": 28})
    transformed = ImageFolder(images / "train", lambda image: processor(image, return_tensors="pt").pixel_values[0])
    train(model, transformed, epochs=30)
    folder = scratch()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


images = Path(sys.argv[2]) if len(sys.argv) > 2 else digit_folders()
folder = Path(sys.argv[1]) if len(sys.argv) > 2 else small_vit(images)

about = describe(f"hf:{folder}")
train_images, val_images = (
    open_dataset(str(images / split), split=split, preprocess=about.preprocess) for split in ("train", "val")
)
psc = PSC.fit(load_network(f"hf:{folder}"), train_images, val_images)

print("reads", psc.layer)
for split in ("test", "other"):
    prediction = psc.predict(sorted((images / split).rglob("*.*")))
    print(split, dict(Counter(prediction.decision)))
