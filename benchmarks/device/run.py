"""Measure the device step beside the original network, a lower bound, ensembles and MC dropout, and part by part.

    python -m benchmarks.device.run                        # this CPU, four minutes
    python -m benchmarks.device.run --device cuda          # a GPU, three minutes

All times are those of the service's step (:mod:`app.inference.steps`), from uint8 on the host to outputs on the host.
The original network returns softmax probabilities through the same step (same precision, memory format and graph mode),
once with its own modules and once fused like the PSC's backbone.  Variants take turns; ratios are medians over rounds,
with quartiles.  Results of earlier runs stay in the file until a network is measured again.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.inference.steps import EagerStep, Step, make_step
from benchmarks.device.report import fragment
from benchmarks.device.subjects import (
    MEMBERS,
    SAMPLES,
    SUBJECTS,
    Plain,
    Subject,
    enable_dropout,
    fused,
    random_density,
    random_head,
    random_projection,
    unfused,
    with_dropout,
)
from benchmarks.device.timing import (
    bandwidth,
    milliseconds,
    on_device,
    operations,
    peak,
    ratio,
    take_turns,
    traffic,
)
from benchmarks.runs import RESULTS, Json, environment, plain_parser, write_json
from psc_core.allocator import keep_freed_memory
from psc_core.compute import resolve_device
from psc_core.heads.base import Scored, entropy
from psc_core.pipeline import Pipeline, average_positions
from psc_core.settings import Precision

PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16")}
MODES = {"cpu": ("eager",), "cuda": ("graph", "eager")}
CUDA_BUCKETS = (1, 8, 64)


@contextmanager
def tensor_cores(on: bool) -> Iterator[None]:
    """Compute float32 products in TF32 within the block (CUDA)."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def step_of(network: Any, shape: tuple[int, int, int], bucket: int, device: torch.device, mode: str) -> Step:
    """Return the service's step for batches of ``bucket`` alone; eager on CUDA is the step without graphs."""
    if device.type == "cuda" and mode == "eager":
        return EagerStep(network, shape, max_batch=bucket, device=device)
    step: Any = make_step(network, shape, max_batch=bucket, device=device, compiled=mode == "compiled")
    step._buckets = (bucket,)
    step.warm_up()
    return step


def call(step: Step, images: np.ndarray[Any, Any]) -> None:
    step.input(0)[: len(images)] = images
    step.launch(0, len(images))
    step.fetch(0, len(images))


