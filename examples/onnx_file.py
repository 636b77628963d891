"""An ONNX file of any framework: PSC reads its graph, and needs no code of yours to fit or to serve.

    python examples/onnx_file.py                     (a small network that learns digits and is exported first)
    python examples/onnx_file.py net.onnx images     (images/train/CLASS/, val/CLASS/, test/CLASS/ and other/)

Prints the layer that PSC reads, a tensor of the graph, and how many images of test/ and other/ get each decision.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from digits import digit_folders, scratch, train
from own_model import SmallNet
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Grayscale, Normalize, ToTensor

from psc_core import PRESETS, PSC, load_network, open_dataset

PREPROCESS = PRESETS["mnist"]  # How your network was trained: Preprocess("RGB", 224, 224, 256, mean, std), say.


def exported(images: Path) -> Path:
    """The ONNX file of a small network that has learnt the digits."""
    torch.manual_seed(0)
    transform = Compose([Grayscale(), ToTensor(), Normalize(PREPROCESS.mean, PREPROCESS.std)])
    net = train(SmallNet(10), ImageFolder(images / "train", transform))
    file = scratch() / "net.onnx"
    torch.onnx.export(net, (torch.zeros(1, 1, 28, 28),), str(file), dynamo=True, external_data=False, verbose=False)
    return file


images = Path(sys.argv[2]) if len(sys.argv) > 2 else digit_folders()
file = Path(sys.argv[1]) if len(sys.argv) > 2 else exported(images)

net = load_network(f"onnx:{file}")
train_images, val_images = (
    open_dataset(str(images / split), split=split, preprocess=PREPROCESS) for split in ("train", "val")
)
psc = PSC.fit(net, train_images, val_images)

print("reads", psc.layer)
for split in ("test", "other"):
    prediction = psc.predict(sorted((images / split).rglob("*.*")))
    print(split, dict(Counter(prediction.decision)))
