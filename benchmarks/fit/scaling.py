"""Time and memory of a fit against the number of images, layers and classes, on the CPU.

    python -m benchmarks.fit.scaling --images 1000 10000 100000 1000000
    python -m benchmarks.fit.scaling --report

Each fit is a process of its own with one thread: a small convolutional network with random weights on 28-pixel images,
a thousand of which are repeated; 2,000 validation images; the default density and head.  The same process also
measures one bare forward pass of the whole network over the same training images,
reading included, in batches of the same size.  Times are CPU seconds of the process, which other work on the machine
hardly changes; wall times are in ``benchmarks/results/fit-scaling.json``.  Memory is the highest resident set of the
process; the scratch file of z is read and written, not mapped, so it is no part of it.  ``--report`` writes the results
into ``benchmarks/results/fitting.md``.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.fit.memory import run
from benchmarks.runs import RESULTS, environment, where, write_section
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset, labelled
from psc_core.data.sources import ArraySource
from psc_core.fitting.options import FitOptions
from psc_core.fitting.stages import fit_projection, fit_psc, measure_collapse
from psc_core.images.preprocess import PRESETS

FILE = RESULTS / "fit-scaling.json"
TARGET = 3 * 1.2
"""Maximum of fit ÷ bare forward for each training pass."""
TRAINING_PASSES = 4
"""Collapse, moments, sizes, features; counted in ``tests/psc_core/fitting/across/test_counts.py``."""
MAXIMUM_GROWTH = 100
"""Maximum growth of the peak, bytes an image."""
DISTINCT = 1000
LAYER = 4
SHORT = 10_000
"""Maximum number of images of fits that are repeated and also run with other networks."""


def network(layers: int, classes: int) -> nn.Module:
    """``layers`` convolutions; the first two halve the image."""
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
    """CPU seconds of every stage and of one bare pass, and the peak of this process's resident memory (MiB)."""
    torch.set_num_threads(1)
    options = FitOptions(device="cpu")
    net, train, val = network(layers, classes), repeated(images, classes, 0), repeated(2000, classes, 1)
    batch = Compute(torch.device("cpu"), batch_images=options.batch_images).batch_size

    def bare() -> float:
        began = time.process_time()
        with torch.inference_mode():
            for part in train.batches(batch):
                net(train.preprocess.standardise(part.images))
        return time.process_time() - began

    forward = [bare()]
    wall = time.perf_counter()
    times = [time.process_time()]
    report = measure_collapse(net, train, val, options=options)
    times.append(time.process_time())
    candidate = report.candidate(str(LAYER))
    projection = fit_projection(net, candidate, train, val, options=options)
    times.append(time.process_time())
    fit_psc(net, candidate, projection, train, val, options=options)
    times.append(time.process_time())
    wall = time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    forward.append(bare())
    stages = dict(zip(("collapse", "projection", "psc"), np.diff(times).round(2).tolist(), strict=True))
    return {
        "images": images,
        "layers": layers,
        "classes": classes,
        "stages_cpu_s": stages,
        "fit_cpu_s": round(times[-1] - times[0], 2),
        "fit_wall_s": round(wall, 1),
        "forward_cpu_s": [round(seconds, 2) for seconds in forward],
        "peak_rss_mib": round(peak),
    }


