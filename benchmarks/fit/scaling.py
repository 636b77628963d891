"""Measure the time and memory of a fit against the number of images, layers and classes, on the CPU.

    python -m benchmarks.fit.scaling --images 1000 10000 100000 1000000

Each fit is a process of its own with one thread: a small convolutional network with random weights on 28-pixel images,
a thousand of which are repeated; 2,000 validation images; the default density and head.  The same process also measures
one bare forward pass of the whole network over the same training images, reading included, in batches of the same size.
Times are CPU seconds of the process, which other work on the machine hardly changes.  Memory is the process's peak
resident set; it does not include the scratch file of z, which is read and written but not mapped.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks import runs
from benchmarks.data import repeated
from benchmarks.instruction_sets import in_fresh_process
from benchmarks.runs import RESULTS, Json
from psc_core import FitSettings, fit_projection, fit_psc, measure_collapse
from psc_core.compute import Compute
from psc_core.data.dataset import ArraySource, ImageDataset, labelled
from psc_core.images.preprocess import PRESETS

NAME = "fit-scaling"
NETWORKS = ((4, 10), (16, 10), (4, 100), (4, 1000))
"""The pairs (layers, classes); large numbers of images are fitted with the first pair alone."""
LAYER = 4
TRAINING_PASSES = 4
"""The passes of a fit: collapse, moments, sizes, features; see ``tests/psc_core/fitting/across/test_counts.py``."""
DISTINCT = 1000
SHORT = 10_000
"""The maximum number of images of fits that are repeated and also run with other networks."""


def network(layers: int, classes: int) -> nn.Module:
    """Return a network of ``layers`` convolutions, of which the first two halve the image."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for i in range(layers):
        blocks += [nn.Conv2d(1 if i == 0 else 16, 16, 3, stride=2 if i < 2 else 1, padding=1), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes)).eval()


def noise(images: int, classes: int, seed: int) -> ImageDataset:
    """Return ``images`` of noise with a class-dependent corner, of which at most :data:`DISTINCT` are different."""
    distinct = min(images, max(DISTINCT, 2 * classes))
    labels = torch.arange(distinct) % classes
    pixels = np.random.default_rng(seed).integers(0, 128, (distinct, 28, 28), dtype=np.uint8)
    pixels[:, :14, :14] += (labels.numpy()[:, None, None] * 127 // classes).astype(np.uint8)
    once = labelled("noise", [str(c) for c in range(classes)], ArraySource(pixels), labels, PRESETS["mnist"])
    return repeated(once, images)


def one(images: int, layers: int, classes: int) -> Json:
    """Return the CPU seconds of a fit and of two bare passes, and this process's peak resident memory (MiB)."""
    torch.set_num_threads(1)
    settings = FitSettings(device="cpu")
    net, train, val = network(layers, classes), noise(images, classes, 0), noise(2000, classes, 1)
    batch = Compute(torch.device("cpu"), batch_images=settings.batch_images).batch_size

    @torch.inference_mode()
    def bare() -> None:
        for part in train.batches(batch):
            net(train.preprocess.standardise(part.images))

    def cpu_s(work: Callable[[], None]) -> float:
        began = time.process_time()
        work()
        return round(time.process_time() - began, 2)

    def fit() -> None:
        candidate = measure_collapse(net, train, val, settings=settings).candidate(str(LAYER))
        projection = fit_projection(net, candidate, train, val, settings=settings)
        fit_psc(net, candidate, projection, train, val, settings=settings)

    before, fitted = cpu_s(bare), cpu_s(fit)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "images": images,
        "layers": layers,
        "classes": classes,
        "fit_cpu_s": fitted,
        "forward_cpu_s": [before, cpu_s(bare)],
        "peak_rss_mib": round(peak),
    }


