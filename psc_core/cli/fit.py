"""``psc-fit``: fit a bundle from a trained network and two folders of images.

What needs torch is imported when the fit begins: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psc_core import settings
from psc_core.cli import flags
from psc_core.data import MAX_BAD_IMAGES
from psc_core.network import LIBRARIES
from psc_core.settings import DEFAULTS, FACTS, HEAD_KINDS, choices_of

_EXAMPLE = """example:
  psc-fit --model torchvision:resnet18 --weights net.safetensors --train images/train --val images/val --out bundle

  psc-fit --model hf:my-vit --train images/train --val images/val --out bundle

  psc-fit --task regression … --train images/train.csv --val images/val.csv --target age --unit years --out bundle

data sets: a directory class/file.png, a table of images with their classes or numbers (.csv, .tsv, .parquet),
mnist:ROOT, fashion-mnist:ROOT, ambiguous-mnist:ROOT, dirty-mnist:ROOT, cifar10:ROOT, rotated-mnist:ROOT, or
package.module:factory.  Several processes: torchrun --nproc-per-node N -m psc_core.cli.fit --distributed …
"""


def parser() -> argparse.ArgumentParser:
    description = "Fit uncertainty to a trained image classifier or regression, without retraining it."
    cli = flags.command("psc-fit", description, _EXAMPLE)
    cli.usage = "%(prog)s --model SPEC [--weights FILE] --train DIR --val DIR --out DIR [flag ...]"

    group = cli.add_argument_group("network")
    specs = (
        f"network: {', '.join(f'{library}:NAME' for library in LIBRARIES)} or package.module:factory; onnx:FILE; "
        "hf:DIR or timm:local-dir:DIR, a folder that transformers or timm saved, with weights, classes and "
        "preprocessing; hf:ORG/NAME, from the Hugging Face cache"
    )
    group.add_argument("--model", required=True, metavar="SPEC", help=specs)
    text = "argument of the network's constructor, such as stem=small; may be repeated"
    group.add_argument("--model-arg", action="append", default=[], metavar="K=V", help=text)
    text = (
        "checkpoint: .safetensors, .pth, .pt, .bin, .ckpt or .index.json; no code in it is run (default: the weights "
        "that come with hf:, timm:local-dir: or onnx:)"
    )
    group.add_argument("--weights", type=Path, metavar="FILE", help=text)
    text = "download files of hf:ORG/NAME that are not in the Hugging Face cache"
    group.add_argument("--allow-download", action="store_true", help=text)

    group = cli.add_argument_group("data")
    group.add_argument("--train", required=True, metavar="DIR", help="training images: a directory or a table")
    group.add_argument(
        "--val", required=True, metavar="DIR", help="validation images, which the network was not trained on"
    )
    text = "column of the tables with the classes or numbers (default: the only one besides the files)"
    group.add_argument("--target", metavar="NAME", help=text)
    group.add_argument("--unit", default="", help="unit of the numbers in the tables, such as years")

    group = cli.add_argument_group("bundle")
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="bundle to write")
    group.add_argument("--overwrite", action="store_true", help="replace the bundle in --out, and its report")
    group.add_argument("--name", help="name of the model (default: the name of --out)")
    text = "store the network as an ONNX graph, which needs none of its code to be loaded; always on for hf: and onnx:"
    group.add_argument("--graph", action="store_true", help=text)
    text = "write no report, which would contain training and validation images, or their numbers; it has the verdict"
    group.add_argument("--no-report", action="store_true", help=text)

    group = cli.add_argument_group("answers")
    text = "prediction of the network: a class, even where a table holds class indices, or a number"
    group.add_argument("--task", choices=tuple(HEAD_KINDS), help=f"{text} (default: {DEFAULTS.task})")
    text = (
        "psc: the head's; original: the network's own, scaled by a temperature; auto: of a classifier the better on "
        "validation images, of a regression the head's"
    )
    _add_setting(group, "predictions", text)
    kinds = "; ".join(f"for {task}: {', '.join(names)}" for task, names in HEAD_KINDS.items())
    text = f"model that predicts from the features; {kinds}; laplace is the paper's (default: the first)"
    group.add_argument("--head", choices=sum(HEAD_KINDS.values(), ()), help=text)
    _add_setting(group, "alpha", "false-alarm rate of the OOD decision")
    _add_setting(group, "coverage", "coverage of the prediction sets, or of the intervals of a regression")
    text = (
        "maximum error rate of clear images, shown with 95 %% confidence or the fit ends; auto: the lowest of 0.05, "
        "0.1, 0.15 and 0.2 that can be shown, and nothing is accepted where none can be"
    )
    _add_setting(group, "risk", text, metavar="RATE|auto")
    text = "widest interval that counts as certain, in the unit of the numbers, for a regression"
    _add_setting(
        group, "max_width", text, metavar="WIDTH", default="the width of an interval that is the same for all images"
    )
    text = "store N training images, some of each class, to show the nearest ones to an image"
    _add_setting(group, "stored_images", text, metavar="N", default="none")
    flags.add_flags(cli)

    group = cli.add_argument_group("run")
    text = f"device: auto, cpu, cuda or cuda:N (default: {DEFAULTS.device})"
    group.add_argument("--device", default=DEFAULTS.device, help=text)
    _add_setting(group, "precision", "precision of the network, while fitting and when served")
    _add_setting(group, "batch_images", "number of images sent through the network at once")
    _add_setting(
        group, "max_images", "fit on at most N training images, balanced over classes", metavar="N", default="all"
    )
    budget = DEFAULTS.max_memory
    text = f"memory for the statistics of one stage (default: {budget >> 30}G)"
    group.add_argument("--max-memory", type=settings.byte_count, default=budget, metavar="SIZE", help=text)
    text = "folder for decoded images, or off to decode them in every pass (default: the system's temporary folder)"
    group.add_argument("--cache", metavar="DIR|off", help=text)
    text = "leave out up to N images that cannot be decoded; with --cache off, N above 0 costs another pass"
    text = f"{text} (default: {MAX_BAD_IMAGES})"
    group.add_argument("--max-bad-images", type=settings.whole, default=MAX_BAD_IMAGES, metavar="N", help=text)
    group.add_argument("--distributed", action="store_true", help="run as one of the processes that torchrun started")
    text = (
        "fit on a few images only, write nothing, and print the time, memory and disk that a fit on all of them takes"
    )
    group.add_argument("--dry-run", action="store_true", help=text)
    text = "print the measurements behind each choice: all layers, sizes, checks and scores"
    group.add_argument("--verbose", action="store_true", help=text)
    group.add_argument("--fresh", action="store_true", help="ignore the checkpoint of an interrupted run")
    _add_setting(group, "seed", "seed of the split of the validation images and of the head")

    group = cli.add_argument_group("method (the paper's settings and others, for comparisons)")
    group.add_argument("--layer", default=DEFAULTS.layer, metavar="NAME", help="chosen layer, or auto (default)")
    group.add_argument("--layers", metavar="REGEX", help="measure only layers whose names match")
    _add_setting(group, "granularity", "modules that count as layers; operations is the paper's")
    _add_setting(group, "epsilon", "NC1 below which a layer has collapsed")
    _add_setting(group, "c_proj", "number of channel components")
    _add_setting(group, "d_proj", "number of spatial components")
    _add_setting(group, "minimum_dim", "smallest product of --c-proj and --d-proj that auto considers")
    group.add_argument("--no-second-scaling", action="store_true", help="do not standardise z")
    _add_setting(group, "density", "density that measures how typical an image is; gda is the paper's")
    _add_setting(group, "pca", "dimension that the density works in")
    text = (
        "input of a classifier's head: z and the layer's features averaged over positions, or z alone, as in the paper"
    )
    _add_setting(group, "head_input", text)
    text = (
        "score behind the OOD decision: the checks texture, content (the density) and confidence combined, or the "
        "density alone, as in the paper"
    )
    _add_setting(group, "ood_score", text)
    return cli


def _add_setting(group: Any, name: str, text: str, *, metavar: str | None = None, default: str | None = None) -> None:
    """Add the flag of a field of :class:`.FitSettings` to a group; ``default`` says in words what None means."""
    value, wanted, choices = getattr(DEFAULTS, name), FACTS[name].range, choices_of(name)
    takes_auto = value is None and default is None
    shown = default or ("auto" if value is None else value)
    options: dict[str, Any] = {"default": value, "help": f"{text} (default: {shown})"}
    if wanted is None:
        options["choices"] = choices
    else:
        options["type"] = wanted.parse_or_auto if takes_auto else wanted.parse
        if metavar or wanted.kind is int:
            options["metavar"] = metavar or ("N|auto" if takes_auto else "N")
    group.add_argument(f"--{name.replace('_', '-')}", **options)


def fit(args: argparse.Namespace) -> None:
    """Open and check what the flags name, run all stages, and write bundle and report."""
    from psc_core.cli import job as stages
    from psc_core.compute import FIT_STEPS, begin, steps
    from psc_core.fit import fit_stages

    net, network, job = stages.open_job(args)
    is_first = job.compute.rank == 0  # of several processes
    job.say(stages.opening_text(net, job.data))
    names = () if args.dry_run else FIT_STEPS[: -1 if args.no_report else None]
    with steps(names) as progress:
        begin("original network")
        if is_first:
            first = job.first_evaluation(net, args.max_bad_images)  # Which people see before all images are decoded.
            job.say("\n".join([first.text, *([f"warning: {first.warning}"] if first.warning else [])]))
        if args.dry_run:
            job.say(str(stages.estimate(net, job, args.max_bad_images)))
            return
        provenance = stages.checked_provenance(network, job)
        job, notes = job.decode(args.max_bad_images)
        for note in notes:
            job.say(note)
        job = replace(job, provenance=provenance | stages.origins_of(job.data) if any(job.data.skipped) else provenance)
        checkpoint = stages.open_checkpoint(net, job, network.configuration, args)
        found = fit_stages(net, job, checkpoint)
        if is_first:
            of_network = None if args.no_report else (net, job)
            stages.write(args.out.resolve(), found, of_network, progress, verbose=args.verbose)
            checkpoint.clear()


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(fit, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
