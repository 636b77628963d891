"""``psc-fit``: fit a bundle from a trained network and two folders of images.

What needs torch is imported when the fit begins: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from psc_core import arguments
from psc_core.cli import flags, preprocessing
from psc_core.density import DENSITIES
from psc_core.network import GRANULARITIES, LIBRARIES
from psc_core.precision import PRECISIONS
from psc_core.settings import HEAD_INPUTS, OOD_SCORES, PREDICTIONS, RANGES, FitSettings
from psc_core.tasks import TASKS, module_of

MAX_BAD_IMAGES: Final = 10
"""Default maximum number of images that a fit leaves out because they cannot be decoded."""

_Group = Any
"""A group of flags; argparse has no public name for it."""

_EXAMPLE = """example:
  psc-fit --model torchvision:resnet18 --weights net.safetensors --train images/train --val images/val --out bundle

  psc-fit --model hf:my-vit --train images/train --val images/val --out bundle

  psc-fit --task regression … --train images/train.csv --val images/val.csv --target age --unit years --out bundle

data sets: a directory class/file.png, a table of images with their classes or numbers (.csv, .tsv, .parquet),
mnist:ROOT, fashion-mnist:ROOT, ambiguous-mnist:ROOT, dirty-mnist:ROOT, cifar10:ROOT, rotated-mnist:ROOT, or
package.module:factory.  Several processes: torchrun --nproc-per-node N -m psc_core.cli --distributed …
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``psc-fit``."""
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
    group.add_argument("--train", required=True, metavar="DIR", help="training images, a directory or a table")
    group.add_argument("--val", required=True, metavar="DIR", help="validation images, none of them trained on")
    text = "column of the tables that holds the classes or numbers (default: the only one beside the files)"
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
    text = "what the network predicts: a class, also where a table holds class indices, or one number"
    group.add_argument("--task", choices=TASKS[::-1], help=f"{text} (default: {FitSettings.task})")
    text = "auto: the better on validation images; psc: the head's; base: the network's own, divided by a temperature"
    _add_choice(group, "--predictions", PREDICTIONS, text)
    heads_of = {task: tuple(module_of(task, "psc_core.tasks.{}.heads").HEADS) for task in TASKS[::-1]}
    nouns = {task: module_of(task, "psc_core.tasks.{}").NOUN for task in heads_of}
    listed = "; ".join(f"of a {nouns[task]}: {', '.join(heads)}" for task, heads in heads_of.items())
    text = f"what predicts from the features, {listed}; laplace is the paper's (default: the first)"
    group.add_argument("--head", choices=sum(heads_of.values(), ()), help=text)
    _add_rate(group, "--alpha", "false-alarm rate of the OOD decision")
    _add_rate(group, "--coverage", "coverage of the prediction sets, or of a regression's intervals")
    _add_rate(group, "--risk", "error rate that images below the ambiguity threshold keep, with 95 %% confidence")
    text = "width above which an interval makes a number uncertain, in its unit, of a regression (default: no limit)"
    group.add_argument("--max-width", type=RANGES["max_width"].parse, metavar="WIDTH", help=text)
    text = (
        "keep thumbnails of N training images, some of each class, to show what an image is nearest to (default: none)"
    )
    group.add_argument("--keep-examples", type=RANGES["keep_examples"].parse, metavar="N", help=text)


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
    text = "what the OOD decision ranks: the gates texture, kind (the density) and confidence together, or the density "
    text = f"{text}alone, as in the paper"
    _add_choice(group, "--ood-score", OOD_SCORES, text)


def _add_run_flags(group: _Group) -> None:
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    _add_choice(group, "--precision", PRECISIONS, "of the network, while fitting and served")
    _add_number(group, "--batch-images", "images sent through the network at once")
    text = "fit on at most N training images, balanced over classes (default: all)"
    group.add_argument("--max-images", type=RANGES["max_images"].parse, metavar="N", help=text)
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
    group.add_argument("--seed", type=RANGES["seed"].parse, default=0, metavar="N", help=text)


def _add_number(group: _Group, flag: str, text: str) -> None:
    default, wanted = _default_of(flag), RANGES[_name_of(flag)]
    parse, shown = (wanted.parse_or_auto, "auto") if default is None else (wanted.parse, default)
    metavar = "N|auto" if default is None else "N"
    group.add_argument(flag, type=parse, default=default, metavar=metavar, help=f"{text} (default: {shown})")


def _add_choice(group: _Group, flag: str, choices: Sequence[str], text: str) -> None:
    default = _default_of(flag)
    group.add_argument(flag, choices=choices, default=default, help=f"{text} (default: {default})")


def _add_rate(group: _Group, flag: str, text: str) -> None:
    default, parse = _default_of(flag), RANGES[_name_of(flag)].parse
    group.add_argument(flag, type=parse, default=default, help=f"{text} (default: {default})")


def _default_of(flag: str) -> Any:
    return getattr(FitSettings, _name_of(flag))


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def fit(args: argparse.Namespace) -> None:
    """Open and check what the flags name, run all stages, and write bundle and report."""
    from psc_core.cli.estimate import estimate
    from psc_core.cli.job import checked_provenance, decoded, look, open_checkpoint, open_job, write
    from psc_core.cli.provenance import origins_of
    from psc_core.cli.run import run_stages

    job = open_job(args)
    if job.is_first:
        print(*job.opening(), sep="\n", flush=True)
    if args.dry_run:
        print(look(job, args.max_bad_images), flush=True)
        print(estimate(job, args.max_bad_images))
        return
    provenance = checked_provenance(job)
    # Before the images are decoded, for hours perhaps; whether the checkpoint is of this job is only known after that.
    flags.check_no_bundle(job.out, args.overwrite or (job.stages_folder.exists() and not args.fresh))
    job = decoded(job, args)
    if any(job.data.left_out):
        provenance |= origins_of(job.data)
    checkpoint = open_checkpoint(job, provenance, args)
    report, projection, model = run_stages(job.network.net, job, job.name, provenance, checkpoint)
    if job.is_first:
        write(job, report, projection, model, pictures=not args.no_report)
        checkpoint.clear()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-fit``."""
    return flags.run(fit, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
