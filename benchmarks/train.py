"""Train one of the paper's networks; the checkpoint is a safetensors state dict.

    python -m benchmarks.train --network resnet18 --data dirty-mnist:ROOT --preset mnist --out net.safetensors

``--schedule ddu`` is the recipe of the paper (SGD 0.1, momentum 0.9, weight decay 5e-4 of every parameter, × 0.1 at
150/350 and 250/350 of the epochs); ``one-cycle`` (default) reaches the same regime in a few epochs.  One epoch visits
every labelled example once.  An interrupted run continues from its last finished epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks import NETWORKS, bound_spectral_norm, fold_spectral_norm
from psc_core.compute.passes import track
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS

SCHEDULES = ("one-cycle", "ddu")
"""Of the learning rate."""


def load_images(dataset: ImageDataset) -> Tensor:
    """All images of a small data set, ``uint8 (n, channels, height, width)``."""
    return torch.cat([batch.images for batch in dataset.batches(4096)])


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random crop with 4 pixels of zero padding and random horizontal flip of each image."""
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
    """Learning rate of one step: the step schedule of the paper or one linear cycle."""
    position = step / max(1, steps)
    if schedule == "ddu":
        return peak * (1.0 if position < 150 / 350 else 0.1 if position < 250 / 350 else 0.01)
    return peak * (position / 0.3 if position < 0.3 else max(0.001, (1 - position) / 0.7))


@torch.no_grad()
def correct(net: nn.Module, dataset: ImageDataset, device: torch.device) -> Tensor:
    """1.0 for each image whose first label is predicted, else 0.0, (n,)."""
    net.eval()
    found = []
    for batch in dataset.batches(512):
        logits = net(dataset.preprocess.standardise(batch.images.to(device)))
        firsts = batch.labels[torch.searchsorted(batch.image_index, torch.arange(len(batch.images)))]
        found.append((logits.argmax(1).cpu() == firsts).double())
    return torch.cat(found)


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train, write checkpoint and summary, and return the summary."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    device = torch.device(
        "cuda"
        if args.device == "auto" and torch.cuda.is_available()
        else "cpu"
        if args.device == "auto"
        else args.device
    )
    preprocess = PRESETS[args.preset]
    data = open_dataset(args.data, split="train", preprocess=preprocess)
    test = open_dataset(args.data, split="test", preprocess=preprocess)
    images = load_images(data).to(device)
    counts = data.offsets[1:] - data.offsets[:-1]
    image_index = torch.arange(len(data)).repeat_interleave(counts)

    net = NETWORKS[args.network](len(data.classes), preprocess.channels)
    if args.spectral_norm:
        example = torch.zeros(1, preprocess.channels, preprocess.height, preprocess.width)
        bound_spectral_norm(net, args.spectral_norm, example)
    net = net.to(device).to(memory_format=torch.channels_last)
    decay = [p for p in net.parameters() if p.ndim > 1 or args.schedule == "ddu"]
    plain = [p for p in net.parameters() if p.ndim <= 1 and args.schedule != "ddu"]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        momentum=0.9,
        nesterov=args.schedule == "one-cycle",
    )
    step_model: nn.Module = torch.compile(net) if args.compile else net  # type: ignore[assignment]
    per_epoch = -(-data.examples // args.batch)
    steps = args.epochs * per_epoch
    args.out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out.with_suffix(".partial.pt")
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"].cpu())
        start = saved["epoch"]
    began = time.perf_counter()
    for epoch in range(start, args.epochs):
        net.train()
        order = torch.randperm(data.examples, generator=generator)
        total = torch.zeros((), device=device)
        for batch in track(range(per_epoch), total=per_epoch, description=f"epoch {epoch + 1}/{args.epochs}"):
            chosen = order[batch * args.batch : (batch + 1) * args.batch]
            picked = images[image_index[chosen].to(device)]
            if args.augment:
                picked = augment(picked, generator)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args.schedule, args.lr, epoch * per_epoch + batch, steps)
            inputs = preprocess.standardise(picked).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = step_model(inputs)
            loss = F.cross_entropy(logits.float(), data.labels[chosen].to(device), label_smoothing=args.smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
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
            },
            checkpoint,
        )

    fold_spectral_norm(net)
    hits = correct(net, test, device)
    summary: dict[str, object] = {
        "network": args.network,
        "data": args.data.partition(":")[0],
        "epochs": args.epochs,
        "batch": args.batch,
        "schedule": args.schedule,
        "lr": args.lr,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
        "spectral_norm": args.spectral_norm,
        "augment": args.augment,
        "precision": args.precision,
        "train_digest": data.digest(),
        "test_accuracy": float(hits.mean()),
        "test_accuracy_by_group": {name: float(hits[where].mean()) for name, where in test.groups.items()},
        "seconds": round(time.perf_counter() - began),
        "torch": torch.__version__,
        "device": device.type,
    }
    state = {k: v.contiguous().cpu() for k, v in net.state_dict().items()}
    save_file(state, args.out)
    args.out.with_suffix(".json").write_text(json.dumps(summary, indent=2) + "\n")
    checkpoint.unlink(missing_ok=True)
    print(json.dumps(summary, indent=2))
    return summary


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--network", choices=sorted(NETWORKS), required=True)
    cli.add_argument("--data", required=True, help="data set, as psc-fit --train takes it")
    cli.add_argument("--preset", choices=sorted(PRESETS), required=True)
    cli.add_argument("--out", type=Path, required=True, help="checkpoint to write (.safetensors)")
    cli.add_argument("--epochs", type=int, default=350)
    cli.add_argument("--batch", type=int, default=128)
    cli.add_argument("--schedule", choices=SCHEDULES, default="one-cycle")
    cli.add_argument("--lr", type=float, default=0.1)
    cli.add_argument("--weight-decay", type=float, default=5e-4)
    cli.add_argument("--smoothing", type=float, default=0.0, help="label smoothing")
    cli.add_argument("--spectral-norm", type=float, default=0.0, help="bound (the paper: 3.0); 0 is none")
    cli.add_argument("--augment", action="store_true", help="random crop and flip")
    cli.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    cli.add_argument("--compile", action="store_true", help="torch.compile the training step")
    cli.add_argument("--device", default="auto")
    cli.add_argument("--seed", type=int, default=0)
    return cli


if __name__ == "__main__":
    train(parser().parse_args())