def planned(images: list[int], repeats: int) -> list[tuple[int, int, int]]:
    """Return the images, layers and classes of every fit."""
    return [
        (count, *shape)
        for count in sorted(images)
        for shape in NETWORKS
        if shape == NETWORKS[0] or 10 * shape[1] <= count <= SHORT
        for _ in range(repeats if count <= SHORT else 1)
    ]


@dataclass(frozen=True)
class Fit:
    """The repeats of one fit: minimum times and maximum memory."""

    images: int  # The number of training images.
    seconds: float  # The minimum CPU seconds of the fit.
    slowest: float  # The maximum CPU seconds of the fit.
    bare: float  # The minimum CPU seconds of one bare pass.
    peak: int  # The maximum resident memory, MiB.

    @classmethod
    def of(cls, repeats: Sequence[Json]) -> Fit:
        """Combine the runs of one number of images with one network."""
        seconds = [run["fit_cpu_s"] for run in repeats]
        bare = min(min(run["forward_cpu_s"]) for run in repeats)
        return cls(repeats[0]["images"], min(seconds), max(seconds), bare, max(run["peak_rss_mib"] for run in repeats))

    def cells(self, layers: int, classes: int) -> list[str]:
        """Return the fit's row of the table."""
        spread = f" ({self.slowest:.1f})" if self.slowest > self.seconds else ""
        over = self.seconds / self.bare
        size = [f"{self.images:,}", str(layers), str(classes), f"{self.peak:,} MiB"]
        times = [f"{self.seconds:.1f} s{spread}", f"{self.bare:.2f} s"]
        return [*size, *times, f"{over:.1f}", f"{over / TRAINING_PASSES:.2f}"]


def growth(first: Fit, last: Fit) -> list[str]:
    """Return the fixed cost, that of 1,000 more images in seconds and in bare passes per pass, and bytes per image.

    Memory is given only for long fits, because buffers still fill up in short ones.
    """
    more = last.images - first.images
    each, bare = (last.seconds - first.seconds) / more, (last.bare - first.bare) / more
    fixed = first.seconds - each * first.images
    memory = f"{(last.peak - first.peak) * 2**20 / more:.0f} bytes" if last.images > SHORT else "—"
    return [f"{fixed:.1f} s", f"{1000 * each:.3f} s", f"{each / bare / TRAINING_PASSES:.2f}", memory]


def fragment(record: Json) -> str:
    """Return a table with a row for each fit, and the cost of more images."""
    rows, slopes = [], []
    for layers, classes in NETWORKS:
        runs_of = [run for run in record["runs"] if (run["layers"], run["classes"]) == (layers, classes)]
        counts = sorted({run["images"] for run in runs_of})
        fits = [Fit.of([run for run in runs_of if run["images"] == count]) for count in counts]
        rows += [fit.cells(layers, classes) for fit in fits]
        if len(fits) > 1:
            slopes.append([str(layers), str(classes), *growth(fits[0], fits[-1])])
    header = ["images", "layers", "classes", "peak memory", "fit", "one bare forward pass", "fit ÷ bare"]
    of_more = ["layers", "classes", "fixed", "1,000 more images", "in bare passes, a training pass", "memory an image"]
    return "\n\n".join(
        [
            runs.measured(record),
            runs.markdown_table([*header, "a training pass"], rows),
            runs.markdown_table(of_more, slopes),
        ]
    )


def main(argv: list[str] | None = None) -> None:
    """Measure every fit, write the results after each, and print them."""
    cli = runs.plain_parser(__doc__)
    cli.add_argument("--images", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    cli.add_argument("--repeats", type=int, default=3, help=f"of every fit of at most {SHORT:,} images")
    cli.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = cli.parse_args(argv)
    record = {**runs.origin(args, torch.device("cpu")), "runs": list[Json]()}
    for case in planned(args.images, args.repeats):
        record["runs"].append(in_fresh_process(one, *case))
        print(record["runs"][-1], flush=True)
        runs.write_json(args.out / f"{NAME}.json", record)
    print(fragment(record))


if __name__ == "__main__":
    main()
