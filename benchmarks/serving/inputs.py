"""What servers serve and clients send: small networks fitted on images of the repository, digits, photographs."""

from __future__ import annotations

import io
import random
import tarfile
import tempfile
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from benchmarks.runs import ROOT
from benchmarks.serving.adapters.settings import FACTORY
from psc_core.cli.fit import main as psc_fit
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.network.load import load_network

DATA = ROOT / "tests" / "data"
SIDE, WIDTH, HEIGHT, QUALITY = 32, 640, 480, 83
DIGITS, PHOTOGRAPHS = (f"mnist:{DATA}", "mnist"), (f"cifar10:{DATA}", "imagenet")  # CIFAR-10 is enlarged to 224 pixels.


def network(num_classes: int = 10, in_channels: int = 1, stride: int = 4) -> nn.Module:
    """Build two convolutions of four channels and a linear layer: 28 → 7 → 4 pixels, or 224 with a stride of 32."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 4, stride=stride),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


def small(folder: Path, *, photographs: bool = False) -> Path:
    """Train and fit :func:`network` on digits or photographs, and return ``folder``."""
    data, preset = PHOTOGRAPHS if photographs else DIGITS
    images = open_dataset(data, split="train", preprocess=PRESETS[preset])
    arguments = {"in_channels": images.preprocess.channels, "stride": 32 if photographs else 4}
    torch.manual_seed(0)
    net = network(len(images.classes), **arguments)
    batches = [(images.preprocess.standardise(batch.images), batch.labels) for batch in images.batches(64)]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(20):
        for inputs, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    words = ["--layer=2", "--c-proj=2", "--d-proj=4"]
    words += [word for name, value in arguments.items() for word in ("--model-arg", f"{name}={value}")]
    return _fitted(folder, FACTORY, net, data, preset, *words)


def untrained(folder: Path, spec: str, device: str) -> Path:
    """Fit a ResNet of torchvision with random weights and ten classes on photographs."""
    torch.manual_seed(0)
    net = load_network(spec, num_classes=10)
    words = ["--layer=layer4.0.downsample.0", f"--device={device}"]
    words += ["--precision=bf16"] if device != "cpu" else []
    return _fitted(folder, spec, net, *PHOTOGRAPHS, *words)


def _fitted(folder: Path, spec: str, net: nn.Module, data: str, preset: str, *words: str) -> Path:
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        weights = Path(scratch) / "net.safetensors"
        save_file(net.state_dict(), weights)
        given = ["--model", spec, "--weights", str(weights), "--train", data, "--val", data, "--preset", preset]
        if psc_fit([*given, "--device=cpu", "--no-report", *words, "--out", str(folder)]) != 0:
            raise RuntimeError(f"psc-fit failed on {spec}; see above")
    return folder


def digits(count: int) -> list[bytes]:
    data = open_dataset(f"mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
    images = [Image.fromarray(data.image(index)[0]) for index in range(min(count, len(data)))]
    return [_encoded(image, format="PNG") for image in images]


def photographs(count: int) -> list[bytes]:
    """Return JPEG files of 640 × 480, 4:2:0 and about 100 kB: mosaics of 300 real CIFAR-10 images in random order.

    They stand for photographs, none of which we have with a licence to ship it: a decoder's time depends on the numbers
    of pixels and bytes, which are those of a photograph.
    """
    with tarfile.open(DATA / "cifar10-jpeg.tar.gz") as archive:
        files = [archive.extractfile(member) for member in archive.getmembers()]
        tiles = [Image.open(io.BytesIO(file.read())).convert("RGB") for file in files if file is not None]
    places = [(left, top) for top in range(0, HEIGHT, SIDE) for left in range(0, WIDTH, SIDE)]
    order = random.Random(0)
    photos = []
    for _ in range(count):
        mosaic = Image.new("RGB", (WIDTH, HEIGHT))
        for place, tile in zip(places, order.sample(tiles, len(places)), strict=True):
            mosaic.paste(tile, place)
        photos.append(_encoded(mosaic, format="JPEG", quality=QUALITY, subsampling="4:2:0"))
    return photos


def _encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)  # type: ignore[arg-type]
    return buffer.getvalue()