def measure(cases: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """:func:`one` of every case, each in a process of its own."""
    for case in cases:
        child = [sys.executable, "-W", "ignore", "-m", "benchmarks.fit.scaling", "--one", *map(str, case)]
        yield json.loads(run(child, {}, lambda *_: None)["stdout"].splitlines()[-1])


@dataclass(frozen=True)
class Row:
    """The repeats of one case: minimum times and maximum memory.

    Attributes:
        images: Training images.
        layers: Convolutions of the network.
        classes: K.
        fit: Minimum CPU seconds of the fit.
        slowest: Maximum CPU seconds of the fit.
        bare: Minimum CPU seconds of one bare pass.
        peak: Maximum resident memory, MiB.
    """

    images: int
    layers: int
    classes: int
    fit: float
    slowest: float
    bare: float
    peak: int

    @classmethod
    def of(cls, case: tuple[int, int, int], runs: Sequence[Mapping[str, Any]]) -> Row:
        """From the runs of one case."""
        fits = [entry["fit_cpu_s"] for entry in runs]
        bare = min(min(entry["forward_cpu_s"]) for entry in runs)
        return cls(*case, min(fits), max(fits), bare, max(entry["peak_rss_mib"] for entry in runs))


def rows_of(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[Row]]:
    """Rows of each (layers, classes), by images."""
    cases: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
    for entry in runs:
        cases.setdefault((entry["images"], entry["layers"], entry["classes"]), []).append(entry)
    groups: dict[tuple[int, int], list[Row]] = {}
    for case in sorted(cases):
        groups.setdefault(case[1:], []).append(Row.of(case, cases[case]))
    return groups


def table(report: Mapping[str, Any]) -> str:
    """The results as a section of ``benchmarks/results/fitting.md``."""
    groups = rows_of(report["runs"])
    lines = [
        f"{where(report['environment'])}.",
        *([report["note"]] if report["note"] else []),
        "",
        f"    {report['command']}",
        "",
        "CPU seconds of one process: minimum (maximum) of the repeats.",
        "",
        "| images | layers | classes | peak memory | fit | one bare forward pass | fit ÷ bare | a training pass |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in (row for group in groups.values() for row in group):
        spread = f" ({row.slowest:.1f})" if row.slowest > row.fit else ""
        lines.append(
            f"| {row.images:,} | {row.layers} | {row.classes} | {row.peak:,} MiB | {row.fit:.1f} s{spread} | "
            f"{row.bare:.2f} s | {row.fit / row.bare:.1f} | {row.fit / row.bare / TRAINING_PASSES:.2f} |"
        )
    lines += [
        "",
        "Fixed cost and cost of 1,000 more images, from the smallest and the largest fit of each network:",
        "",
        "| layers | classes | fixed | 1,000 more images | in bare passes, a training pass |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for (layers, classes), group in groups.items():
        first, last = group[0], group[-1]
        if first is not last:
            more = last.images - first.images
            slope, bare = (last.fit - first.fit) / more, (last.bare - first.bare) / more
            lines.append(
                f"| {layers} | {classes} | {first.fit - slope * first.images:.1f} s | {1000 * slope:.3f} s | "
                f"{slope / bare / TRAINING_PASSES:.2f} |"
            )
    by_images = groups[LAYER, 10]
    smallest, largest = by_images[0], by_images[-1]
    passes = largest.fit / largest.bare / TRAINING_PASSES
    growth = (largest.peak - smallest.peak) * 2**20 / max(1, largest.images - smallest.images)
    lines += [
        "",
        "| target | measured | met |",
        "| --- | --- | --- |",
        f"| fit ≤ {TARGET:.1f} bare forward passes for each of its {TRAINING_PASSES} training passes | "
        f"{passes:.2f} at {largest.images:,} images | {'yes' if passes <= TARGET else 'no'} |",
        f"| memory independent of the number of images: < {MAXIMUM_GROWTH} bytes an image, for labels and positions | "
        f"{growth:.0f} bytes an image from {smallest.images:,} to {largest.images:,} | "
        f"{'yes' if growth < MAXIMUM_GROWTH else 'no'} |",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write, or rewrite the section."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--images", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    cli.add_argument("--repeats", type=int, default=3, help=f"of every fit of at most {SHORT:,} images")
    cli.add_argument("--add", action="store_true", help="keep the runs of the JSON file, measure what it lacks")
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    cli.add_argument("--report", action="store_true", help="write the section from the JSON file, measure nothing")
    cli.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    if not args.report:
        counts = sorted(args.images)
        cases = [
            (n, *network)
            for network in ((LAYER, 10), (16, 10), (LAYER, 100), (LAYER, 1000))
            for n in counts
            if 10 * network[1] <= n <= SHORT or network == (LAYER, 10)
        ]
        cases = sorted(cases * args.repeats)
        cases = [case for i, case in enumerate(cases) if case[0] <= SHORT or case not in cases[:i]]
        report: dict[str, Any] = {
            "command": f"python -m benchmarks.fit.scaling --images {' '.join(map(str, args.images))}",
            "environment": environment(torch.device("cpu")),
            "note": args.note,
            "runs": json.loads(FILE.read_text())["runs"] if args.add else [],
        }
        for entry in report["runs"]:
            if (case := (entry["images"], entry["layers"], entry["classes"])) in cases:
                cases.remove(case)
        for entry in measure(cases):
            print(entry, file=sys.stderr, flush=True)
            report["runs"].append(entry)
            FILE.write_text(json.dumps(report, indent=2) + "\n")
        print(table(report))
        return
    text = table(json.loads(FILE.read_text()))
    write_section(RESULTS / "fitting.md", "fit-scaling", text, "Time and memory by number of images")


if __name__ == "__main__":
    main()
