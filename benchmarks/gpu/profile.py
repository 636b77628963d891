"""Where the step's time goes: PyTorch's profiler on PSC's step and on the plain network.

    python -m benchmarks.gpu.profile --device cuda

Eager, after a warm-up, so that every operation has its name; ``profile-DEVICE.txt`` has a table for each network,
precision and batch size, longest first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.device.subjects import SUBJECTS, Plain, fused
from psc_core.compute.device import resolve_device

NAMES = ("ResNet-18, 28", "ResNet-50, 224")
ROUNDS, OPERATIONS = 10, 25


@torch.inference_mode()
def table(network: nn.Module, images: Tensor) -> str:
    """Operations of the step by their own time on the device."""
    for _ in range(3):
        network(images)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if images.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(ROUNDS):
            network(images)
        if images.is_cuda:
            torch.cuda.synchronize()
    order = "self_device_time_total" if images.is_cuda else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=order, row_limit=OPERATIONS, max_name_column_width=60))


def main(argv: list[str] | None = None) -> int:
    """Write the tables."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    cli.add_argument("--out", type=Path, default=Path("out/gpu"))
    args = cli.parse_args(argv)
    device = resolve_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = []
    for subject in (each for each in SUBJECTS if each.name in NAMES):
        net, shape = subject.network(), (subject.preprocess.channels, subject.size, subject.size)
        for precision in ("fp32", "bf16"):
            plain = Plain([fused(net, subject.layer, precision, device)], subject.preprocess, precision).to(device)
            for name, network in (("PSC", subject.pipeline(net, precision, device)), ("plain, fused", plain)):
                for batch in args.batches:
                    images = torch.randint(0, 256, (batch, *shape), dtype=torch.uint8).to(device)
                    title = f"{subject.name}, {name}, {precision}, batch {batch}"
                    print(title, flush=True)
                    texts.append(f"{title}, {ROUNDS} steps\n{table(network, images)}")
                    (args.out / f"profile-{device.type}.txt").write_text("\n".join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
