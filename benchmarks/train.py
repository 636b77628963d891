"""Train a network of :mod:`benchmarks.networks`; the checkpoint is a safetensors state dict.

    python -m benchmarks.train --network resnet18 --data dirty-mnist:ROOT --epochs 4 --out net.safetensors

``--schedule ddu`` is the recipe of the paper (SGD 0.1, momentum 0.9, weight decay 5e-4 of every parameter, × 0.1 at
150/350 and 250/350 of the epochs); ``one-cycle`` (default) reaches the same regime in a few epochs, and ``adamw`` is
the same cycle for transformers, with AdamW.  One epoch visits every labelled example once.  Images of CIFAR-10 are
cropped and flipped at random.  An interrupted run continues from its last finished epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import NETWORKS, bound_spectral_norm, fold_spectral_norm
from benchmarks.runs import plain_parser
from benchmarks.strips import preprocess_of
from psc_core.compute import resolve_device, track
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS, Preprocess

SCHEDULES: Mapping[str, float] = {"one-cycle": 0.1, "ddu": 0.1, "adamw": 2e-3}  # The peak of each.


@dataclass(frozen=True)
class Job:
    network: str  # The name in :data:`benchmarks.networks.NETWORKS`.
    data: str  # A built-in data set, or a factory of :mod:`benchmarks.data`.
    epochs: int  # An epoch visits every labelled example once.
    seed: int = 0  # The seed of the initialisation and of the order of examples.
    spectral_norm: float = 0.0  # The bound on spectral norms; 0 for none.
    batch: int = 128  # The number of labelled examples in a training step.
    schedule: str = "one-cycle"  # One of SCHEDULES.

    @property
    def preprocess(self) -> Preprocess:
        return PRESETS["cifar10"] if "cifar10" in self.data else preprocess_of(self.data)

    @property
    def augment(self) -> bool:
        """Whether training crops and flips images; not if the network is to memorise them."""
        return "cifar10" in self.data and "_few_" not in self.data

    @property
    def name(self) -> str:
        bound = f"-sn{self.spectral_norm:g}" if self.spectral_norm else ""
        data = self.data.rpartition(":")[2].replace("_", "-")
        schedule = "" if self.schedule == "one-cycle" else f"-{self.schedule}"
        return f"{self.network}-{data}{bound}-e{self.epochs}-b{self.batch}{schedule}-s{self.seed}"

    def describe(self) -> str:
        bound = f", spectral norm ≤ {self.spectral_norm:g}" if self.spectral_norm else ""
        schedule = "" if self.schedule == "one-cycle" else f", schedule {self.schedule}"
        return f"{self.network}{bound}, {self.epochs} epochs, batch {self.batch}{schedule}, seed {self.seed}"


def check_images(file: Path, kept: Mapping[str, object], data: ImageDataset) -> None:
    """Raise if what is kept of the training of the network in ``file`` does not name the images of ``data``."""
    if kept.get("train_digest") != data.digest():
        raise DataError(
            f"{file} is of other training images than {data.name}, or does not say of which; name another folder of "
            "trained networks (--checkpoints), or remove this file"
        )


def is_trained(weights: Path, data: ImageDataset) -> bool:
    """Whether the network is there; an error if it was trained on other images."""
    if weights.exists():
        summary = weights.with_suffix(".json")
        check_images(weights, json.loads(summary.read_text()) if summary.exists() else {}, data)
    return weights.exists()


def save_trained(net: nn.Module, weights: Path, summary: dict[str, object]) -> None:
    """Write a network and, beside it, what :func:`check_images` reads: a summary with the digest of its images."""
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.with_suffix(".json").write_text(json.dumps(summary, indent=2) + "\n")
    save_file({name: value.contiguous().cpu() for name, value in net.state_dict().items()}, weights)


def load_images(dataset: ImageDataset) -> Tensor:
    """Return all images of a small data set, ``uint8 (n, channels, height, width)``."""
    return torch.cat([batch.images for batch in dataset.batches(4096)])


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop each image at random, with 4 pixels of zero padding, and flip it at random."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, batch), generator=generator).to(images.device)
    flip = torch.randint(0, 2, (batch,), generator=generator).to(images.device).bool()
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    index = torch.arange(batch, device=images.device)[:, None, None]
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def learning_rate(schedule: str, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of one step: the paper's step schedule, or one linear cycle."""
    position = step / max(1, steps)
    if schedule == "ddu":
        return peak * (1.0 if position < 150 / 350 else 0.1 if position < 250 / 350 else 0.01)
    return peak * (position / 0.3 if position < 0.3 else max(0.001, (1 - position) / 0.7))


def optimizer_of(net: nn.Module, schedule: str, lr: float) -> torch.optim.Optimizer:
    """SGD decays every parameter (``ddu``), or only weights, with Nesterov's momentum; AdamW decays only weights."""
    paper, adamw = schedule == "ddu", schedule == "adamw"
    decay, plain = ([p for p in net.parameters() if (paper or p.ndim > 1) == decayed] for decayed in (True, False))
    groups = [{"params": decay, "weight_decay": 0.05 if adamw else 5e-4}, {"params": plain, "weight_decay": 0.0}]
    if adamw:
        return torch.optim.AdamW(groups, lr=lr)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=not paper)


