"""Time and memory of a fit against the number of images, layers and classes, on the CPU.

    python -m benchmarks.fit.scaling --images 1000 10000 100000 1000000
    python -m benchmarks.fit.scaling --report

Each fit is a process of its own: a small convolutional network with random weights on 28-pixel images, a thousand
of which are repeated as often as asked; 2,000 validation images.  Beside each fit, in the same process: one bare
forward pass of the whole network over the same training images, reading included, in batches of the same size.  The
head is ``duq``, whose fit is a few passes over z; the default head's iterations are measured by
``benchmarks.fit.memory`` on real data.  Results go to ``benchmarks/results/fit-scaling.json``; ``--report`` writes them
into ``benchmarks/results/README.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.fit.memory import run
from benchmarks.runs import RESULTS, environment, where, write_section
from psc_core.data import ImageDataset, labelled
from psc_core.fit import FitOptions, fit_projection, fit_psc, measure_collapse
from psc_core.passes import Compute
from psc_core.preprocess import PRESETS
from psc_core.sources import ArraySource

FILE = RESULTS / "fit-scaling.json"
TARGET = 3 * 1.2
"""Fit over bare forward, for each training pass: three times and 20 %."""
TRAINING_PASSES = 4
"""Collapse, moments, sizes, features; counted in ``tests/psc_core/test_fit_counts.py``."""
DISTINCT = 1000
LAYER = 4


def network(layers: int, classes: int) -> nn.Module:
    """``layers`` convolutions: two that halve the image, the others as wide."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for i in range(layers):
        blocks += [nn.Conv2d(1 if i == 0 else 16, 16, 3, stride=2 if i < 2 else 1, padding=1), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)).eval()


def repeated(images: int, classes: int, seed: int) -> ImageDataset:
    """``images`` of noise with a class-dependent corner, at most :data:`DISTINCT` of them different (one a class)."""
    distinct = min(images, max(DISTINCT, 2 * classes))
    labels = torch.arange(distinct) % classes
    pixels = np.random.default_rng(seed).integers(0, 128, (distinct, 28, 28), dtype=np.uint8)
    pixels[:, :14, :14] += (labels.numpy()[:, None, None] * 127 // classes).astype(np.uint8)
    once = labelled("repeated", [str(c) for c in range(classes)], ArraySource(pixels), labels, PRESETS["mnist"])
    at = torch.arange(images) % distinct
    return replace(once, indices=at, labels=labels[at], offsets=torch.arange(images + 1))


def one(images: int, layers: int, classes: int) -> dict[str, Any]:
    """Seconds of every station and of one bare pass, and the peak of this process's resident memory (MiB)."""
    options = FitOptions(device="cpu")
    net, train, val = network(layers, classes), repeated(images, classes, 0), repeated(2000, classes, 1)
    batch = Compute(torch.device("cpu"), batch_images=options.batch_images).images

    def bare() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            for part in train.batches(batch):
                net(train.preprocess.normalise(part.images))
        return time.perf_counter() - began

    forward = [bare()]
    times = [time.perf_counter()]
    report = measure_collapse(net, train, val, options=options)
    times.append(time.perf_counter())
    candidate = report.candidate(str(LAYER))
    projection = fit_projection(net, candidate, train, val, options=options)
    times.append(time.perf_counter())
    fit_psc(net, candidate, projection, train, val, head="duq", options=options)
    times.append(time.perf_counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    forward.append(bare())
    stations = dict(zip(("collapse", "projection", "psc"), np.diff(times).round(2).tolist(), strict=True))
    return {
        "images": images,
        "layers": layers,
        "classes": classes,
        "stations_s": stations,
        "fit_s": round(times[-1] - times[0], 2),
        "forward_s": [round(seconds, 2) for seconds in forward],
        "peak_rss_mib": round(peak),
    }


def measure(cases: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """:func:`one` of every case, each in a process of its own."""
    runs = []
    for case in cases:
        child = [sys.executable, "-W", "ignore", "-m", "benchmarks.fit.scaling", "--one", *map(str, case)]
        runs.append(json.loads(run(child, {}, lambda *_: None)["stdout"].splitlines()[-1]))
        print(runs[-1], file=sys.stderr, flush=True)
    return runs


def table(report: Mapping[str, Any]) -> str:
    """The results as a section of ``benchmarks/results/README.md``."""
    runs = report["runs"]
    lines = [
        f"{where(report['environment'])}.",
        *([report["note"]] if report["note"] else []),
        "",
        f"    {report['command']}",
        "",
        "| images | layers | classes | peak memory | fit | one bare forward pass | fit ÷ bare | a training pass |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in runs:
        bare = min(entry["forward_s"])
        ratio = entry["fit_s"] / bare
        lines.append(
            f"| {entry['images']:,} | {entry['layers']} | {entry['classes']} | {entry['peak_rss_mib']:,} MiB | "
            f"{entry['fit_s']:.1f} s | {bare:.2f} s | {ratio:.1f} | {ratio / TRAINING_PASSES:.2f} |"
        )
    by_images = sorted((e for e in runs if (e["layers"], e["classes"]) == (4, 10)), key=lambda e: e["images"])
    least, most = by_images[0], by_images[-1]
    share = most["fit_s"] / min(most["forward_s"]) / TRAINING_PASSES
    growth = (most["peak_rss_mib"] - least["peak_rss_mib"]) * 2**20 / max(1, most["images"] - least["images"])
    lines += [
        "",
        "| target | measured | met |",
        "| --- | --- | --- |",
        f"| fit ≤ {TARGET:.1f} bare forward passes for each of its {TRAINING_PASSES} training passes | "
        f"{share:.2f} at {most['images']:,} images | {'yes' if share <= TARGET else 'no'} |",
        f"| memory independent of the number of images | {growth:.0f} bytes an image from {least['images']:,} to "
        f"{most['images']:,} | {'yes' if growth < 100 else 'no'} |",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write, or rewrite the section."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--images", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    cli.add_argument("--report", action="store_true", help="write the section from the JSON file, measure nothing")
    cli.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    if not args.report:
        counts = sorted(args.images)
        others = counts[min(1, len(counts) - 1)]
        cases = [(n, 4, 10) for n in counts] + [(others, 16, 10), (others, 4, 100), (others, 4, 1000)]
        report = {
            "command": f"python -m benchmarks.fit.scaling --images {' '.join(map(str, args.images))}",
            "environment": environment(torch.device("cpu")),
            "note": args.note,
            "runs": measure(cases),
        }
        FILE.write_text(json.dumps(report, indent=2) + "\n")
        print(table(report))
        return
    write_section(RESULTS, "fit-scaling", table(json.loads(FILE.read_text())), "Time and memory of fitting")


if __name__ == "__main__":
    main()
