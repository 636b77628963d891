"""Trained networks, shared by all scripts.

    python -m benchmarks.checkpoints --network resnet18 --training-data dirty-mnist --scale full --data ROOT

The file name describes network, data and training; :mod:`benchmarks.train` writes a summary beside it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from benchmarks import runs, train
from benchmarks.networks import NETWORKS
from benchmarks.runs import Run
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.load import load_weights, read_tensors

SPECTRAL_NORM = 3.0
"""The paper's bound."""


@dataclass(frozen=True)
class Job:
    """One network to train.

    Attributes:
        network: Name in :data:`benchmarks.networks.NETWORKS`.
        data: Built-in data set or factory of :mod:`benchmarks.data`.
        epochs: Each visits every labelled example once.
        seed: Of initialisation and order of the examples.
        spectral_norm: Bound, 0 for none.
        batch: Labelled examples in a training step.
        schedule: ``"one-cycle"`` or ``"ddu"``, see :mod:`benchmarks.train`.
    """

    network: str
    data: str
    epochs: int
    seed: int = 0
    spectral_norm: float = 0.0
    batch: int = 128
    schedule: str = "one-cycle"

    @property
    def preset(self) -> Preprocess:
        """Preprocessing of the data."""
        return PRESETS["cifar10" if "cifar10" in self.data else "mnist"]

    @property
    def augment(self) -> bool:
        """Whether training crops and flips images; not where the network is to memorise them."""
        return "cifar10" in self.data and "_few_" not in self.data

    @property
    def name(self) -> str:
        """File name without suffix."""
        bound = f"-sn{self.spectral_norm:g}" if self.spectral_norm else ""
        data = self.data.rpartition(":")[2].replace("_", "-")
        schedule = "" if self.schedule == "one-cycle" else f"-{self.schedule}"
        return f"{self.network}-{data}{bound}-e{self.epochs}-b{self.batch}{schedule}-s{self.seed}"

    def describe(self) -> str:
        """Text for tables."""
        bound = f", spectral norm ≤ {self.spectral_norm:g}" if self.spectral_norm else ""
        schedule = "" if self.schedule == "one-cycle" else f", schedule {self.schedule}"
        return f"{self.network}{bound}, {self.epochs} epochs, batch {self.batch}{schedule}, seed {self.seed}"


@dataclass(frozen=True)
class Trained:
    """A trained network with the data it was trained on.

    Attributes:
        job: The training job.
        name: Of the checkpoint.
        net: In eval mode, on the run's device.
        train: Training images.
        val: Validation images.
        test: Test images.
    """

    job: Job
    name: str
    net: nn.Module
    train: ImageDataset
    val: ImageDataset
    test: ImageDataset


def obtain(run: Run, job: Job, *, file: Path | None = None) -> Trained:
    """Load the network, trained first if there is no checkpoint, and open its data.

    Args:
        run: Gives folders, device and, with ``--epochs``, the epochs.
        job: What to train.
        file: A checkpoint to use instead of training.
    """
    job = replace(job, epochs=run.epochs or job.epochs)
    weights = file or run.checkpoints / f"{job.name}.safetensors"
    if not weights.exists():
        print(f"training {job.describe()} on {job.data}", flush=True)
        train.train(_arguments(run, job, weights))
    opened = {
        split: open_dataset(run.spec(job.data), split=split, preprocess=job.preset)
        for split in ("train", "val", "test")
    }
    classes = len(opened["train"].classes)
    net = NETWORKS[job.network](classes, job.preset.channels)
    load_weights(net, read_tensors(weights), num_classes=classes, origin=weights.name)
    return Trained(job, weights.stem, net.eval().to(run.device), **opened)


def _arguments(run: Run, job: Job, out: Path) -> argparse.Namespace:
    preset = next(name for name, preprocess in PRESETS.items() if preprocess == job.preset)
    words = [
        "--network",
        job.network,
        "--data",
        run.spec(job.data),
        "--preset",
        preset,
        "--out",
        str(out),
        "--epochs",
        str(job.epochs),
        "--batch",
        str(job.batch),
        "--seed",
        str(job.seed),
        "--spectral-norm",
        str(job.spectral_norm),
        "--schedule",
        job.schedule,
        "--device",
        str(run.device),
    ]
    words += ["--augment"] if job.augment else []
    words += ["--compile"] if run.device.type == "cuda" else []
    return train.parser().parse_args(words)


def main() -> None:
    """Train one network before the scripts that use it."""
    cli = runs.parser(__doc__)
    cli.add_argument("--network", choices=sorted(NETWORKS), required=True)
    cli.add_argument("--training-data", required=True, help="dirty-mnist, cifar10, benchmarks.data:cifar10_known_0, …")
    cli.add_argument("--spectral-norm", type=float, default=0.0)
    cli.add_argument("--batch", type=int, default=128)
    cli.add_argument("--schedule", choices=train.SCHEDULES, default="one-cycle")
    args = cli.parse_args()
    if args.epochs is None:
        cli.error("--epochs is required")
    run = runs.start("checkpoints", args)
    job = Job(args.network, args.training_data, args.epochs, args.seed, args.spectral_norm, args.batch, args.schedule)
    obtain(run, job)


if __name__ == "__main__":
    main()