@torch.no_grad()
def correct(net: nn.Module, dataset: ImageDataset, device: torch.device) -> Tensor:
    """Return 1.0 for each image whose first label is predicted, else 0.0, (n,)."""
    net.eval()
    found = []
    for batch in dataset.batches(512):
        logits = net(dataset.preprocess.standardise(batch.images.to(device)))
        firsts = batch.labels[torch.searchsorted(batch.image_index, torch.arange(len(batch.images)))]
        found.append((logits.argmax(1).cpu() == firsts).double())
    return torch.cat(found)


def train(
    job: Job, spec: str, out: Path, device: torch.device, *, lr: float | None = None, precision: str = ""
) -> dict[str, object]:
    """Train, write checkpoint and summary, and return the summary."""
    lr = SCHEDULES[job.schedule] if lr is None else lr
    precision = precision or ("bf16" if device.type == "cuda" else "fp32")
    torch.manual_seed(job.seed)
    generator = torch.Generator().manual_seed(job.seed)
    preprocess = job.preprocess
    data, test = (open_dataset(spec, split=split, preprocess=preprocess) for split in ("train", "test"))
    images = load_images(data).to(device)
    counts = data.offsets[1:] - data.offsets[:-1]
    image_index = torch.arange(len(data)).repeat_interleave(counts)

    net = NETWORKS[job.network](len(data.classes), preprocess.channels)
    if job.spectral_norm:
        bound_spectral_norm(net, job.spectral_norm, torch.zeros(1, *preprocess.shape))
    net = net.to(device).to(memory_format=torch.channels_last)
    optimizer = optimizer_of(net, job.schedule, lr)
    step_model: nn.Module = torch.compile(net) if device.type == "cuda" else net  # type: ignore[assignment]
    per_epoch = -(-data.examples // job.batch)
    steps = job.epochs * per_epoch
    out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = out.with_suffix(".partial.pt")
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        check_images(checkpoint, saved, data)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"].cpu())
        start = saved["epoch"]
    began, digest = time.perf_counter(), data.digest()
    for epoch in range(start, job.epochs):
        net.train()
        order = torch.randperm(data.examples, generator=generator)
        total = torch.zeros((), device=device)
        for batch in track(range(per_epoch), total=per_epoch, description=f"epoch {epoch + 1}/{job.epochs}"):
            chosen = order[batch * job.batch : (batch + 1) * job.batch]
            picked = images[image_index[chosen].to(device)]
            if job.augment:
                picked = augment(picked, generator)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(job.schedule, lr, epoch * per_epoch + batch, steps)
            inputs = preprocess.standardise(picked).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = step_model(inputs)
            loss = F.cross_entropy(logits.float(), data.labels[chosen].to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(
            f"epoch {epoch + 1}: loss {float(total) / per_epoch:.4f}, {time.perf_counter() - began:.0f} s", flush=True
        )
        torch.save(
            {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": generator.get_state(),
                "epoch": epoch + 1,
                "train_digest": digest,
            },
            checkpoint,
        )

    fold_spectral_norm(net)
    hits = correct(net, test, device)
    summary: dict[str, object] = {
        **asdict(job),
        "lr": lr,
        "augment": job.augment,
        "precision": precision,
        "train_digest": digest,
        "test_accuracy": float(hits.mean()),
        "test_accuracy_by_group": {name: float(hits[where].mean()) for name, where in test.groups.items()},
        "seconds": round(time.perf_counter() - began),
        "torch": torch.__version__,
        "device": device.type,
    }
    save_trained(net, out, summary)
    checkpoint.unlink(missing_ok=True)
    print(json.dumps(summary, indent=2))
    return summary


def main(argv: Sequence[str] | None = None) -> None:
    cli = plain_parser(__doc__)
    cli.add_argument("--network", choices=sorted(NETWORKS), required=True)
    cli.add_argument("--data", required=True, help="data set, as psc-fit --train takes it")
    cli.add_argument("--out", type=Path, required=True, help="checkpoint to write (.safetensors)")
    cli.add_argument("--epochs", type=int, default=350)
    cli.add_argument("--batch", type=int, default=Job.batch)
    cli.add_argument("--schedule", choices=SCHEDULES, default=Job.schedule)
    cli.add_argument("--spectral-norm", type=float, default=0.0, help="bound (the paper: 3.0); 0 is none")
    cli.add_argument("--device", default="auto")
    cli.add_argument("--precision", choices=("fp32", "bf16"), default="", help="bf16 on CUDA, else fp32")
    cli.add_argument("--seed", type=int, default=0)
    args = cli.parse_args(argv)
    data = args.data if args.data.startswith("benchmarks.") else args.data.partition(":")[0]
    job = Job(args.network, data, args.epochs, args.seed, args.spectral_norm, args.batch, args.schedule)
    train(job, args.data, args.out, resolve_device(args.device), precision=args.precision)


if __name__ == "__main__":
    main()
