"""PSC against common OOD detectors on the same checkpoints.

    python -m benchmarks.ood.run --scale cpu --data ROOT [--setting dirty-mnist …] [--checkpoint FILE]

Every setting is a part; the report holds all parts run so far.  ``--checkpoint`` takes the network of one setting
from a file.  Times are of this machine, at a batch of 64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import checkpoints, fitting, runs
from benchmarks.checkpoints import Trained
from benchmarks.data import random_images
from benchmarks.ood import peers, tables, variants
from benchmarks.ood.detector import Detector, Spaces, memory_bytes, scored
from benchmarks.ood.settings import AT_SCALE, GRANULARITIES, SETTINGS, Pair, Setting, pairs
from benchmarks.ood.variants import Extractor
from benchmarks.paper import common
from benchmarks.runs import Json, Run
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.metrics import ranking
from psc_core.model.predictor import PSC
from psc_core.network.backbone import Backbone, example_input, truncate

NAME = "ood"

TIMED_BATCH = 64


def main(argv: list[str] | None = None) -> Json:
    """Run the given settings and write the report of all settings run so far."""
    cli = runs.parser(__doc__)
    cli.add_argument("--setting", choices=sorted(SETTINGS), action="append", help="default: the scale's")
    cli.add_argument("--checkpoint", type=Path, metavar="FILE", help="a trained network for the one setting")
    args = cli.parse_args(argv)
    wanted = args.setting or AT_SCALE[args.scale]
    if args.checkpoint and len(wanted) != 1:
        cli.error("--checkpoint needs exactly one --setting")
    run = runs.start(NAME, args)
    for name in wanted:
        one_setting(run, SETTINGS[name], args.checkpoint)
    found = run.finished()
    return run.write({"settings": {name: found[name] for name in SETTINGS if name in found}}, tables.fragment)


def one_setting(run: Run, setting: Setting, checkpoint: Path | None) -> Json:
    """Fit and score every detector in one setting."""
    job = setting.job(run)
    scale = common.scale_of(run)
    fit_images, limit = scale.fit_images, scale.test_images
    settings = {
        "job": job.name,
        "checkpoint": checkpoint and checkpoint.name,
        "epochs": run.epochs,
        "fit_images": fit_images,
        "images": limit,
        "peers": peers.version(),
        "granularities": GRANULARITIES[run.scale],
        "default": variants.DEFAULT,
    }

    def compute() -> Json:
        trained = checkpoints.obtain(run, job, file=checkpoint)
        stages = {
            granularity: fitting.stages(run, trained, fit_images=fit_images, granularity=granularity)
            for granularity in GRANULARITIES[run.scale]
        }
        extract = variants.extractor(run, trained, stages)
        psc = fitting.psc_of(
            run, trained, stages["operations"], fit_images=fit_images, density="pooled++", ood_score="gates"
        )
        fitted, failed = fit_all(run, trained, extract, fit_images)
        fitted.append(variants.of_model(psc))
        measured = {
            pair: score_pair(run, extract, psc, fitted, data)
            for pair, data in pairs(run, setting, trained, limit).items()
        }
        forward = forward_times(run, trained, extract, psc)
        detectors: Json = {}
        for detector in fitted:
            seconds = statistics.median(found[detector.name]["seconds_per_image"] for found in measured.values())
            space = detector.space.removeprefix("pooled-").removeprefix("psc-")
            projection = extract.projections.get(space) if detector.space.startswith("psc") else None
            detectors[detector.name] = {
                "family": detector.family,
                **{pair: found[detector.name]["outside"] for pair, found in measured.items()},
                "ms_per_image": 1000 * (forward[space] + seconds),
                "memory_bytes": detector.memory_bytes + memory_bytes(projection),
            }
        return {
            "trained": trained.name if checkpoint else job.describe(),
            "data": setting.data,
            "fit_images": fit_images,
            "images": limit,
            "peers": peers.version(),
            "failed": failed,
            "gates": psc.gates,
            "layers": {name: _layer(parts) for name, parts in stages.items()},
            "penultimate": _collapse(stages["operations"], [extract.penultimate]),
            "detectors": detectors,
        }

    return run.part(setting.name, settings, compute)


def _layer(parts: fitting.Stages) -> Json:
    projection = parts.projection.projection
    return {"size": [projection.c_proj, projection.d_proj], **_collapse(parts, list(parts.candidate.layers))}


def _collapse(parts: fitting.Stages, names: list[str]) -> Json:
    layers = [parts.report.layer(name) for name in names]
    return {"layers": names, "nc1": [layer.nc1 for layer in layers], "nc4": [layer.nc4 for layer in layers]}


def fit_all(
    run: Run, trained: Trained, extract: Extractor, fit_images: int | None
) -> tuple[list[Detector], dict[str, str]]:
    """The fitted detectors, and the reason for each that failed."""
    train = variants.spaces_of(run, extract, random_images(trained.train, fit_images), per_example=True)
    val = variants.spaces_of(run, extract, split_validation(trained.val, run.seed)[0], per_example=True)
    classes = len(trained.train.classes)
    fitted = [
        *variants.fit_densities(run, train, classes),
        *variants.fit_heads(run, train, val, classes),
        *variants.fit_own_baselines(train, val),
    ]
    fitted += variants.sums(fitted, val)
    if peers.version() is None:
        return fitted, {"pytorch-ood": "not installed: pip install pytorch-ood"}
    theirs, failed = peers.fit_peers(train, fitting.linear_output(trained.net))
    return [*fitted, *theirs], failed


def score_pair(run: Run, extract: Extractor, psc: PSC, fitted: list[Detector], pair: Pair) -> Json:
    """AUROC and FPR95 of every detector, and its seconds for one image."""

    def spaces_of(data: ImageDataset) -> Spaces:
        return variants.with_scores(psc, variants.spaces_of(run, extract, data, per_example=False), data)

    inside = spaces_of(pair.inside)
    outside = {name: spaces_of(data) for name, data in pair.outside.items()}
    found: Json = {}
    for detector in fitted:
        known, seconds = timed(detector, inside)
        separated = {}
        for name, images in outside.items():
            unknown = scored(detector, images)
            separated[name] = {"auroc": ranking.auroc(known, unknown), "fpr95": ranking.fpr95(known, unknown)}
        found[detector.name] = {"outside": separated, "seconds_per_image": seconds / len(known)}
    return found


def timed(detector: Detector, images: Spaces) -> tuple[Tensor, float]:
    """Scores, and the seconds they took; they are on the CPU, so the device has finished."""
    began = time.perf_counter()
    values = scored(detector, images)
    return values, time.perf_counter() - began


@torch.inference_mode()
def forward_times(run: Run, trained: Trained, extract: Extractor, psc: PSC) -> dict[str, float]:
    """Seconds for one image of the network up to each space, at a batch of :data:`TIMED_BATCH`."""
    preprocess = trained.train.preprocess
    batch = example_input(preprocess).to(run.device).expand(TIMED_BATCH, -1, -1, -1).contiguous()
    whole: Callable[[Tensor], object] = trained.net
    times = {"penultimate": _median_seconds(run, whole, batch) / TIMED_BATCH}
    for granularity, projection in extract.projections.items():
        cut = truncate(
            trained.net,
            extract.layers[granularity],
            keep_output=False,
            example=example_input(preprocess).to(run.device),
        )
        times[granularity] = _median_seconds(run, _projected(cut, projection), batch) / TIMED_BATCH
    pixels = torch.zeros(batch.shape, dtype=torch.uint8, device=run.device)
    times["fit"] = _median_seconds(run, psc.pipeline, pixels) / TIMED_BATCH
    return times


def _projected(cut: Backbone, projection: torch.nn.Module) -> Callable[[Tensor], object]:
    return lambda images: projection(cut(images)[0])


def _median_seconds(run: Run, step: Callable[[Tensor], object], batch: Tensor, repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        step(batch)
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
