"""A fit that ``psc-fit`` was asked for, and its steps; :func:`psc_core.cli.fit.fit` takes them in order.

Everything that can be refused is refused in :func:`open_job`, before the first pass over the images, or while they are
decoded; nothing is written to the bundle's folder before the model is fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from psc_core.arguments import key_values
from psc_core.bundle.io import check_target
from psc_core.bundle.manifest import MAX_NAME, check_network, check_text
from psc_core.cli import preprocessing
from psc_core.cli.provenance import job_of, provenance_of
from psc_core.collapse.report import CollapseReport, to_csv
from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute, track
from psc_core.data.cache import PixelCache
from psc_core.data.classes import in_network_order
from psc_core.data.dataset import ImageDataset
from psc_core.data.overlap import check_disjoint
from psc_core.data.spec import open_dataset, unread_files
from psc_core.errors import UsageError
from psc_core.fitting.checkpoint import Checkpoint
from psc_core.fitting.data import FitData
from psc_core.fitting.job import FitJob
from psc_core.fitting.stages import checked
from psc_core.model.base import FittedModel
from psc_core.network.described.base import Described
from psc_core.network.described.families import describe
from psc_core.network.load import Recipe, forget_recipe, load_described, notes_of, recipe_for, recipe_of
from psc_core.network.onnx.export import check_exportable
from psc_core.network.output import check_images, check_output, trial_images
from psc_core.projection.fit.report import FittedProjection
from psc_core.report import page
from psc_core.report.collect import collect_fit
from psc_core.report.content import Content
from psc_core.report.facts import facts_about
from psc_core.settings import FitSettings
from psc_core.tasks.task import task_type


@dataclass(frozen=True)
class LoadedNetwork:
    """The network of a fit, and where it came from."""

    net: nn.Module
    recipe: Recipe
    weights: Sequence[Path]  # its checkpoints
    configuration: Path | None  # the file in its folder that says how it is built


@dataclass(frozen=True)
class Job(FitJob):
    """A fit with its network and the bundle to write, opened and checked."""

    out: Path  # the bundle to write
    name: str  # of the model
    network: LoadedNetwork
    order_note: str  # a note on how the classes were ordered; may be empty
    cache: PixelCache | None  # for decoded images; None: each pass decodes them

    @property
    def is_first(self) -> bool:
        """Whether this process, of those that fit together, prints and writes."""
        return self.compute.reducer.rank == 0

    @property
    def stages_folder(self) -> Path:
        """The folder of the checkpoint, beside the bundle."""
        return _stages_folder(self.out)

    def opening(self) -> list[str]:
        """Return the lines that say what is fitted to what."""
        train, val, notes = self.data.train, self.data.val, notes_of(self.network.net)
        lines = [
            f"train: {train.name}, {len(train)} images, {self.data.task_fit.describe_labels(train)}; "
            f"val: {val.name}, {len(val)} images",
            *unread_files(train),
            *unread_files(val),
            *train.notes,
            *val.notes,
            self.order_note,
            f"network: {'; '.join(notes)}" if notes else "",
            f"preprocessing: {train.preprocess}",
        ]
        return list(filter(None, lines))


def open_job(args: argparse.Namespace) -> Job:
    """Open what the flags name, and refuse what no bundle can be fitted to or written from.

    Raises:
        UsageError: If flags contradict each other or the images, or no bundle can be written to a place.
        DataError: If the images cannot be fitted.
        NetworkError: If the network cannot be loaded, run or exported.
    """
    described = describe(args.model, allow_download=args.allow_download)
    if args.weights is None and not described.weights:
        raise UsageError(f"expected --weights FILE, the trained weights of {args.model}, which has none with it")
    train, val, order_note = open_images(args, described)
    data = FitData.of(train, val, seed=args.seed, task=args.task or FitSettings.task, max_images=args.max_images)
    given = {field.name: getattr(args, field.name, None) for field in fields(FitSettings)}
    settings = checked(FitSettings(**{name: value for name, value in given.items() if value is not None}), data)
    check_target(args.out)  # Before it is resolved, because a link is refused.
    out = args.out.resolve()
    name = args.name or out.name
    if len(name) > MAX_NAME:
        raise UsageError(f"expected a --name of at most {MAX_NAME} characters, got {len(name)}")
    if not args.dry_run:  # Now rather than after hours; whether the checkpoint is of this job is only known then.
        check_target(out, overwrite=args.overwrite or (_stages_folder(out).exists() and not args.fresh))
    network = load(args, described, data.task.network_outputs(data.train.classes))
    compute = settings.compute(Reducer.start() if args.distributed else None)
    check_runs(network, data, compute)
    showing = partial(track, total=len(train), description="comparing")
    # Last, as it may take long; not data.train: the network has seen what that leaves out.
    check_disjoint(train, val, showing)
    folder = Path(args.cache) if args.cache else None
    cache = None if args.cache == "off" else PixelCache(folder, compute.reducer.world)
    return Job(data, settings, compute, out, name, network, order_note, cache)


def _stages_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.stages")


def open_images(args: argparse.Namespace, described: Described) -> tuple[ImageDataset, ImageDataset, str]:
    """Open training and validation images, with the classes in the network's order, and how that was found."""
    preprocess = preprocessing.preprocess_from(args, described.preparation)
    numbers = None if args.task is None else task_type(args.task).has_numbers
    opened = partial(open_dataset, preprocess=preprocess, numbers=numbers, target=args.target, unit=args.unit)
    train, note = in_network_order(opened(args.train, split="train"), described.classes)
    return train, opened(args.val, split="val"), note


