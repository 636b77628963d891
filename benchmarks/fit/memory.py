"""How much memory and time ``psc-fit`` takes on N images of CIFAR-10 (JPEG files in memory), on the CPU.

    python -m benchmarks.fit.memory --data ROOT --weights net.safetensors --images 5000 50000

``psc-fit`` runs as a process of its own; the kernel's high-water mark of its resident memory is the peak.  Memory
is also sampled ten times a second, to find the pass during which it was highest.  Another process measures one
bare forward pass of the whole network over the same training images, decoding included.  A tenth of the images is
for validation.  Results go to ``benchmarks/results/fit-memory.json`` and ``fitting.md`` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.networks import NETWORKS
from benchmarks.runs import RESULTS, environment, where, write_section
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.load import load_network

LIMIT_MIB = 4096
"""What fitting 50,000 images must stay below."""

_ROOT, _COUNT = "PSC_BENCHMARK_ROOT", "PSC_BENCHMARK_IMAGES"
_PASS = re.compile(r"(?P<what>.+?) (?P<done>\d+)/(?P<total>\d+) \([\d.]+/s, (?P<seconds>\d+) s\)$")
"""A progress line of a pass."""


def images(split: str, preprocess: Preprocess) -> ImageDataset:
    """The data set of ``psc-fit`` here: evenly spaced CIFAR-10 images, as many as the environment sets."""
    whole = open_dataset(f"cifar10:{os.environ[_ROOT]}", split=split, preprocess=preprocess)
    wanted = int(os.environ[_COUNT]) * (1 if split == "val" else 9) // 10
    return whole.subset(torch.linspace(0, len(whole) - 1, wanted).round().long())


def _batch_size(batch_images: int) -> int:
    """Batch size of ``psc-fit`` on a CPU."""
    return Compute(torch.device("cpu"), batch_images=batch_images).batch_size


def forward(network: str, weights: Path, batch_images: int) -> float:
    """Seconds of one pass of the whole network over the training images."""
    train = images("train", PRESETS["cifar10"])
    spec = f"benchmarks.networks:{network}"
    net = load_network(spec, weights=weights, num_classes=len(train.classes))
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in train.batches(_batch_size(batch_images)):
            net(train.preprocess.standardise(batch.images))
    return time.perf_counter() - began


def run(command: Sequence[str], variables: Mapping[str, str], on_line: Callable[[str, int], None]) -> dict[str, Any]:
    """Run ``command`` to its end.

    Args:
        command: Program and arguments.
        variables: Added to this process's environment.
        on_line: Called with each line of stderr and the highest resident memory (KiB) since the last.

    Returns:
        ``wall_s``, ``peak_rss_mib`` and ``stdout``.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as stdout:
        child = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        highest, ended = [0], threading.Event()

        def sample() -> None:
            while not ended.wait(0.1):
                highest[0] = max(highest[0], _resident_kib(child.pid))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        lines = []
        for line in child.stderr or ():
            lines.append(line.rstrip())
            peak, highest[0] = highest[0], 0
            on_line(lines[-1], peak)
        ended.set()
        sampler.join()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit("\n".join([f"{' '.join(command[:4])} … ended with {child.returncode}", *lines[-20:]]))
        stdout.seek(0)
        return {
            "wall_s": round(time.perf_counter() - began, 1),
            "peak_rss_mib": round(usage.ru_maxrss / 1024),
            "stdout": stdout.read(),
        }


