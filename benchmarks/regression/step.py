"""One step of the head dve with 50,000 stored images beside the classification step of the same network, on a CPU.

    python -m benchmarks.regression.step

The network is the shipped one, a ResNet-18 of digits; the stored features are noise, which changes no operation.  Times
are of the process, not of the clock, so that other work of the machine hardly counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import torch

from benchmarks.runs import BUNDLE, RESULTS, Json, environment, write_json
from psc_core import PSC
from psc_core.heads.dve import DeepVecchiaHead

POINTS: Final = 50_000
LAYERS: Final = 4
REDUCED: Final = 64
NEIGHBOURS: Final = 32
BATCH: Final = 32
COLUMNS: Final = 512
ROUNDS: Final = 9


def head_of_noise() -> DeepVecchiaHead:
    """A head of the largest size that is fitted."""
    drawn = torch.Generator().manual_seed(0)
    return DeepVecchiaHead(
        {
            "center": torch.zeros(COLUMNS),
            "inverse_scale": torch.ones(COLUMNS),
            "basis": torch.randn(LAYERS, COLUMNS, REDUCED, generator=drawn) / COLUMNS**0.5,
            "points": torch.randn(LAYERS, POINTS, REDUCED, generator=drawn),
            "values": torch.randn(POINTS, generator=drawn),
            "images": torch.arange(POINTS).double(),
            "signal": torch.ones(LAYERS),
            "noise": torch.full((LAYERS,), 0.1),
            "neighbours": torch.tensor(float(NEIGHBOURS)),
            "value_center": torch.zeros(()),
            "value_scale": torch.ones(()),
            "deviation_factor": torch.ones(()),
        },
        record={},
    )


def milliseconds(step: Callable[[], object]) -> float:
    """Median time of the process."""
    step()
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - began))
    return median(times)


@torch.inference_mode()
def main() -> Json:
    """Measure, write and print."""
    torch.set_num_threads(1)
    scorer = PSC.load(BUNDLE, device="cpu").pipeline.scorer
    pipeline, head = PSC.load(BUNDLE, device="cpu").pipeline, head_of_noise()
    images = torch.randint(0, 256, (BATCH, *scorer.preprocess.shape), dtype=torch.uint8)
    z, own = torch.randn(BATCH, COLUMNS), scorer.embed(images).z
    assert scorer.head is not None
    found = {
        "classification_ms": milliseconds(lambda: pipeline(images)),
        "laplace_ms": milliseconds(lambda: scorer.head(own)),
        "dve_ms": milliseconds(lambda: head(z)),
    }
    found["regression_ms"] = found["classification_ms"] - found["laplace_ms"] + found["dve_ms"]
    record = {
        "command": "python -m benchmarks.regression.step",
        "environment": environment(torch.device("cpu")),
        "sizes": {"batch": BATCH, "stored": POINTS, "layers": LAYERS, "reduced": REDUCED, "neighbours": NEIGHBOURS},
        "result": {**found, "ratio": found["regression_ms"] / found["classification_ms"]},
    }
    write_json(RESULTS / "regression-step.json", record)
    print(json.dumps(record["result"], indent=1))
    return record


if __name__ == "__main__":
    main()
