"""Train a ResNet-50 on photographs of 224 pixels for a few epochs, and time a fit of it.

    python -m benchmarks.device.large_fit --data ROOT --device cuda --images 20000

The images are CIFAR-10's, enlarged and written as JPEG files, so that the fit decodes as many files of that size as a
user's would.  The result is ``large-fit-DEVICE.json``: seconds of the training, of one pass of the network, of the fit.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.runs import RESULTS, environment, plain_parser, write_json
from psc_core.cli.fit import main as psc_fit
from psc_core.compute import resolve_device
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.network.load import load_network

SIDE, LARGEST, TRAINED = 224, 0.2, 8000  # Pixels; learning rate; images to train on.


def write_files(folder: Path, data: ImageDataset, count: int) -> None:
    """Write the first images of a data set as JPEG files of 224 × 224, a folder a class."""

    def write(index: int) -> None:
        label = data.classes[int(data.labels[index])]
        image = Image.fromarray(data.image(index).transpose(1, 2, 0)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.save(folder / label / f"{index}.jpg", quality=90)

    for name in data.classes:
        (folder / name).mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count].tolist()))


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int, batch: int, device: torch.device) -> float:
    """Train from images on the device, in bfloat16 on a GPU, and return the accuracy in the last epoch."""
    net.to(device).to(memory_format=torch.channels_last).train()
    steps = epochs * (len(images) // batch)
    optimizer = torch.optim.SGD(net.parameters(), lr=LARGEST, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LARGEST, total_steps=steps)
    scale, shift = (value.to(device) for value in PRESETS["imagenet"].scale_and_shift())
    right = torch.zeros((), device=device)
    for _ in range(epochs):
        right.zero_()
        order = torch.randperm(len(images), device=device)
        for part in order[: len(order) // batch * batch].split(batch):
            x = images[part].float().mul_(scale).add_(shift).contiguous(memory_format=torch.channels_last)
            x = x.flip(3) if torch.rand(()) < 0.5 else x
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = net(x)
            nn.functional.cross_entropy(logits.float(), labels[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            right += (logits.argmax(1) == labels[part]).sum()
    net.eval()
    return float(right) / (len(images) // batch * batch)


@torch.inference_mode()
def one_pass(net: nn.Module, images: Tensor, device: torch.device) -> float:
    """Return the seconds of one pass of the network in float32 over images on the device."""
    scale, shift = (value.to(device) for value in PRESETS["imagenet"].scale_and_shift())
    parts = images.split(64)
    net(parts[0].float() * scale + shift)
    began = time.perf_counter()
    for part in parts:
        net(part.float() * scale + shift).sum().item()
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> None:
    cli = plain_parser(__doc__)
    cli.add_argument("--device", default="auto")
    cli.add_argument("--data", type=Path, required=True, metavar="ROOT", help="folder of the data sets")
    cli.add_argument("--images", type=int, default=20_000)
    cli.add_argument("--epochs", type=int, default=2)
    cli.add_argument("--network", default="torchvision:resnet50", metavar="SPEC")
    cli.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="results (default: benchmarks/results)")
    args = cli.parse_args(argv)
    device, spec = resolve_device(args.device), args.network
    seconds = {}
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        folder = Path(scratch)
        began = time.perf_counter()
        for split, count in (("train", args.images), ("val", max(200, args.images // 10))):
            part = "train" if split == "train" else "test"
            data = open_dataset(f"cifar10:{args.data}", split=part, preprocess=PRESETS["cifar10"])
            write_files(folder / split, data, count)
        seconds["write files"] = time.perf_counter() - began
        began = time.perf_counter()
        files = open_dataset(str(folder / "train"), split="train", preprocess=PRESETS["imagenet"])
        batches = list(files.batches(500))
        images = torch.cat([batch.images for batch in batches]).to(device)
        labels = torch.cat([batch.labels for batch in batches]).to(device)
        seconds["decode once"] = time.perf_counter() - began
        torch.manual_seed(0)
        net = load_network(spec, num_classes=len(files.classes))
        began = time.perf_counter()
        few = slice(TRAINED)
        accuracy = train(net, images[few], labels[few], args.epochs, min(256, len(images) // 4), device)
        seconds["training"] = time.perf_counter() - began
        net.to(memory_format=torch.contiguous_format)
        seconds["one pass"] = one_pass(net, images, device)
        del images
        save_file(
            {key: value.contiguous() for key, value in net.cpu().state_dict().items()}, folder / "net.safetensors"
        )
        words = ["--model", spec, "--weights", str(folder / "net.safetensors"), "--preset=imagenet", "--verbose"]
        words += ["--train", str(folder / "train"), "--val", str(folder / "val"), f"--device={device}"]
        print({name: round(value, 1) for name, value in seconds.items()}, accuracy, flush=True)
        began = time.perf_counter()
        if psc_fit([*words, "--no-report", "--out", str(folder / "bundle")]) != 0:
            raise RuntimeError("psc-fit failed; see above")
        seconds["fit"] = time.perf_counter() - began
        manifest = json.loads((folder / "bundle" / "manifest.json").read_text())
    write_json(
        args.out / f"large-fit-{device.type}.json",
        {
            "command": f"python -m benchmarks.device.large_fit --data ROOT --device {device.type}",
            "environment": environment(device),
            "network": spec,
            "images": args.images,
            "epochs": args.epochs,
            "training_accuracy": accuracy,
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "device_memory_gib": torch.cuda.max_memory_allocated() / (1 << 30) if device.type == "cuda" else None,
            "metrics": manifest["metrics"],
        },
    )
    print(seconds)


if __name__ == "__main__":
    main()
