"""A fit of ResNet-50 at 224 pixels on synthetic JPEG files: images/s of every pass, and how busy the GPU was.

    python -m benchmarks.gpu.fit --device cuda --images 20000
    python -m benchmarks.gpu.fit --device cuda --images 4000 --processes 2       # which share one GPU

``psc-fit`` is a process of its own, or several under ``torchrun``; its log says when a pass ended.  A thousand images
are different, the others repeat them.  Weights are random: passes take as long, and the fitted model is no good.
What is in ``fit-DEVICE.json`` is not measured again, unless ``--again``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.fit.memory import _PASS, run
from benchmarks.runs import Json, environment, markdown_table, write_json
from benchmarks.serving.gpu import GpuUse
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset, labelled
from psc_core.data.sources import EncodedSource
from psc_core.images.preprocess import Preprocess
from psc_core.network.load import load_network

COUNT = "PSC_BENCHMARK_IMAGES"
CLASSES, DISTINCT, VALIDATION = 20, 1000, 1000
NETWORK, LAYER = "torchvision:resnet50", "layer4.0.downsample.0"


def images(*, split: str, preprocess: Preprocess) -> ImageDataset:
    """As many coloured blots as the environment says for training, :data:`VALIDATION` others for validation."""
    count = int(os.environ[COUNT]) if split == "train" else min(VALIDATION, int(os.environ[COUNT]))
    distinct = min(count, DISTINCT)
    random = np.random.default_rng(("train", "val", "test").index(split))
    labels = torch.arange(distinct) % CLASSES
    files = [_jpeg(random, int(label)) for label in labels]
    source = EncodedSource([f"{split}-{number}.jpg" for number in range(distinct)], files)
    once = labelled(f"synthetic {split}", [str(c) for c in range(CLASSES)], source, labels, preprocess)
    at = torch.arange(count) % distinct
    return replace(once, indices=at, labels=labels[at], offsets=torch.arange(count + 1))


def _jpeg(random: np.random.Generator, label: int) -> bytes:
    coarse = random.integers(0, 128, (8, 10, 3), dtype=np.uint8)
    coarse[: 2 + label % 5, :, label % 3] += 100
    buffer = io.BytesIO()
    picture = Image.fromarray(coarse).resize((320, 256), Image.Resampling.BICUBIC)
    picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


def measure(device: str, count: int, size: int, processes: int) -> Json:
    """One fit."""
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        weights = Path(scratch) / "net.safetensors"
        torch.manual_seed(0)
        save_file(load_network(NETWORK, num_classes=CLASSES).state_dict(), weights)
        words = f"--model {NETWORK} --preset imagenet --layer {LAYER} --no-report --device {device}"
        words += f" --size {size}" if size != 224 else ""
        words += " --train benchmarks.gpu.fit:images --val benchmarks.gpu.fit:images"
        start = ["-m", "psc_core.cli"]
        if processes > 1:
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *start]
            words += " --distributed"
        paths = ["--weights", str(weights), "--out", str(Path(scratch) / "bundle"), "--cache", scratch]
        command = [sys.executable, *start, *words.split(), *paths]
        stations: list[Json] = []
        batch = Compute(torch.device(device)).batch_size
        watch = GpuUse().__enter__()

        def on_line(line: str, _peak: int) -> None:
            nonlocal watch
            if (found := _PASS.match(line)) is None or found["done"] != found["total"]:
                return
            watch.__exit__()
            batches_per_s = float(line.split("(")[-1].split("/s")[0])
            station = {
                "what": found["what"],
                "batches": int(found["total"]),
                "images_per_s": round(batches_per_s * batch),
            }
            stations.append({**station, **watch.found})
            watch = GpuUse().__enter__()

        try:
            used = run(command, {COUNT: str(count)}, on_line)
        finally:
            watch.__exit__()
        manifest = json.loads((Path(scratch) / "bundle" / "manifest.json").read_text())
    used.pop("stdout")
    nc1 = {layer["name"]: layer["nc1"] for layer in manifest["collapse"]["layers"]}
    return {"images": count, "processes": processes, "size": size, **used, "stations": stations, "nc1": nc1[LAYER]}


def table(found: Json) -> str:
    """The passes of a fit."""
    rows: list[list[Any]] = [
        [each["what"], str(each["batches"]), f"{each['images_per_s']:,}", str(each.get("gpu_utilisation", "—"))]
        for each in found["stations"]
    ]
    return markdown_table(["pass", "batches", "images/s, about", "GPU busy"], rows)


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--images", type=int, default=20_000)
    cli.add_argument("--size", type=int, default=224, help="pixels of a side")
    cli.add_argument("--processes", type=int, default=1)
    cli.add_argument("--again", action="store_true")
    cli.add_argument("--out", type=Path, default=Path("out/gpu"))
    args = cli.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    file = args.out / f"fit-{device.type}.json"
    record: Json = json.loads(file.read_text()) if file.exists() else {"fits": {}}
    name = f"{args.images} images of {args.size}, {args.processes} processes"
    if args.again or name not in record["fits"]:
        record["fits"][name] = measure(args.device, args.images, args.size, args.processes)
        write_json(file, {**record, "environment": environment(device)})
    print(f"{name}: {record['fits'][name]['wall_s']} s\n\n{table(record['fits'][name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
