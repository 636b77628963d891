"""``psc-fit``: fit a bundle from a trained network and two folders of images."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn

from psc_core import arguments
from psc_core.bundle.io import check_target
from psc_core.bundle.manifest import MAX_NAME, check_network, check_text
from psc_core.cli import flags, preprocessing
from psc_core.cli.estimate import estimate
from psc_core.cli.provenance import check_disjoint, job_of, origins_of, provenance_of
from psc_core.cli.run import run_stages
from psc_core.collapse.report import to_csv
from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute
from psc_core.compute.readable import only_readable
from psc_core.data.classes import in_network_order
from psc_core.data.dataset import drawn
from psc_core.data.spec import open_dataset
from psc_core.density import DENSITIES
from psc_core.errors import UsageError
from psc_core.fitting.checkpoint import Checkpoint
from psc_core.fitting.data import FitData
from psc_core.fitting.stages import checked
from psc_core.network import LIBRARIES
from psc_core.network.backbone import check_output, example_input
from psc_core.network.described.families import describe
from psc_core.network.layers import GRANULARITIES
from psc_core.network.load import Recipe, forget_recipe, load_network, notes_of, recipe_of
from psc_core.network.onnx.export import check_exportable
from psc_core.precision import PRECISIONS
from psc_core.report import page
from psc_core.report.collect import collect_fit
from psc_core.report.content import Content
from psc_core.report.facts import facts_about
from psc_core.settings import HEAD_INPUTS, OOD_SCORES, PREDICTIONS, FitSettings
from psc_core.tasks import TASKS
from psc_core.tasks.fit.task import OWN_IMAGES
from psc_core.tasks.task import task_type

MAX_BAD_IMAGES: Final = 10
"""Images that cannot be decoded and are left out of a fit, unless it is told."""

_Group = Any
"""A group of flags; argparse has no public name for it."""

_EXAMPLE = """example:
  psc-fit --model torchvision:resnet18 --weights net.safetensors --train images/train --val images/val --out bundle

  psc-fit --model hf:my-vit --train images/train --val images/val --out bundle

  psc-fit --task regression … --train images/train.csv --val images/val.csv --target age --unit years --out bundle

