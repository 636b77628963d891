"""A fit that ``psc-fit`` was asked for, and its steps; :func:`psc_core.cli.fit.fit` takes them in order.

Everything that can be refused is refused in :func:`open_job`, before the first pass over the images, or while they are
decoded; nothing is written to the bundle's folder before the model is fitted.

``--dry-run``: a fit on n training images takes a + b · n seconds, a and b from two small fits; a still smaller one goes
before them, because the first fit of a process also loads libraries.  Of a large fit the report, which looks at no more
than 2,000 images of a set, is estimated too long.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from psc_core import __version__
from psc_core.bundle import MAX_NAME, check_network, check_target, check_text
from psc_core.cli import flags
from psc_core.collapse import check_named, to_csv
from psc_core.compute import Compute, Progress, join_processes, passes, track
from psc_core.data.cache import Scratch, check_disjoint, readable
from psc_core.data.dataset import ImageDataset, draw_balanced
from psc_core.data.open import in_network_order, open_dataset, unread_files
from psc_core.errors import UsageError
from psc_core.fit import Stages, fit_stages
from psc_core.fit_data import Checkpoint, FitData, FitJob, say_nothing
from psc_core.network.described import NetworkSpec, describe, is_described
from psc_core.network.export import check_exportable
from psc_core.network.load import forget_spec, load_described, notes_of, spec_of
from psc_core.network.output import check_images, check_output, trial_images
from psc_core.network.weights import digest_of
from psc_core.report import page
from psc_core.report.content import Content, collect_fit, facts_about
from psc_core.settings import FitSettings, key_values
from psc_core.tasks import TASKS
from psc_core.text import printable


def provenance_of(network: NetworkSpec, settings: FitSettings, data: FitData) -> dict[str, Any]:
    """Return everything that fitting the bundle again needs, without any path of this machine; JSON types."""
    return {
        "psc_version": __version__,
        "model": without_path(network.spec),
        "model_args": dict(network.model_args),
        "weights_sha256": digest_of(network.weights),
        **origins_of(data),
        "settings": settings.recorded(),
    }


def origins_of(data: FitData) -> dict[str, Any]:
    """Return what the provenance says of the images, which changes when some are left out; JSON types."""
    return {
        split: {
            "name": printable(Path(images.name).resolve().name),
            "images": len(images),
            "rows": images.examples,
            "sha256": images.digest(),
            "skipped": skipped,
        }
        for split, images, skipped in zip(("train", "val"), (data.train, data.val), data.skipped, strict=True)
    }


def without_path(spec: str) -> str:
    """Return the spec of a network with the path of its file or folder, where it has one, cut down to the name."""
    family, _, name = spec.partition(":")
    is_path = is_described(spec) and Path(name).expanduser().exists()
    return f"{family}:{printable(Path(name).resolve().name)}" if is_path else spec


def job_of(
    provenance: Mapping[str, Any],
    settings: FitSettings,
    data: FitData,
    compute: Compute,
    configuration: Path | None = None,
    answers: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the inputs of a checkpoint, JSON types; files count by size and time: an edited bitmap keeps its size."""
    on = {
        "preprocess": data.train.preprocess.to_json(),
        "modified": [_modified(data.train), _modified(data.val)],
        "device": compute.device.type,
        "configuration": None if configuration is None else digest_of([configuration]),
        "answers": list(answers),
    }
    return {**provenance, "settings": settings.of_stages(), **on}


def _modified(data: ImageDataset) -> str:
    """Return a digest of when each image file was last changed; copies have other times, so no bundle records it."""
    times = (data.source.modified_ns(index) for index in data.indices.tolist())
    return hashlib.sha256(b"".join(b"%d\n" % time for time in times)).hexdigest()


def opening_text(net: nn.Module, data: FitData) -> str:
    train, val, notes = data.train, data.val, notes_of(net)
    lines = [
        f"train: {train.name}, {len(train)} images, {data.task_type.describe_labels(train)}; "
        f"val: {val.name}, {len(val)} images",
        *(*unread_files(train), *unread_files(val), *train.notes, *val.notes),
        *([f"network: {'; '.join(notes)}"] if notes else []),
        f"preprocessing: {train.preprocess}",
    ]
    return "\n".join(lines)


def print_now(text: str, details: str = "", *, verbose: bool) -> None:
    """Print what a stage found, in short or, if there are any and they are asked for, the details."""
    if shown := (details or text) if verbose else text:
        print(shown, flush=True)