def _resident_kib(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize() // 1024


def measure(args: argparse.Namespace, count: int, weights: Path, out: Path) -> dict[str, Any]:
    """One fit and one forward pass over ``count`` images."""
    variables = {_ROOT: str(args.data.resolve()), _COUNT: str(count)}
    passes: list[dict[str, Any]] = []

    def on_line(line: str, peak_kib: int) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)
        found = _PASS.match(line)
        if found and found["done"] == found["total"]:
            passes.append(
                {
                    "pass": found["what"],
                    "batches": int(found["total"]),
                    "seconds": int(found["seconds"]),
                    "peak_rss_mib": round(peak_kib / 1024),
                }
            )

    spec = "benchmarks.fit.memory:images"
    fitted = run(
        [
            sys.executable,
            "-m",
            "psc_core.cli.fit",
            "--model",
            f"benchmarks.networks:{args.network}",
            "--weights",
            str(weights),
            "--preset",
            "cifar10",
            "--train",
            spec,
            "--val",
            spec,
            "--device",
            "cpu",
            "--batch-images",
            str(args.batch_images),
            "--out",
            str(out / "bundle"),
            "--name",
            "fit-memory",
            "--fresh",
        ],
        variables,
        on_line,
    )
    print(fitted["stdout"], file=sys.stderr)
    bare = run(
        [
            sys.executable,
            "-m",
            "benchmarks.fit.memory",
            "--forward",
            str(weights),
            "--network",
            args.network,
            "--batch-images",
            str(args.batch_images),
        ],
        variables,
        lambda *_: None,
    )
    train = count * 9 // 10
    full = -(-train // _batch_size(args.batch_images))
    manifest = json.loads((out / "bundle" / "manifest.json").read_text())
    return {
        "images": count,
        "train_images": train,
        "peak_rss_mib": fitted["peak_rss_mib"],
        "highest_during": max(passes, key=lambda entry: entry["peak_rss_mib"])["pass"],
        "wall_s": fitted["wall_s"],
        "forward_s": round(float(bare["stdout"].split()[-1]), 1),
        "forward_peak_rss_mib": bare["peak_rss_mib"],
        "training_passes": sum(entry["batches"] == full for entry in passes),
        "layers": manifest["layers"],
        "projection": manifest["projection"],
        "passes": passes,
    }


def table(report: Mapping[str, Any]) -> str:
    """The report as a section of ``benchmarks/results/fitting.md``."""
    lines = [
        f"{where(report['environment'])}; "
        f"{report['network']} with {report['weights']} weights, batches of {_batch_size(report['batch_images'])}.",
        *([report["note"]] if report["note"] else []),
        "",
        f"    {report['command']}",
        "",
        "| train + val images | peak memory | highest during | fit | one bare forward pass | training passes |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {run['train_images']:,} + {run['images'] - run['train_images']:,} | {run['peak_rss_mib']:,} MiB | "
        f"{run['highest_during']} | {run['wall_s']:.0f} s | {run['forward_s']:.0f} s | {run['training_passes']} |"
        for run in report["runs"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--data", type=Path, metavar="ROOT", help="where cifar10-jpeg.tar.gz is")
    cli.add_argument("--images", type=int, nargs="+", default=[5_000, 50_000], help="images to fit on")
    cli.add_argument("--network", choices=sorted(NETWORKS), default="wide_resnet16_2")
    cli.add_argument("--weights", type=Path, metavar="FILE", help="its state dict; random when left out")
    cli.add_argument("--batch-images", type=int, default=256)
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    cli.add_argument("--forward", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.forward:
        print(forward(args.network, args.forward, args.batch_images))
        return
    if args.data is None:
        cli.error("--data is required")
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        weights = args.weights or Path(scratch) / "net.safetensors"
        if not args.weights:
            torch.manual_seed(0)
            save_file(NETWORKS[args.network](10, 3).state_dict(), weights)
        counts = " ".join(map(str, args.images))
        report = {
            "command": f"python -m benchmarks.fit.memory --data ROOT --images {counts}"
            + (" --weights FILE" if args.weights else ""),
            "environment": environment(torch.device("cpu")),
            "network": args.network,
            "weights": "trained" if args.weights else "random",
            "batch_images": args.batch_images,
            "note": args.note,
            "limit_mib": LIMIT_MIB,
            "runs": [measure(args, count, weights, Path(scratch) / str(count)) for count in args.images],
        }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fit-memory.json").write_text(json.dumps(report, indent=2) + "\n")
    write_section(RESULTS / "fitting.md", "fit-memory", table(report), "Memory")
    print(table(report))
    above = [run["images"] for run in report["runs"] if run["peak_rss_mib"] >= LIMIT_MIB]
    if above:
        raise SystemExit(f"peak memory reached {LIMIT_MIB} MiB or more for {above} images")


if __name__ == "__main__":
    main()