data sets: a directory class/file.png, a table of images and numbers (.csv, .parquet), mnist:ROOT, fashion-mnist:ROOT,
ambiguous-mnist:ROOT, dirty-mnist:ROOT, cifar10:ROOT, rotated-mnist:ROOT, or package.module:factory.  Several processes:
torchrun --nproc-per-node N -m psc_core.cli --distributed …
"""


def parser() -> argparse.ArgumentParser:
    """The command line of ``psc-fit``."""
    description = "Fit uncertainty to a trained image classifier or regression, without retraining it."
    cli = flags.command("psc-fit", description, _EXAMPLE)
    cli.usage = "%(prog)s --model SPEC [--weights FILE] --train DIR --val DIR --out DIR [flag ...]"
    _add_network_flags(cli.add_argument_group("network"))
    _add_data_flags(cli.add_argument_group("data"))
    _add_bundle_flags(cli.add_argument_group("bundle"))
    _add_answer_flags(cli.add_argument_group("answers"))
    preprocessing.add_flags(cli)
    _add_run_flags(cli.add_argument_group("run"))
    _add_method_flags(cli.add_argument_group("method (the paper's settings and others, for comparisons)"))
    return cli


def _add_network_flags(group: _Group) -> None:
    specs = (
        f"{', '.join(f'{library}:NAME' for library in LIBRARIES)} or package.module:factory; onnx:FILE; hf:DIR or "
        "timm:local-dir:DIR, a folder of transformers or timm, which says weights, classes and preprocessing itself; "
        "hf:ORG/NAME, in the Hugging Face cache"
    )
    group.add_argument("--model", required=True, metavar="SPEC", help=specs)
    text = "argument of the network's constructor; repeat for more (stem=small, in_channels=1, …)"
    group.add_argument("--model-arg", action="append", default=[], metavar="K=V", help=text)
    text = (
        "checkpoint: .safetensors, .pth, .pt, .bin, .ckpt or .index.json; nothing in it is run (default: those that "
        "hf:, timm:local-dir: and onnx: have)"
    )
    group.add_argument("--weights", type=Path, metavar="FILE", help=text)
    text = "get from the Hugging Face hub what its cache lacks of hf:ORG/NAME"
    group.add_argument("--allow-download", action="store_true", help=text)


def _add_data_flags(group: _Group) -> None:
    group.add_argument("--train", required=True, metavar="DIR", help="training images")
    group.add_argument("--val", required=True, metavar="DIR", help="validation images, none of them trained on")
    text = "column of the tables that holds the numbers (default: the only one)"
    group.add_argument("--target", metavar="NAME", help=text)
    group.add_argument("--unit", default="", help="of the numbers in the tables")


def _add_bundle_flags(group: _Group) -> None:
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="bundle to write")
    group.add_argument("--overwrite", action="store_true", help="replace the bundle that --out holds, and its report")
    group.add_argument("--name", help="model name (default: the name of --out)")
    text = "store the network as an ONNX graph, which a server loads without its code; always so of hf: and onnx:"
    group.add_argument("--graph", action="store_true", help=text)
    text = "write no report; it holds pictures of training and validation images, or their numbers"
    group.add_argument("--no-report", action="store_true", help=text)


def _add_answer_flags(group: _Group) -> None:
    _add_choice(group, "--task", TASKS[::-1], "what the network predicts: a class, or one number")
    text = "auto: the better on validation images; psc: the head's; base: the network's own, divided by a temperature"
    _add_choice(group, "--predictions", PREDICTIONS, text)
    kinds = {task: tuple(task_type(task).heads) for task in TASKS[::-1]}
    listed = "; ".join(f"of a {task_type(task).noun}: {', '.join(heads)}" for task, heads in kinds.items())
    text = f"what predicts from the features, {listed}; laplace is the paper's (default: the first)"
    group.add_argument("--head", choices=sum(kinds.values(), ()), help=text)
    _add_rate(group, "--alpha", "false-alarm rate of the OOD decision")
    _add_rate(group, "--coverage", "coverage of the prediction sets, or of a regression's intervals")
    _add_rate(group, "--risk", "error rate that images below the ambiguity threshold keep, with 95 %% confidence")
    text = "width above which an interval makes a number uncertain, in its unit, of a regression (default: no limit)"
    group.add_argument("--max-width", type=arguments.positive_number, metavar="WIDTH", help=text)
    text = (
        "keep thumbnails of N training images, some of each class, to show what an image is nearest to (default: none)"
    )
    group.add_argument("--keep-examples", type=arguments.positive, metavar="N", help=text)


def _add_method_flags(group: _Group) -> None:
    group.add_argument("--layer", default="auto", metavar="NAME", help="candidate layer, or auto (default)")
    group.add_argument("--layers", metavar="REGEX", help="measure only layers whose name matches")
    _add_choice(group, "--granularity", GRANULARITIES, "which modules are layers; operations is the paper's")
    _add_rate(group, "--epsilon", "collapse cut-off for NC1")
    _add_number(group, "--c-proj", "channel components")
    _add_number(group, "--d-proj", "spatial components")
    _add_number(group, "--minimum-dim", "smallest c·d that auto considers")
    group.add_argument("--no-second-scaling", action="store_true", help="do not standardise z")
    text = "what measures how typical an image is; gda is the paper's"
    _add_choice(group, "--density", tuple(DENSITIES), text)
    _add_number(group, "--pca", "dimension the density works in")
    text = "what a classifier's head reads: z and the layer's features averaged over positions, or z, as in the paper"
    _add_choice(group, "--head-input", HEAD_INPUTS, text)
    text = "what the OOD decision ranks: texture, kind and confidence together, or the density alone, as in the paper"
    _add_choice(group, "--ood-score", OOD_SCORES, text)


def _add_run_flags(group: _Group) -> None:
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    _add_choice(group, "--precision", PRECISIONS, "of the network, while fitting and served")
    _add_number(group, "--batch-images", "images sent through the network at once")
    text = "fit on at most N training images, balanced over classes (default: all)"
    group.add_argument("--max-images", type=arguments.positive, metavar="N", help=text)
    budget = FitSettings.max_memory
    text = f"budget of one stage's statistics (default: {budget >> 30}G)"
    group.add_argument("--max-memory", type=arguments.byte_count, default=budget, metavar="SIZE", help=text)
    text = "where decoded images are kept until the end, or off to decode them in every pass (default: the system's)"
    group.add_argument("--cache", metavar="DIR|off", help=text)
    text = (
        "leave out up to N images that cannot be decoded; with --cache off, finding them takes a pass more, and 0 none"
    )
    text = f"{text} (default: {MAX_BAD_IMAGES})"
    group.add_argument("--max-bad-images", type=arguments.whole, default=MAX_BAD_IMAGES, metavar="N", help=text)
    group.add_argument("--distributed", action="store_true", help="be one of the processes that torchrun started")
    text = "fit on a few images only, write nothing, and say how long and how much memory a fit on all of them takes"
    group.add_argument("--dry-run", action="store_true", help=text)
    group.add_argument("--fresh", action="store_true", help="ignore the checkpoint of an interrupted run")
    text = "splits the validation images and seeds the head (default: 0)"
    group.add_argument("--seed", type=arguments.seed, default=0, metavar="N", help=text)


def _add_number(group: _Group, flag: str, text: str) -> None:
    default = _default_of(flag)
    kind, shown = (arguments.positive_or_auto, "auto") if default is None else (arguments.positive, default)
    metavar = "N|auto" if default is None else "N"
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")


def _add_choice(group: _Group, flag: str, choices: Sequence[str], text: str) -> None:
    default = _default_of(flag)
    group.add_argument(flag, choices=choices, default=default, help=f"{text} (default: {default})")


def _add_rate(group: _Group, flag: str, text: str) -> None:
    default = _default_of(flag)
    group.add_argument(flag, type=arguments.open_unit_interval, default=default, help=f"{text} (default: {default})")


def _default_of(flag: str) -> Any:
    return getattr(FitSettings, flag.removeprefix("--").replace("-", "_"))


def fit(args: argparse.Namespace) -> None:
    """Run all stages and write the bundle."""
    out = args.out.resolve()
    name = args.name or out.name
    given = {field.name: getattr(args, field.name) for field in fields(FitSettings) if hasattr(args, field.name)}
    described = describe(args.model, allow_download=args.allow_download)
    if args.weights is None and not described.weights:
        raise UsageError(f"expected --weights FILE, the trained weights of {args.model}, which has none with it")
    preprocess = preprocessing.preprocess_from(args, described.preparation)
    opened = partial(open_dataset, preprocess=preprocess, target=args.target, unit=args.unit)
    train, order_note = in_network_order(opened(args.train, split="train"), described.classes)
    val, _ = in_network_order(opened(args.val, split="val"), described.classes)
    data = FitData.of(train, val, seed=args.seed, task=args.task, max_images=args.max_images)
    settings = checked(FitSettings(**given), data)
    check_target(out)
    if len(name) > MAX_NAME:
        raise UsageError(f"expected a --name of at most {MAX_NAME} characters, got {len(name)}")
    model_args = arguments.key_values(args.model_arg)
    outputs = data.task.network_outputs(data.train.classes)
    recipe = Recipe(described.spec or args.model, outputs, {**described.model_args, **model_args})
    check_network(asdict(recipe))
    net = load_network(args.model, weights=args.weights, num_classes=outputs, model_args=model_args)
    compute = settings.compute(Reducer.start() if args.distributed else None)
    device, reducer = compute.device, compute.reducer
    check_output(net.to(device), example_input(preprocess).to(device), recipe.num_classes, name=recipe.spec)
    is_first = reducer.rank == 0
    if args.graph:
        forget_recipe(net)
    if recipe_of(net) is None:
        check_exportable(net, example_input(preprocess).to(device), settings.precision)
    if is_first:
        print(
            f"train: {data.train.name}, {len(data.train)} images, {data.task_fit.describe_labels(data.train)}; "
            f"val: {data.val.name}, {len(data.val)} images"
        )
        if order_note:
            print(order_note)
        if notes := notes_of(net):
            print(f"network: {'; '.join(notes)}")
        print(f"preprocessing: {preprocess}", flush=True)
    if args.dry_run:
        print(look(net, data, compute, args.max_bad_images), flush=True)
        print(estimate(net, data, settings, compute, args.max_bad_images))
        return
    weights = [args.weights] if args.weights else described.weights
    provenance = provenance_of(recipe, weights, settings, data)
    check_disjoint(data, provenance)
    try:
        check_text({"name": name, **provenance})
    except ValueError as error:
        raise UsageError(f"expected names and flags in UTF-8, got {error}; change it") from error
    folder = out.with_name(f".{out.name}.stages")
    flags.check_no_bundle(out, args.overwrite or (folder.exists() and not args.fresh))
    if args.cache != "off":
        data = data.cached(Path(args.cache) if args.cache else None, processes=reducer.world)
    if is_first:
        print(look(net, data, compute, args.max_bad_images), flush=True)
    data, left_out = data.readable(args.max_bad_images, reducer)
    if left_out:
        data.check_rates(alpha=settings.alpha, coverage=settings.coverage)
        provenance |= origins_of(data)
        if is_first:
            print(*left_out, sep="\n", flush=True)
    checkpoint = Checkpoint.of(folder, job_of(provenance, settings, data, compute, described.configuration), reducer)
    resumed = checkpoint.is_resumed and not args.fresh
    flags.check_no_bundle(out, args.overwrite or resumed)
    if not resumed:
        checkpoint.clear()
    report, projection, model = run_stages(net, data, settings, compute, name, provenance, checkpoint)
    if not is_first:
        return
    manifest = model.save(out)
    page.remove(out)
    (out / "collapse.csv").write_text(to_csv(report))
    print(f"wrote {out} (version {manifest.version})", flush=True)
    content = Content(manifest.version)
    if not args.no_report:
        content = collect_fit(model, net, data, projection.report, compute, manifest.version)
        content.save(out)
    facts = facts_about(out, manifest, model.calibration, content)
    page.write_card(facts)
    print(facts.to_text())
    if not args.no_report:
        print(f"report: {page.write(facts, out)}")
    checkpoint.clear()
    print(f"next: {page.serve_command(out, manifest)}")


def look(net: nn.Module, data: FitData, compute: Compute, max_bad_images: int) -> str:
    """Return the result of the network itself on a few random images, so that it is seen before all are decoded."""
    train, val = (
        only_readable(drawn(images, OWN_IMAGES, data.seed), max_bad_images) for images in (data.train, data.val)
    )
    return data.task_fit.first_look(net, train, val, compute)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-fit``."""
    return flags.run(fit, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
