"""What decoding each image once saves a fit: JPEG files of about 100 kB, with ``--cache`` and without, on the CPU.

    python -m benchmarks.fit.decoding --data ROOT

The photographs are mosaics of CIFAR-10 images of one class, 480 × 352 pixels at quality 95, prepared as for ImageNet
(256, the 224 in the middle).  A ResNet-18 with random weights is fitted on them in one thread, once for each setting
and repeat, and each step is also timed alone.  Times are CPU seconds of the process, which other work on the machine
hardly changes.  Results go to ``benchmarks/results/fit-decoding.json`` and ``fitting.md`` beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.runs import RESULTS, environment, where, write_section
from psc_core.data.cache import cached
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import open_dataset
from psc_core.fitting.options import FitOptions
from psc_core.fitting.stages import fit_projection, fit_psc, measure_collapse
from psc_core.images.preprocess import PRESETS
from psc_core.network.load import load_network

FILE = RESULTS / "fit-decoding.json"
TILES = (11, 15)
"""Rows and columns of a mosaic."""
QUALITY = 95
VALIDATION = 3
"""Training images for each validation image."""


def write_mosaics(root: Path, folder: Path, count: int, split: str) -> None:
    """``count`` mosaics of CIFAR-10 images as ``folder/class/number.jpg``."""
    small = open_dataset(f"cifar10:{root}", split=split, preprocess=PRESETS["cifar10"])
    labels, random = small.first_labels().numpy(), np.random.default_rng(0)
    for number in range(count):
        label = number % len(small.classes)
        chosen = random.choice(np.flatnonzero(labels == label), TILES)
        rows = [np.concatenate([small.image(int(index)) for index in row], axis=2) for row in chosen]
        path = folder / small.classes[label] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.concatenate(rows, axis=1).transpose(1, 2, 0)).save(path, quality=QUALITY)


def cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this process for ``work``."""
    began = time.process_time()
    work()
    return time.process_time() - began


def fit(net: nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    """Every stage of a fit."""
    options = FitOptions(device="cpu")
    candidate = measure_collapse(net, train, val, options=options).candidate()
    fit_psc(net, candidate, fit_projection(net, candidate, train, val, options=options), train, val, options=options)


def read_all(data: ImageDataset) -> None:
    """Every image once, without a network."""
    for _ in data.batches(64):
        pass


def forward(net: nn.Module, data: ImageDataset) -> None:
    """Every image once through the network."""
    with torch.inference_mode():
        for batch in data.batches(64):
            net(data.preprocess.standardise(batch.images))


def measure(root: Path, images: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of the fits and of the steps of a pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = load_network("torchvision:resnet18", num_classes=10)
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        folder = Path(scratch)
        write_mosaics(root, folder / "train", images, "train")
        write_mosaics(root, folder / "val", images // VALIDATION, "test")
        size = float(np.mean([path.stat().st_size for path in folder.rglob("*.jpg")]))
        opened = [
            open_dataset(str(folder / split), split=split, preprocess=PRESETS["imagenet"]) for split in ("train", "val")
        ]
        fits: dict[str, list[float]] = {"off": [], "on": []}
        for _ in range(repeats):
            for setting, seconds in fits.items():
                train, val = [cached(data, folder) for data in opened] if setting == "on" else opened
                seconds.append(round(cpu_seconds(lambda train=train, val=val: fit(net, train, val)), 2))  # type: ignore[misc]
                print(f"--cache {setting}: {seconds[-1]} s", file=sys.stderr, flush=True)
        kept = cached(opened[0], folder)
        steps = {"decode": cpu_seconds(lambda: read_all(kept)), "read again": cpu_seconds(lambda: read_all(kept))}
        steps["network"] = cpu_seconds(lambda: forward(net, kept)) - steps["read again"]
    return {"images": images, "kilobytes": round(size / 1000, 1), "fit_cpu_s": fits, "pass_cpu_s": steps}


def table(report: Mapping[str, Any]) -> str:
    """The results as a section of ``benchmarks/results/fitting.md``."""
    images, fits = report["images"], {name: min(seconds) for name, seconds in report["fit_cpu_s"].items()}
    each = {name: 1000 * seconds / images for name, seconds in report["pass_cpu_s"].items()}
    lines = [
        f"{where(report['environment'])}; {images} training and {images // VALIDATION} validation images, JPEG files "
        f"of {report['kilobytes']:.0f} kB on average, ResNet-18 at 224².",
        "",
        f"    {report['command']}",
        "",
        "| | fit, CPU seconds | reading an image, first pass | every further pass | images/s that a core reads then |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for setting, title in (("off", "`--cache off`"), ("on", "decoded once (default)")):
        again = each["decode" if setting == "off" else "read again"]
        lines.append(
            f"| {title} | {fits[setting]:.1f} | {each['decode']:.2f} ms | {again:.2f} ms | {1000 / again:,.0f} |"
        )
    lines += ["", f"The network itself takes {each['network']:.1f} ms an image."]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--data", type=Path, required=True, metavar="ROOT", help="where cifar10-jpeg.tar.gz is")
    cli.add_argument("--images", type=int, default=120, help="training images")
    cli.add_argument("--repeats", type=int, default=1)
    args = cli.parse_args()
    report = {
        "command": f"python -m benchmarks.fit.decoding --data ROOT --images {args.images} --repeats {args.repeats}",
        "environment": environment(torch.device("cpu")),
        **measure(args.data, args.images, args.repeats),
    }
    FILE.write_text(json.dumps(report, indent=2) + "\n")
    write_section(RESULTS / "fitting.md", "fit-decoding", table(report), "Decoding once")
    print(table(report))


if __name__ == "__main__":
    main()
