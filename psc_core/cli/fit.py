"""``psc-fit``: fit a bundle from a trained network and two folders of images."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psc_core.cli import options as cli_options
from psc_core.errors import UsageError
from psc_core.fitting.checkpoint import Checkpoint
from psc_core.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from psc_core.data.dataset import ImageDataset
    from psc_core.fitting.stages import FitOptions

_EXAMPLE = """example:
  psc-fit --model torchvision:resnet18 --weights net.safetensors --train images/train --val images/val --out bundle

data sets: a directory class/file.png, mnist:ROOT, fashion-mnist:ROOT, ambiguous-mnist:ROOT, dirty-mnist:ROOT,
cifar10:ROOT, or package.module:factory.  Several processes:
torchrun --nproc-per-node N -m psc_core.cli --distributed …
"""


def parser() -> argparse.ArgumentParser:
    """The command line of ``psc-fit``."""
    cli = argparse.ArgumentParser(
        prog="psc-fit",
        description="Fit uncertainty to a trained image classifier, without retraining it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--version", action="version", version=f"psc {__version__}")
    net = cli.add_argument_group("network")
    net.add_argument(
        "--model", required=True, metavar="SPEC", help="torchvision:NAME, timm:NAME or package.module:factory"
    )
    net.add_argument(
        "--model-arg",
        action="append",
        default=[],
        metavar="K=V",
        help="argument of the network's constructor; repeat for more (stem=small, in_channels=1, …)",
    )
    net.add_argument("--weights", type=Path, required=True, metavar="FILE", help="state dict, .safetensors")
    data = cli.add_argument_group("data")
    data.add_argument("--train", required=True, metavar="DIR", help="training images")
    data.add_argument("--val", required=True, metavar="DIR", help="validation images, none of them trained on")
    cli_options.add_preprocess_flags(cli)
    method = cli.add_argument_group("method")
    method.add_argument("--layer", default="auto", metavar="NAME", help="candidate layer, or auto (default)")
    method.add_argument("--layers", metavar="REGEX", help="measure only layers whose name matches")
    method.add_argument(
        "--granularity",
        choices=("operations", "blocks", "all"),
        default="operations",
        help="which modules are layers (default: operations, the paper's)",
    )
    method.add_argument("--epsilon", type=float, default=0.2, help="collapse cut-off for NC1 (default: 0.2)")
    method.add_argument(
        "--c-proj",
        type=cli_options.positive_or_auto,
        default=None,
        metavar="N|auto",
        help="channel components (default: auto)",
    )
    method.add_argument(
        "--d-proj",
        type=cli_options.positive_or_auto,
        default=None,
        metavar="N|auto",
        help="spatial components (default: auto)",
    )
    method.add_argument(
        "--minimum-dim",
        type=cli_options.positive,
        default=64,
        metavar="N",
        help="smallest c·d that auto considers (default: 64)",
    )
    method.add_argument("--no-second-scaling", action="store_true", help="do not standardise z")
    method.add_argument(
        "--density",
        choices=("gda", "tied", "gda++", "pooled++", "rmd"),
        default="pooled++",
        help="what judges whether an image is ordinary; gda is the paper's (default: pooled++)",
    )
    method.add_argument(
        "--pca",
        type=cli_options.positive_or_auto,
        default=None,
        metavar="N|auto",
        help="dimension the density works in (default: auto)",
    )
    method.add_argument(
        "--head",
        choices=("laplace", "sngp", "duq"),
        default="laplace",
        help="what gives the probabilities; laplace is the paper's (default: laplace)",
    )
    method.add_argument(
        "--predictions",
        choices=("psc", "base"),
        default="psc",
        help="psc: the head's; base: the network's own, unchanged, with the density beside them (default: psc)",
    )
    method.add_argument(
        "--alpha",
        type=cli_options.open_unit_interval,
        default=0.05,
        help="false-alarm rate of the OOD decision (default: 0.05)",
    )
    method.add_argument(
        "--ood-score",
        choices=("density", "density+entropy"),
        default="density",
        help="what the OOD decision ranks; density+entropy also counts how ambiguous an image is, for classes whose "
        "images are not ambiguous by nature (default: density)",
    )
    method.add_argument(
        "--coverage",
        type=cli_options.open_unit_interval,
        default=0.95,
        help="coverage of the prediction sets (default: 0.95)",
    )
    method.add_argument(
        "--risk",
        type=cli_options.open_unit_interval,
        default=0.05,
        help="error rate that images below the ambiguity threshold should have (default: 0.05)",
    )
    run = cli.add_argument_group("run")
    run.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    run.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the network, while fitting and served (default: fp32)",
    )
    run.add_argument(
        "--batch-images",
        type=cli_options.positive,
        default=256,
        help="images sent through the network at once (default: 256)",
    )
    run.add_argument(
        "--max-memory",
        type=cli_options.byte_count,
        default=1 << 30,
        metavar="SIZE",
        help="budget of one stage's statistics (default: 1G)",
    )
    run.add_argument("--distributed", action="store_true", help="be one of the processes that torchrun started")
    run.add_argument("--fresh", action="store_true", help="ignore stages of an interrupted run")
    run.add_argument(
        "--seed", type=cli_options.seed, default=0, help="splits the validation images and seeds the head (default: 0)"
    )
    run.add_argument("--name", help="model name (default: the name of --out)")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="bundle to write")
    return cli


def fit(args: argparse.Namespace) -> None:
    """Run all stages and write the bundle."""
    from psc_core.bundle.manifest import check_origin
    from psc_core.compute.device import resolve_device
    from psc_core.compute.distributed import Reducer
    from psc_core.data.spec import open_dataset  # torch is imported behind --help and usage errors
    from psc_core.fitting.stages import FitOptions
    from psc_core.network.load import Recipe, load_network

    args.out = args.out.resolve()
    args.name = args.name or args.out.name
    preprocess = cli_options.preprocess_from(args)
    train = open_dataset(args.train, split="train", preprocess=preprocess)
    val = open_dataset(args.val, split="val", preprocess=preprocess)
    recipe = Recipe(args.model, len(train.classes), cli_options.key_values(args.model_arg))
    check_origin(preprocess.to_json(), recipe.to_json())
    net = load_network(
        args.model,
        weights=args.weights,
        num_classes=recipe.num_classes,
        model_args=recipe.model_args,
        allow_factories=(args.model,),
    )
    device = resolve_device(args.device)
    reducer = Reducer.start() if args.distributed else Reducer()
    options = FitOptions(device, args.precision, args.batch_images, args.epsilon, args.max_memory, args.seed, reducer)
    _run_stages(args, net, train, val, options)


def _run_stages(
    args: argparse.Namespace, net: nn.Module, train: ImageDataset, val: ImageDataset, options: FitOptions
) -> None:
    from psc_core.bundle.io import check_target
    from psc_core.bundle.manifest import MAX_NAME, check_text
    from psc_core.fitting import stages as stage

    check_target(args.out)
    if len(args.name) > MAX_NAME:
        raise UsageError(f"expected a --name of at most {MAX_NAME} characters, got {len(args.name)}")
    stage.check_attainable_rates(val, alpha=args.alpha, coverage=args.coverage, options=options)
    first = options.reducer.rank == 0
    say = print if first else _silent
    say(f"train: {train.name}, {len(train)} images, {len(train.classes)} classes; val: {val.name}, {len(val)} images")
    provenance = _provenance(args, train, val)
    _check_apart(train, val, provenance)
    try:
        check_text({"name": args.name, **provenance})
    except ValueError as error:
        raise UsageError(f"expected names and flags in UTF-8, got {error}; change it") from error
    job = {
        **provenance,
        "settings": {key: getattr(args, key) for key in _SETTINGS if key not in _LATE_SETTINGS},
        "preprocess": train.preprocess.to_json(),
        "device": options.compute().device.type,
    }
    store = Checkpoint(args.out.with_name(f".{args.out.name}.stages"), job, fresh=args.fresh)

    report = store.agreed(store.load_collapse(), options.reducer)
    if report is None:
        report = stage.measure_collapse(
            net, train, val, layers=args.layers, granularity=args.granularity, options=options
        )
        store.save_collapse(report, writer=first)
    candidate = report.candidate(None if args.layer == "auto" else args.layer)
    say(report.table(candidate))

    projection = store.agreed(store.load_projection(), options.reducer)
    if projection is None:
        projection = stage.fit_projection(
            net,
            candidate,
            train,
            val,
            c_proj=args.c_proj,
            d_proj=args.d_proj,
            minimum_dim=args.minimum_dim,
            second_scaling=not args.no_second_scaling,
            options=options,
        )
        store.save_projection(projection, writer=first)
    say(projection.report.summary(report.nc4_of(candidate)))

    psc = stage.fit_psc(
        net,
        candidate,
        projection,
        train,
        val,
        head=args.head,
        density=args.density,
        pca=args.pca,
        predictions=args.predictions,
        alpha=args.alpha,
        coverage=args.coverage,
        risk=args.risk,
        ood_score=args.ood_score,
        name=args.name,
        provenance=provenance,
        collapse_report=report,
        options=options,
    )
    if first:
        manifest = psc.save(args.out)
        (args.out / "collapse.csv").write_text(report.to_csv())
        store.clear()
        metrics = manifest.metrics
        say(
            f"wrote {args.out} (version {manifest.version}): validation accuracy {metrics['accuracy']:.4f}, "
            f"NLL {metrics['nll_nats']:.4f} nats, ECE {metrics['ece']:.4f}"
        )


def _silent(*_: object) -> None:
    """What the other processes say."""


_SETTINGS = (
    "layer",
    "layers",
    "granularity",
    "epsilon",
    "c_proj",
    "d_proj",
    "minimum_dim",
    "no_second_scaling",
    "density",
    "pca",
    "head",
    "predictions",
    "alpha",
    "coverage",
    "risk",
    "ood_score",
    "precision",
    "batch_images",
    "max_memory",
    "seed",
)

_LATE_SETTINGS = ("density", "pca", "head", "predictions", "alpha", "coverage", "risk", "ood_score")
"""Read behind the stages that are kept: changing them after an error does not start again."""


def _provenance(args: argparse.Namespace, train: ImageDataset, val: ImageDataset) -> dict[str, Any]:
    """What the bundle records of its origin: enough to fit it again, no path of this machine."""
    return {
        "psc_version": __version__,
        "model": args.model,
        "model_args": cli_options.key_values(args.model_arg),
        "weights_sha256": _file_digest(args.weights),
        "train": _origin(train),
        "val": _origin(val),
        "settings": {key: getattr(args, key) for key in _SETTINGS},
    }


def _origin(data: ImageDataset) -> dict[str, Any]:
    name = os.fsencode(Path(data.name).name).decode(errors="replace")
    return {"name": name, "images": len(data), "rows": data.examples, "sha256": data.digest()}


def _check_apart(train: ImageDataset, val: ImageDataset, provenance: Mapping[str, Any]) -> None:
    """Refuse the training images as validation images; the digests of files know their names and sizes alone."""
    if provenance["train"]["sha256"] == provenance["val"]["sha256"] and bool((train.image(0) == val.image(0)).all()):
        raise UsageError(
            f"expected --val to be images that the network was not trained on, {val.name} holds the same images as "
            "--train: what is chosen and calibrated on them promises nothing about new ones; hold some images out"
        )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-fit``."""
    return cli_options.run(fit, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
