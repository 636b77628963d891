"""Fit ResNet-50 at 224 pixels on synthetic JPEG files: images/s of every pass, and the GPU's utilisation.

    python -m benchmarks.gpu.fit --device cuda --images 20000
    python -m benchmarks.gpu.fit --device cuda --images 4000 --processes 2       # two processes that share one GPU

``psc-fit`` is a process of its own, or several under ``torchrun``; its log tells when a pass ended.  A thousand images
are different, and the others repeat them.  Weights are random: passes take as long as with trained ones, though the
fitted model is useless.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.data import repeated
from benchmarks.runs import Json, environment, markdown_table, plain_parser, write_json
from benchmarks.serving.gpu import GpuUse
from psc_core.compute import Compute
from psc_core.data.dataset import EncodedSource, ImageDataset, labelled
from psc_core.images.preprocess import Preprocess
from psc_core.network.load import load_network

COUNT = "PSC_BENCHMARK_IMAGES"
CLASSES, DISTINCT, VALIDATION = 20, 1000, 1000
NETWORK, LAYER = "torchvision:resnet50", "layer4.0.downsample.0"
PASS = re.compile(r"(?P<what>.+?) (?P<done>\d+)/(?P<total>\d+) \((?P<speed>[\d.]+)/s, \d+ s\)$")
"""The progress line of a pass."""


def images(*, split: str, preprocess: Preprocess) -> ImageDataset:
    """Write the coloured blots: as many for training as the environment says, :data:`VALIDATION` for validation."""
    count = int(os.environ[COUNT]) if split == "train" else min(VALIDATION, int(os.environ[COUNT]))
    distinct = min(count, DISTINCT)
    random = np.random.default_rng(("train", "val", "test").index(split))
    labels = torch.arange(distinct) % CLASSES
    files = [_jpeg(random, int(label)) for label in labels]
    source = EncodedSource([f"{split}-{number}.jpg" for number in range(distinct)], files)
    classes = [str(label) for label in range(CLASSES)]
    return repeated(labelled(f"synthetic {split}", classes, source, labels, preprocess), count)


def _jpeg(random: np.random.Generator, label: int) -> bytes:
    coarse = random.integers(0, 128, (8, 10, 3), dtype=np.uint8)
    coarse[: 2 + label % 5, :, label % 3] += 100
    buffer = io.BytesIO()
    picture = Image.fromarray(coarse).resize((320, 256), Image.Resampling.BICUBIC)
    picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


def measure(device: str, count: int, size: int, processes: int) -> Json:
    """Run one fit in a process."""
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
        began = time.perf_counter()
        passes = passes_of([sys.executable, *start, *words.split(), *paths], {COUNT: str(count)})
        wall_s = round(time.perf_counter() - began, 1)
    batch = Compute(torch.device(device)).batch_size
    for each in passes:
        each["images_per_s"] = round(batch * each.pop("batches_per_s"))
    return {"images": count, "processes": processes, "size": size, "wall_s": wall_s, "passes": passes}


def passes_of(command: Sequence[str], variables: Mapping[str, str]) -> list[Json]:
    """Run a fit; return its passes from its log, each with the GPU's utilisation.

    Raises:
        RuntimeError: The fit failed; the message ends with the end of its log.
    """
    passes, log = list[Json](), list[str]()
    with subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while True:
            with GpuUse() as use:
                done = _end_of_pass(process.stderr, log)
            if done is None:
                break
            speed = {"batches": int(done["total"]), "batches_per_s": float(done["speed"])}
            passes.append({"what": done["what"], **speed, **use.found})
    if process.returncode:
        raise RuntimeError("".join([f"{' '.join(command[:4])} … ended with {process.returncode}\n", *log[-20:]]))
    return passes


def _end_of_pass(stream: Iterable[str], log: list[str]) -> re.Match[str] | None:
    """Read up to the last line of a pass; return None at the end of the log."""
    for line in stream:
        log.append(line)
        if (found := PASS.match(line)) and found["done"] == found["total"]:
            return found
    return None


def table(found: Json) -> str:
    """Return a table of the passes of a fit."""
    rows = [
        [each["what"], str(each["batches"]), f"{each['images_per_s']:,}", str(each.get("gpu_utilisation", "—"))]
        for each in found["passes"]
    ]
    return markdown_table(["pass", "batches", "images/s, about", "GPU busy"], rows)


def main(argv: list[str] | None = None) -> int:
    """Measure a fit and add it to the record."""
    cli = plain_parser(__doc__)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--images", type=int, default=20_000)
    cli.add_argument("--size", type=int, default=224, help="pixels of a side")
    cli.add_argument("--processes", type=int, default=1)
    cli.add_argument("--out", type=Path, default=Path("out/gpu"))
    args = cli.parse_args(argv)
    device = torch.device(args.device)
    file = args.out / f"fit-{device.type}.json"
    record: Json = json.loads(file.read_text()) if file.exists() else {"fits": {}}
    name = f"{args.images} images of {args.size}, {args.processes} processes"
    record["fits"][name] = found = measure(args.device, args.images, args.size, args.processes)
    write_json(file, {**record, "environment": environment(device)})
    print(f"{name}: {found['wall_s']} s\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
