"""Compare the shipped bundle's answers on this device, by the service's step, with those of the library on the CPU.

    python -m benchmarks.device.agreement --data ROOT --device cuda

2,000 test images: digits, ambiguous digits and garments, in batches of every size up to 64, so that every captured
graph and its padding is used.  The result is ``agreement-DEVICE.json``.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from app.inference.steps import buckets_to, make_step
from benchmarks.runs import BUNDLE, RESULTS, Json, environment, plain_parser, write_json
from psc_core import PRESETS, PSC, open_dataset
from psc_core.compute import resolve_device
from psc_core.pipeline import Pipeline

DRAWN = {"mnist": 1000, "ambiguous-mnist": 500, "fashion-mnist": 500}
MAX_BATCH = 64


def images(data: Path) -> np.ndarray:
    batches = []
    for name, count in DRAWN.items():
        test = open_dataset(f"{name}:{data}", split="test", preprocess=PRESETS["mnist"])
        batches.append(next(iter(test.batches(min(count, len(test))))).images.numpy())
    return np.concatenate(batches)


def packed(pipeline: Pipeline, shape: tuple[int, int, int], given: np.ndarray, device: torch.device) -> np.ndarray:
    """Compute the outputs of all images by the service's step, in batches of many sizes."""
    step = make_step(pipeline, shape, max_batch=MAX_BATCH, device=device)
    step.warm_up()
    found: list[np.ndarray] = []
    done = 0
    for number, size in enumerate(cycle([*buckets_to(MAX_BATCH), 3, 7, 21, 50])):
        if done == len(given):
            return np.concatenate(found)
        slot, part = number % step.slots, given[done : done + size]
        step.input(slot)[: len(part)] = part
        step.launch(slot, len(part))
        found.append(step.fetch(slot, len(part)))
        done += len(part)
    raise AssertionError


def compare(psc: PSC, ours: np.ndarray, reference: PSC, theirs: np.ndarray) -> Json:
    a, b = psc.outputs(ours), reference.outputs(theirs)
    mine, other = psc.decide(a), reference.decide(b)
    density = np.abs(a["log_density"] - b["log_density"])
    return {
        "images": len(ours),
        "other_label": int((mine.class_index != other.class_index).sum()),
        "other_decision": int((mine.decision != other.decision).sum()),
        "other_set": int((mine.prediction_set != other.prediction_set).any(axis=1).sum()),
        "largest_difference": {
            "ood_p_value": float(np.abs(a["ood_p_value"] - b["ood_p_value"]).max()),
            "probability": float(np.abs(a.probabilities - b.probabilities).max()),
            "predictive_entropy": float(np.abs(a["predictive_entropy"] - b["predictive_entropy"]).max()),
            "log_density": float(density.max()),
            "log_density_relative": float((density / np.abs(b["log_density"])).max()),
        },
    }


def main(argv: list[str] | None = None) -> None:
    cli = plain_parser(__doc__)
    cli.add_argument("--device", default="auto")
    cli.add_argument("--data", type=Path, required=True, metavar="ROOT", help="folder of the data sets")
    cli.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="results (default: benchmarks/results)")
    args = cli.parse_args(argv)
    device = resolve_device(args.device)
    psc, reference, given = PSC.load(BUNDLE, device=device), PSC.load(BUNDLE, device="cpu"), images(args.data)
    theirs = reference.compute(torch.from_numpy(given)).packed.numpy()
    found: Json = {}
    for precision in ("fp32", "bf16"):
        pipeline = psc.pipeline.with_backbone(psc.backbone.fused(precision))
        found[precision] = compare(psc, packed(pipeline, psc.preprocess.shape, given, device), reference, theirs)
        print(precision, found[precision])
    command = f"python -m benchmarks.device.agreement --data ROOT --device {device.type}"
    record = {"command": command, "environment": environment(device), "precisions": found}
    write_json(args.out / f"agreement-{device.type}.json", record)


if __name__ == "__main__":
    main()