def parts(pipeline: Pipeline, images: Tensor, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return each part of the step, to run on the output of the part before it."""
    p = pipeline.scorer
    with torch.inference_mode():
        inputs = p.standardise(images)

        def features() -> list[Tensor]:
            with torch.autocast(device.type, torch.bfloat16, enabled=p.precision == "bf16", cache_enabled=False):
                return p.backbone(inputs)[0]

        given = features()
        layers, early = given[: len(p.projection.positions)], given[-1]
        z = p.projection(layers)
        embedding = p.embed(images)
        scored = p.score(embedding)

    def densities() -> None:
        p.density(torch.cat([*map(average_positions, layers)], dim=1) if p.density.reads == "pooled" else z)
        if p.texture is not None:
            p.texture(average_positions(early))

    def packed() -> Tensor:
        scores = {**scored.scores, "predictive_entropy": entropy(scored.probabilities)}
        return pipeline.outputs(Scored(scores, scored.probabilities))

    return {
        "standardise": lambda: p.standardise(images),
        "backbone": features,
        "projection": lambda: p.projection(layers),
        "density": densities,
        "head": lambda: p.head(embedding.head_input),
        "pack": packed,
    }


def time_of_parts(pipeline: Pipeline, images: Tensor, device: torch.device, seconds: float) -> Json:
    """Return the milliseconds of each part, and the fraction of the step that projection, density and head take."""
    with torch.inference_mode():
        repeat = 20 if len(images) <= 8 else 4
        calls = {name: on_device(f, device, repeat=repeat) for name, f in parts(pipeline, images, device).items()}
        times = take_turns({name: f for name, (f, _) in calls.items()}, seconds=seconds, rounds=(3, 50))
    each = {name: median(taken) / calls[name][1] for name, taken in times.items()}
    whole = sum(each.values())
    tail = sum(each[name] for name in ("projection", "density", "head"))
    return {
        "parts_ms": {name: round(value * 1e3, 4) for name, value in each.items()},
        "tail_fraction": round(tail / whole, 4),
    }


class Measurement:
    def __init__(self, subject: Subject, device: torch.device, limits: Json, *, quick: bool = False) -> None:
        self.subject = subject
        self.device = device
        self.limits = limits
        self.precisions = tuple(limits["operations_per_s"])
        self.quick = quick
        self.net = subject.network()
        self.shape = (subject.preprocess.channels, subject.size, subject.size)
        self.seconds = 0.0 if quick else 0.5 if device.type == "cpu" else 0.15

    def measure(self) -> Json:
        return {
            "layer": self.subject.layer,
            "classes": self.subject.classes,
            "z": self.subject.sizes,
            "fitted": self.subject.shipped,
            "limits": self.limits,
            "cells": self.cells(),
            "alternatives": self.alternatives(),
        }

    def images(self, count: int) -> Tensor:
        return torch.randint(0, 256, (count, *self.shape), dtype=torch.uint8)

    def psc(self, precision: str, density: str = "gda") -> Pipeline:
        return self.subject.pipeline(self.net, _served(precision), self.device, density=density)

    def plain(self, precision: str) -> dict[str, Plain]:
        kind, s = _served(precision), self.subject
        networks = {
            "plain": unfused(self.net, kind, self.device),
            "plain_fused": fused(self.net, s.layer, kind, self.device),
        }
        return {name: Plain([net], s.preprocess, kind).to(self.device) for name, net in networks.items()}

    def cells(self) -> list[Json]:
        """Return the PSC and the original network by precision, mode and bucket."""
        rows = []
        for precision in self.precisions:
            variants: dict[str, Any] = {"psc": self.psc(precision), **self.plain(precision)}  # Loading turns TF32 off.
            if self.subject.many_classes:
                variants["psc_tied"] = self.psc(precision, "tied")
            with tensor_cores(precision == "tf32"):
                work = self.work(variants)
                for mode in self.modes(precision):
                    rows += [
                        {"precision": precision, "mode": mode, **self.cell(variants, work, precision, mode, bucket)}
                        for bucket in self.buckets(mode)
                    ]
                    torch.compiler.reset()
        return rows

    def modes(self, precision: str) -> tuple[str, ...]:
        """Return the modes; to compile takes a minute, so it is one only for the shipped network in one precision."""
        compiled = self.subject.shipped and self.device.type == "cpu" and precision == "bf16" and not self.quick
        return MODES[self.device.type] + (("compiled",) if compiled else ())

    def buckets(self, mode: str) -> tuple[int, ...]:
        """Return the batch sizes; fewer if a mode is slow to set up or the default run would take too long."""
        if self.quick:
            return (1,)
        if mode == "compiled":
            return (8,)
        if self.device.type == "cuda":
            return CUDA_BUCKETS if mode == "graph" else CUDA_BUCKETS[-1:]
        return self.subject.buckets

    def work(self, variants: Mapping[str, Any]) -> Json:
        """Return the operations and bytes of an image, counted on a batch of eight."""
        images = self.images(8).to(self.device)
        with torch.inference_mode():
            variants["psc"](images)  # The first call fuses layers, which is not part of a step.
        whole = Plain([unfused(self.net, "fp32", self.device)], self.subject.preprocess, "fp32").to(self.device)
        return {
            "psc_operations": operations(variants["psc"], images) / 8,
            "plain_operations": operations(whole, images) / 8,
            "psc_bytes": {count: self.bytes_of(variants["psc"], count) for count in self.buckets("eager")},
        }

    def bytes_of(self, network: Any, count: int) -> int:
        return traffic(network, self.images(count).to(self.device))

    def calls(
        self, networks: Mapping[str, Any], images: np.ndarray[Any, Any], mode: str
    ) -> dict[str, Callable[[], None]]:
        """Return the service's step of each network on a batch of images."""
        return {
            name: partial(call, step_of(net, self.shape, len(images), self.device, mode), images)
            for name, net in networks.items()
        }

    def cell(self, variants: Mapping[str, Any], work: Json, precision: str, mode: str, bucket: int) -> Json:
        images = self.images(bucket)
        if mode == "compiled" and self.device.type == "cpu":  # the compiler fuses by itself
            variants = {**variants, "plain_fused": variants["plain"]}
        calls = self.calls(variants, images.numpy(), mode)
        times = take_turns(calls, seconds=self.seconds, rounds=(3, 200))
        row: Json = {
            "bucket": bucket,
            "ms": {name: milliseconds(taken) for name, taken in times.items()},
            "images_per_s": round(bucket / median(times["psc"]), 1),
            "throughput_over_plain": ratio(times["plain"], times["psc"]),
            "throughput_over_plain_fused": ratio(times["plain_fused"], times["psc"]),
            "rounds": len(times["psc"]),
        }
        if "psc_tied" in times:
            row["tied_throughput_over_plain_fused"] = ratio(times["plain_fused"], times["psc_tied"])
        if mode == MODES[self.device.type][0]:
            row |= time_of_parts(variants["psc"], images.to(self.device), self.device, self.seconds / 2)
            bytes_ = work["psc_bytes"].get(bucket) or self.bytes_of(variants["psc"], bucket)
            compute = work["psc_operations"] * bucket / self.limits["operations_per_s"][precision]
            memory = bytes_ / self.limits["bytes_per_s"]
            row |= {
                "operations_per_image": round(work["psc_operations"]),
                "operations_over_plain": round(work["psc_operations"] / work["plain_operations"], 4),
                "bytes": bytes_,
                "floor_ms": round(max(compute, memory) * 1e3, 4),
                "step_over_floor": round(median(times["psc"]) / max(compute, memory), 3),
            }
        return row

    def alternatives(self) -> list[Json]:
        """Return the times of an ensemble, unfused and fused, and of fused Monte-Carlo dropout over the PSC's step."""
        s, device = self.subject, self.device
        bucket = 1 if self.quick else 64 if device.type == "cuda" else 8 if 32 in s.buckets else 1
        mode = MODES[device.type][0]
        images = self.images(bucket).numpy()
        rows = []
        for precision in self.precisions if device.type == "cuda" else ("fp32",):
            kind = _served(precision)
            own = [unfused(self.net, kind, device) for _ in range(MEMBERS)]
            members = [fused(self.net, s.layer, kind, device) for _ in range(MEMBERS)]
            trunk = enable_dropout(fused(with_dropout(self.net, s.stages), s.stages[-1], kind, device))
            networks: dict[str, Any] = {
                "psc": self.psc(precision),
                "ensemble": Plain(own, s.preprocess, kind).to(device),
                "ensemble_fused": Plain(members, s.preprocess, kind).to(device),
                "mc_dropout_fused": Plain([trunk], s.preprocess, kind, passes=SAMPLES).to(device),
            }
            with tensor_cores(precision == "tf32"):
                times = take_turns(self.calls(networks, images, mode), seconds=self.seconds, rounds=(3, 50))
            over = {name: ratio(taken, times["psc"]) for name, taken in times.items() if name != "psc"}
            ms = {name: milliseconds(taken) for name, taken in times.items()}
            rows.append({"precision": precision, "mode": mode, "bucket": bucket, "ms": ms, "over_psc": over})
        return rows


def large_tail(device: torch.device) -> list[Json]:
    """Measure projection, density and head alone at 1,000 classes and 2,048 features, batch 64."""
    torch.manual_seed(0)
    rows = []
    for kind, kept in (("gda", 259), ("tied", 2048)):
        projection = random_projection(2048, 1, 1, 2048).to(device)
        density = random_density(2048, kept, 1000, kind=kind).to(device)
        head = random_head(2048, 1000).to(device)
        features = torch.randn(64, 2048, 1, device=device)

        def tail(p: Any = projection, d: Any = density, h: Any = head, f: Tensor = features) -> None:
            z = p([f])
            d(z)
            h(z)

        with torch.inference_mode():
            run, repeat = on_device(tail, device)
            times = take_turns({"tail": run}, seconds=2.0, rounds=(5, 200))["tail"]
        rows.append({"density": kind, "components": kept, "batch": 64, "ms": round(median(times) / repeat * 1e3, 4)})
    return rows


def _served(precision: str) -> Precision:
    return "bf16" if precision == "bf16" else "fp32"


def limits_of(device: torch.device, precisions: Sequence[str]) -> Json:
    """Measure the speed of a plain matrix product and of a plain copy on the device."""
    speeds = {}
    for precision in precisions:
        with tensor_cores(precision == "tf32"):
            speeds[precision] = peak(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    return {"operations_per_s": speeds, "bytes_per_s": bandwidth(device)}


def main(argv: list[str] | None = None) -> None:
    subjects = {subject.name: subject for subject in SUBJECTS}
    parts = [*subjects, "tail"]
    cli = plain_parser(__doc__)
    cli.add_argument("--device", default="auto")
    cli.add_argument("--only", nargs="+", choices=parts, metavar="NAME", default=parts, help=", ".join(parts))
    every = PRECISIONS["cuda"]
    cli.add_argument("--precisions", nargs="+", choices=every, default=every, help=", ".join(every))
    cli.add_argument("--quick", action="store_true", help="three rounds of batches of one image, to try the script")
    cli.add_argument("--missing", action="store_true", help="only what the results do not have yet")
    cli.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="results (default: benchmarks/results)")
    args = cli.parse_args(argv)
    keep_freed_memory()  # as the service does
    device = resolve_device(args.device)
    file = args.out / f"device-{device.type}.json"
    record: Json = json.loads(file.read_text()) if file.exists() else {"subjects": {}}
    have = {*record["subjects"], *(["tail"] if "large_tail" in record else [])} if args.missing else set()
    record |= {
        "command": f"python -m benchmarks.device.run --device {device.type}",
        "environment": environment(device),
    }
    precisions = tuple(name for name in PRECISIONS[device.type] if name in args.precisions)
    limits = limits_of(device, precisions)
    for name in (name for name in args.only if name not in have):
        print(f"{datetime.now(UTC):%H:%M:%S} {name}", flush=True)
        if name == "tail":
            record["large_tail"] = large_tail(device)
        else:
            subject = replace(subjects[name], buckets=(1,)) if args.quick else subjects[name]
            record["subjects"][name] = Measurement(subject, device, limits, quick=args.quick).measure()
            gc.collect()
        write_json(file, record)
    print(fragment(record))


if __name__ == "__main__":
    main()