def load(args: argparse.Namespace, described: Described, outputs: int) -> LoadedNetwork:
    """Load the network with this number of outputs; with ``--graph`` as one that no name builds again."""
    recipe = recipe_for(args.model, described, outputs, key_values(args.model_arg))
    check_network(asdict(recipe))
    net = load_described(described, recipe, args.weights)
    if args.graph:
        forget_recipe(net)
    return LoadedNetwork(net, recipe, [args.weights] if args.weights else described.weights, described.configuration)


def check_runs(network: LoadedNetwork, data: FitData, compute: Compute) -> None:
    """Run the network on trial images, on the device, and export it where a bundle will hold its graph."""
    net, recipe = network.net.to(compute.device), network.recipe
    images = trial_images(data.train.preprocess).to(compute.device)
    check_output(net, images[:1], recipe.num_classes, name=recipe.spec)
    check_images(net, images, name=recipe.spec)
    if recipe_of(net) is None:
        check_exportable(net, images[:1], compute.precision)


def look(job: Job, max_bad_images: int) -> str:
    """Return how good the plain network is on a few random images, which people see before all are decoded."""
    found = job.first_look(job.network.net, max_bad_images)
    return "\n".join([found.text, *([f"warning: {found.warning}"] if found.warning else [])])


def checked_provenance(job: Job) -> dict[str, Any]:
    """Return what the bundle will record of its origin.

    Raises:
        UsageError: If UTF-8 cannot hold a name.
    """
    network = job.network
    provenance = provenance_of(network.recipe, network.weights, job.settings, job.data)
    try:
        check_text({"name": job.name, **provenance})
    except ValueError as error:
        raise UsageError(f"expected names and flags in UTF-8, got {error}; change it") from error
    return provenance


def decoded(job: Job, args: argparse.Namespace) -> Job:
    """Return the job with its images decoded once, without those that cannot be, and print how good the network is.

    Raises:
        DataError: If more images than ``--max-bad-images`` cannot be decoded.
        UsageError: If the images that are left cannot keep the rates.
    """
    data, not_kept = job.data.cached(job.cache)
    job = replace(job, data=data)
    if job.is_first:
        print(*not_kept, look(job, args.max_bad_images), sep="\n", flush=True)
    data, left_out = job.data.readable(args.max_bad_images, job.compute.reducer)
    if left_out:
        data.check_rates(alpha=job.settings.alpha, coverage=job.settings.coverage)
        if job.is_first:
            print(*left_out, sep="\n", flush=True)
    return replace(job, data=data)


def open_checkpoint(job: Job, provenance: dict[str, Any], args: argparse.Namespace) -> Checkpoint:
    """Return the checkpoint of an interrupted run of this job, or an empty one.

    Raises:
        UsageError: If nothing was interrupted, and a bundle would be replaced without ``--overwrite``.
    """
    compute = job.compute
    inputs = job_of(provenance, job.settings, job.data, compute, job.network.configuration)
    checkpoint = Checkpoint.of(job.stages_folder, inputs, compute.reducer)
    is_resumed = checkpoint.is_resumed and not args.fresh
    check_target(job.out, overwrite=args.overwrite or is_resumed)
    if not is_resumed:
        checkpoint.clear()
    return checkpoint


def write(
    job: Job, report: CollapseReport, projection: FittedProjection, model: FittedModel, *, pictures: bool
) -> None:
    """Write bundle, collapse table, model card and, with ``pictures``, the report, and print what they say."""
    out = job.out
    manifest = model.save(out)
    page.remove(out)
    (out / "collapse.csv").write_text(to_csv(report))
    print(f"wrote {out} (version {manifest.version})", flush=True)
    content = Content(manifest.version)
    if pictures:
        content = collect_fit(model, job.network.net, job.data, projection.report, job.compute, manifest.version)
        content.save(out)
    facts = facts_about(out, manifest, model.calibration, content)
    page.write_card(facts)
    print(facts.to_text())
    if pictures:
        print(f"report: {page.write(facts, out)}")
    print(f"next: {page.serve_command(out, manifest)}")
