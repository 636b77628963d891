"""``psc-eval``: measure a bundle on test images, beside the detectors people use instead."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from psc_core.cli import flags
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import open_dataset
from psc_core.errors import UsageError
from psc_core.evaluation import evaluate as measure
from psc_core.evaluation.baselines import Baselines, fit_baselines
from psc_core.evaluation.tables import to_json, to_markdown, to_text
from psc_core.evaluation.values import compare_values, numbers_in, score_numbers
from psc_core.model.load import load_model
from psc_core.model.predictor import PSC
from psc_core.model.regressor import PSCRegressor
from psc_core.network.backbone import example_input
from psc_core.network.layers import list_layers
from psc_core.network.load import bounded_size, load_network
from psc_core.report import page
from psc_core.report.collect import image_set, pictures_of, value_set
from psc_core.report.content import FILE, Content, Picture, Role, ScoredSet
from psc_core.report.facts import facts_of

WRITTEN = (page.PAGE, page.FIGURES, "report.json", "report.md")
"""What ``--out`` gets."""

_EXAMPLE = """example:
  psc-eval --bundle bundle --id images/test --ood textures=images/textures --out report
  psc-eval … --weights net.safetensors --train images/train --val images/val    (baselines beside PSC)
"""


def parser() -> argparse.ArgumentParser:
    """The command line of ``psc-eval``."""
    description = "Accuracy or error, calibration, OOD detection and nominal rates of a bundle."
    cli = flags.command("psc-eval", description, _EXAMPLE)
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="from psc-fit")
    cli.add_argument(
        "--id", required=True, metavar="DIR", help="in-distribution test images, labelled, or with numbers"
    )
    text = "out-of-distribution images; repeat for more"
    cli.add_argument("--ood", action="append", default=[], metavar="NAME=DIR", help=text)
    beside = cli.add_argument_group("baselines (all three or none)")
    beside.add_argument("--weights", type=Path, metavar="FILE", help="the whole network's state dict, .safetensors")
    beside.add_argument("--train", metavar="DIR", help="training images")
    beside.add_argument("--val", metavar="DIR", help="validation images")
    text = "network factories package.module:factory that the bundle may import"
    cli.add_argument(
        "--allow-factories", action="extend", type=flags.by_commas, default=[], metavar="SPEC[,SPEC]", help=text
    )
    cli.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    text = "images sent through the network at once (default: 256)"
    cli.add_argument("--batch-images", type=flags.positive, default=256, help=text)
    cli.add_argument("--out", type=Path, metavar="DIR", help=f"write {', '.join(WRITTEN)} here")
    cli.add_argument("--overwrite", action="store_true", help="replace those that --out holds")
    return cli


def evaluate(args: argparse.Namespace) -> None:
    """Measure and print."""
    given = [value is not None for value in (args.weights, args.train, args.val)]
    if any(given) and not all(given):
        raise UsageError("expected --weights, --train and --val together, or none of them")
    if args.out and not args.overwrite:
        flags.check_free(args.out, WRITTEN)
    psc = load_model(args.bundle, device=args.device, allow_factories=args.allow_factories)
    if isinstance(psc, PSCRegressor):
        target, unit = psc.target.name, psc.target.unit
        id_data = open_dataset(args.id, split="test", preprocess=psc.preprocess, target=target, unit=unit)
    else:
        id_data = open_dataset(args.id, split="test", preprocess=psc.preprocess)
    ood: dict[str, ImageDataset] = {}
    for text in args.ood:
        name, _, spec = text.partition("=")
        if not name or not spec:
            raise UsageError(f"expected --ood NAME=DIR, got {text!r}")
        if name in ood:
            raise UsageError(f"--ood {name}=… is given twice; use another name")
        ood[name] = open_dataset(spec, split="test", preprocess=psc.preprocess, labelled_images=False)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if isinstance(psc, PSCRegressor):
        if all(given):
            raise UsageError("a regression has no baselines; leave out --weights, --train and --val")
        evaluate_numbers(args, psc, id_data, ood)
        return
    baselines = _baselines(args, psc) if all(given) else None
    measure.check_model_classes(psc, id_data)
    inside, *others = (
        measure.score_images(psc, data, baselines, batch_images=args.batch_images) for data in (id_data, *ood.values())
    )
    outside = dict(zip(ood, others, strict=True))
    report = measure.compare(psc, id_data, inside, outside)
    print(to_text(report))
    if args.out:
        (args.out / "report.json").write_text(json.dumps(to_json(report), indent=2) + "\n")
        (args.out / "report.md").write_text(to_markdown(report))
        sets = [image_set("test", Role.TEST, id_data, inside)]
        sets += [image_set(name, Role.OOD, ood[name], scored) for name, scored in outside.items()]
        write_page(args.bundle, psc.version, sets, args.out, pictures_of(id_data, inside))


def evaluate_numbers(
    args: argparse.Namespace, model: PSCRegressor, id_data: ImageDataset, ood: Mapping[str, ImageDataset]
) -> None:
    """Measure a regression and print."""
    numbers_in(id_data, model)  # Before the passes.
    inside, *others = (score_numbers(model, data, batch_images=args.batch_images) for data in (id_data, *ood.values()))
    outside = dict(zip(ood, others, strict=True))
    report = compare_values(model, id_data, inside, outside)
    print(report.to_text())
    if args.out:
        (args.out / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
        (args.out / "report.md").write_text(report.to_text() + "\n")
        sets = [value_set("test", Role.TEST, inside, id_data)]
        sets += [value_set(name, Role.OOD, scored, ood[name]) for name, scored in outside.items()]
        write_page(args.bundle, model.version, sets, args.out)


def write_page(
    bundle: Path, version: str, sets: Iterable[ScoredSet], out: Path, pictures: tuple[Picture, ...] = ()
) -> None:
    """Write the report of the bundle's fit, where it has one, with further sets into ``out``, and say where it is."""
    content = Content.load(bundle) if (bundle / FILE).exists() else Content(version)
    print(f"report: {page.write(facts_of(bundle, content.with_sets(sets, pictures)), out)}")


def _baselines(args: argparse.Namespace, psc: PSC) -> Baselines:
    train = open_dataset(args.train, split="train", preprocess=psc.preprocess)
    val = open_dataset(args.val, split="val", preprocess=psc.preprocess)
    for data in (train, val):
        measure.check_model_classes(psc, data)
    recipe = psc.backbone.recipe
    with bounded_size(recipe):
        net = load_network(**asdict(recipe), weights=args.weights)
    layers = list_layers(net, example_input(psc.preprocess))
    penultimate = [layer.name for layer in layers if layer.role == "penultimate"]
    if not penultimate:
        raise UsageError(f"expected a network with a layer before its output for the baselines, {recipe.spec} has none")
    compute = Compute(psc.device, batch_images=args.batch_images)
    return fit_baselines(net, penultimate[0], train, val, compute=compute)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-eval``."""
    return flags.run(evaluate, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