def open_job(args: argparse.Namespace) -> tuple[nn.Module, NetworkSpec, FitJob]:
    """Open what the flags name, and refuse what no bundle can be fitted to or written from.

    The network's description is that of the weights that were read.
    """
    described = describe(args.model, allow_download=args.allow_download)
    if args.weights is None and not described.weights:
        raise UsageError(f"expected --weights FILE, the trained weights of {args.model}, which has none with it")
    preprocess = flags.preprocess_from(args, described)
    numbers = None if args.task is None else TASKS[args.task].has_numbers
    opened = partial(open_dataset, preprocess=preprocess, numbers=numbers, target=args.target, unit=args.unit)
    train, note = in_network_order(opened(args.train, split="train"), described.classes)
    train = replace(train, notes=(*train.notes, note)) if note else train
    val = opened(args.val, split="val")
    given = {name: getattr(args, name, None) for name in FitSettings.model_fields}
    settings = FitSettings(**{name: value for name, value in given.items() if value is not None})
    job = FitJob.of(train, val, settings, task=settings.task)
    check_target(args.out)  # Before it is resolved, because a link is refused.
    out = args.out.resolve()
    name = args.name or out.name
    if len(name) > MAX_NAME:
        raise UsageError(f"expected a --name of at most {MAX_NAME} characters, got {len(name)}")
    if not args.dry_run:  # Now rather than after hours; whether the checkpoint is of this job is only known then.
        check_target(out, overwrite=args.overwrite or (_stages_folder(out).exists() and not args.fresh))
    outputs = job.data.task.network_outputs(job.data.train.classes)
    net, network = load(args, described, outputs)
    compute = job.settings.compute(join_processes() if args.distributed else (0, 1))
    net = net.to(compute.device)
    images = trial_images(train.preprocess).to(compute.device)
    check_output(net, images[:1], outputs, name=network.spec)
    check_images(net, images, name=network.spec)
    check_named(net, images[:1], settings)
    if spec_of(net) is None:  # a bundle will hold its graph
        check_exportable(net, images[:1], compute.precision)
    # Last, as it may take long; not job.data.train: the network has seen what that leaves out.
    check_disjoint(train, val, partial(track, total=len(train), description="images in both sets"))
    cache = None if args.cache == "off" else Scratch(Path(args.cache) if args.cache else None, compute.world)
    say = partial(print_now, verbose=args.verbose) if compute.rank == 0 else say_nothing  # of all processes the first
    return net, network, replace(job, compute=compute, name=name, cache=cache, say=say)


_ANSWERS: Final = 8


def _stages_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.stages")


def load(args: argparse.Namespace, described: NetworkSpec, outputs: int) -> tuple[nn.Module, NetworkSpec]:
    """Load the network with this number of outputs; with ``--graph`` as one that no name builds again."""
    network = described.with_arguments(outputs, key_values(args.model_arg))
    check_network(network.to_json())
    net = load_described(network, args.weights)
    if args.graph:
        forget_spec(net)
    return net, replace(network, weights=(args.weights,)) if args.weights else network


def checked_provenance(network: NetworkSpec, job: FitJob) -> dict[str, Any]:
    provenance = provenance_of(network, job.settings, job.data)
    try:
        check_text({"name": job.name, **provenance})
    except ValueError as error:
        raise UsageError(f"expected names and flags in UTF-8, got {error}; change it") from error
    return provenance


@torch.inference_mode()
def answers_of(net: nn.Module, job: FitJob) -> list[str]:
    """Return a few outputs for a trial image, roughly: another network with these weights, edited code, has others."""
    image = trial_images(job.data.train.preprocess)[:1].to(job.compute.device)
    return [f"{value:.1e}" for value in net(image).flatten()[:_ANSWERS].tolist()]


def open_checkpoint(net: nn.Module, job: FitJob, configuration: Path | None, args: argparse.Namespace) -> Checkpoint:
    """Return the checkpoint of an interrupted run of this job, or an empty one."""
    out = args.out.resolve()
    inputs = job_of(job.provenance, job.settings, job.data, job.compute, configuration, answers_of(net, job))
    checkpoint = Checkpoint(_stages_folder(out), inputs, job.compute)
    is_resumed = checkpoint.is_resumed and not args.fresh
    check_target(out, overwrite=args.overwrite or is_resumed)
    if is_resumed:
        job.say("this fit goes on where an interrupted run stopped; --fresh begins anew")
    else:
        checkpoint.clear()
    return checkpoint


def write(
    out: Path, found: Stages, of_network: tuple[nn.Module, FitJob] | None, progress: Progress, *, verbose: bool
) -> None:
    """Write bundle, collapse table, model card and, of the network and its fit, the report; print what they say."""
    model = found.model
    manifest = model.save(out)
    page.remove(out)
    (out / "collapse.csv").write_text(to_csv(found.collapse), encoding="utf-8")
    print(f"wrote {out} (version {manifest.version})", flush=True)
    content = Content(manifest.version)
    if of_network:
        net, job = of_network
        content = collect_fit(found, net, job.data, job.compute, manifest.version)
        content.save(out)
    facts = facts_about(out, manifest, model.calibration, content)
    page.write_card(facts)
    print(facts.to_text(verbose=verbose))
    if of_network:
        print(f"report: {page.write(facts, out)}")
    print(f"the fit {progress.text(int(found.parts.training.images.max()) + 1)}", file=sys.stderr)
    print(f"next: {page.serve_command(out, manifest)}")


SECONDS: Final = 60.0  # time that the two fits together may take, roughly
PASSES: Final = 8  # assumed cost of a small fit, fixed costs included, in passes over its training images
FIT_IMAGES: Final = (256, 4096)  # smallest and largest number of training images in the larger fit


@dataclass(frozen=True)
class Estimate:
    images: int  # number of training images in the larger of the two fits
    seconds: float
    memory: int  # peak of this process, bytes
    device_memory: int  # peak on the GPU, bytes; 0 without one
    pixels: int  # decoded images on disk, bytes; 0 where none are kept
    features: int  # features of the last stage on disk, bytes

    def __str__(self) -> str:
        hours, minutes = divmod(round(self.seconds / 60), 60)
        took = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes > 1 else f"{self.seconds:.0f} s"
        parts = [f"about {took}", f"{self.memory / (1 << 30):.1f} GiB of memory"]
        if self.device_memory:
            parts.append(f"{self.device_memory / (1 << 30):.1f} GiB on the GPU")
        disk = {"decoded images": self.pixels, "features": self.features}
        parts += [f"{math.ceil(size / (1 << 20)):,} MiB of disk for {what}" for what, size in disk.items() if size]
        return (
            f"a fit on all images takes {', '.join(parts)} (from fits on up to {self.images} images; nothing written)"
        )


def estimate(net: nn.Module, job: FitJob, max_bad_images: int) -> Estimate | str:
    """Fit twice on a few images, print what the larger fit found, and extrapolate; or say that this takes too long."""
    train, val, compute = job.data.train, job.data.val, job.compute
    if job.cache is not None and not job.cache.has_room(train, val):
        print(*job.cache.notes(train, val), sep="\n", flush=True)
        job = replace(job, cache=None)
    larger = compute.first(fit_images(rate(net, train, compute, job.settings.seed, max_bad_images), train))
    smallest = min(larger, 4 * len(train.classes))
    sizes = (max(larger // 3, smallest), larger)
    if smallest + sum(sizes) >= len(train):
        _, notes = job.data.readable(max_bad_images, compute)
        said = (
            f"the fit itself takes no longer than trying it on a part of {len(train)} images: just run it, without "
            "--dry-run (nothing written)"
        )
        return "\n".join([*notes, said])
    with contextlib.redirect_stdout(io.StringIO()):
        timed_fit(net, job, smallest, max_bad_images)
        first, _ = timed_fit(net, job, sizes[0], max_bad_images)
    second, feature_bytes = timed_fit(net, job, larger, max_bad_images)
    return Estimate(
        larger,
        extrapolate(sizes, (first, second), len(train)),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        torch.cuda.max_memory_allocated(compute.device) if compute.device.type == "cuda" else 0,
        0 if job.cache is None else job.cache.size(train, val),
        compute.world * round(feature_bytes * len(train) / larger),
    )


def timed_fit(net: nn.Module, job: FitJob, size: int, max_bad_images: int) -> tuple[float, int]:
    """Fit to ``size`` training images and the same fraction of the validation images: the seconds, and the bytes."""
    data = job.data
    fraction, classes = size / len(data.train), len(data.train.classes)
    # What so few images can keep, and have components for.
    lenient = job.settings.changed({"alpha": 0.5, "coverage": 0.5, "risk": None, "pca": None})
    began = time.perf_counter()
    few = data.fewer(size, max(round(len(data.val) * fraction), min(len(data.val), 4 * classes)))
    job, notes = replace(job, data=few, settings=lenient, scratch=Scratch()).decode(max_bad_images)
    for note in notes:
        job.say(note)
    collect_fit(fit_stages(net, job), net, job.data, job.compute, "")
    return time.perf_counter() - began, job.scratch.array_bytes


def extrapolate(sizes: tuple[int, int], seconds: tuple[float, float], images: int) -> float:
    """Return the seconds for ``images`` on the line through two fits; if noise makes it fall, half is in proportion."""
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    if slope <= 0:
        slope = seconds[1] / sizes[1] / 2
    return seconds[1] + slope * max(0, images - sizes[1])


def rate(net: nn.Module, train: ImageDataset, compute: Compute, seed: int, max_bad_images: int) -> float:
    """Return the images per second through the network alone, decoding included."""
    few = readable([draw_balanced(train, 2 * compute.batch_size, seed)], max_bad_images)[0][0]
    began = time.perf_counter()
    for _ in passes(few, compute, "one pass", net.to(compute.device)):
        pass
    return len(few) / max(time.perf_counter() - began, 1e-9)


def fit_images(images_per_second: float, train: ImageDataset) -> int:
    """Return the number of training images in the larger fit, so that both together take about :data:`SECONDS`."""
    affordable = round(SECONDS * images_per_second / PASSES)
    wanted = min(max(affordable, FIT_IMAGES[0], 12 * len(train.classes)), max(FIT_IMAGES[1], 12 * len(train.classes)))
    return min(wanted, len(train))
