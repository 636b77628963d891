"""Figure "SN delays collapse": NC1 and NC4 after every convolution, pooling and linear layer, with and without SN.

    python -m benchmarks.paper.collapse_figure --scale cpu --data ROOT

The paper's network is a ResNet-50 on CIFAR-10.  Candidate layers are boxed.  A network collapses once it has learnt its
training images, which takes many epochs on CIFAR-10 and few on digits or on a subset: ``--on mnist``,
``--on cifar10-few-5000 --network resnet18_narrow --schedule ddu --epochs 60`` and
``--on cifar10-few-2000 --network resnet50 --batch 64 --epochs 45`` add them.  ``--only mod sn-mod`` has DDU's modified
network (:mod:`benchmarks.mod`), in which no batch normalisation follows a shortcut to undo its bound.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import checkpoints, fitting, plots, runs, train
from benchmarks.checkpoints import SPECTRAL_NORM, Job
from benchmarks.data import random_images
from benchmarks.networks import NETWORKS
from benchmarks.paper import common
from benchmarks.runs import Json, Run
from benchmarks.train import SCHEDULES
from psc_core.collapse.report import CollapseReport

NAME = "collapse_figure"

TITLES = {
    "base": "without SN",
    "sn": "with SN",
    "sn1": "with SN ≤ 1",
    "mod": "modified, without SN",
    "sn-mod": "modified, with SN",
}
"""The networks: unbounded, with the paper's bound, and with a tighter one; as DDU modifies them."""

BOUNDS = {"sn": SPECTRAL_NORM, "sn1": 1.0, "sn-mod": SPECTRAL_NORM}
"""Maximum spectral norm of the layers of those that have one."""

DATA = {
    "cifar10": "CIFAR-10",
    "cifar10-few-5000": "5,000 of CIFAR-10",
    "cifar10-few-2000": "2,000 of CIFAR-10",
    "mnist": "MNIST",
}
"""Training data; each is a row of the figure."""

FACTORIES = {f"cifar10-few-{images}": f"benchmarks.data:cifar10_few_{images}" for images in (5000, 2000)}
"""Data sets that are not built in."""


def main(argv: list[str] | None = None) -> Json:
    """Run and write the figure and its numbers."""
    cli = runs.parser(__doc__)
    cli.add_argument("--on", choices=sorted(DATA), default="cifar10", help="training data (default: cifar10)")
    cli.add_argument("--network", choices=sorted(NETWORKS), help="default: the scale's network for the ResNet-50")
    cli.add_argument("--batch", type=int, help="labelled examples in a training step, instead of the scale's")
    cli.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate, instead of the scale's")
    cli.add_argument("--only", choices=sorted(TITLES), action="append", help="one network; repeat for more")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for kind in args.only or ("base", "sn"):
        job = common.job(run, "resnet50", FACTORIES.get(args.on, args.on))
        network = (args.network or job.network) + "_mod" * kind.endswith("mod")
        job = replace(job, network=network, batch=args.batch or job.batch, schedule=args.schedule or job.schedule)
        job = replace(job, spectral_norm=BOUNDS.get(kind, 0.0))
        measured(run, f"{args.on}-{kind}", job)
    found = run.finished()
    networks = {
        data: {TITLES[kind]: found[f"{data}-{kind}"] for kind in TITLES if f"{data}-{kind}" in found} for data in DATA
    }
    networks = {data: pair for data, pair in networks.items() if pair}
    draw(run, networks)
    return run.write({"networks": networks}, fragment)


def measured(run: Run, name: str, job: Job) -> Json:
    """Collapse of every layer of one network."""
    images = common.scale_of(run).fit_images
    settings = {"job": job.name, "epochs": run.epochs, "fit_images": images}

    def compute() -> Json:
        trained = checkpoints.obtain(run, job)
        report = fitting.measure(run, trained, fit_images=images)
        measured_on = random_images(trained.train, images)
        candidate = report.candidate()
        return {
            "trained": job.describe(),
            "fit_images": images,
            "train_accuracy": float(train.correct(trained.net, measured_on, run.device).mean()),
            "report": report.to_json(),
            "candidate": list(candidate.layers),
            "reason": candidate.reason,
        }

    return run.part(name, settings, compute)


def draw(run: Run, networks: dict[str, dict[str, Json]]) -> None:
    """NC1 left, NC4 right."""
    with plots.figure(run.figure("layers"), len(networks), 2) as axes:
        for row, (data, pair) in zip(axes, networks.items(), strict=True):
            names = {title: [layer["name"] for layer in found["report"]["layers"]] for title, found in pair.items()}
            boxes = {
                title: [names[title].index(layer) for layer in found["candidate"]] for title, found in pair.items()
            }
            epsilon = next(iter(pair.values()))["report"]["epsilon"]
            for axis, key, cutoff in zip(row, ("nc1", "nc4"), (epsilon, None), strict=True):
                series = {title: [layer[key] for layer in found["report"]["layers"]] for title, found in pair.items()}
                plots.draw_layers(axis, series, boxes, title=f"{DATA[data]}: {key.upper()}", cutoff=cutoff)
            row[0].legend(frameon=False, fontsize=8)


def fragment(record: Json) -> str:
    """The figure and its numbers."""
    lines, about = [], []
    for data, pair in record["result"]["networks"].items():
        for title, found in pair.items():
            report = CollapseReport.from_json(found["report"])
            layers = [layer for layer in report.layers if layer.role != "output"]
            last = report.layer(report.penultimate)
            candidate = report.layer(found["candidate"][0])
            collapsed = sum(layer.nc1 <= report.epsilon for layer in layers)
            lines.append(
                [
                    f"{DATA[data]}, {title}",
                    common.number(found.get("train_accuracy")),
                    f"{collapsed} of {len(layers)}",
                    common.number(last.nc1),
                    common.number(last.nc4),
                    "+".join(found["candidate"]),
                    common.number(candidate.nc1),
                    common.number(candidate.nc4),
                ]
            )
        about.append(f"{DATA[data]}: {', and '.join(found['trained'] for found in pair.values())}.")
    header = [
        "network",
        "training accuracy",
        "layers with NC1 ≤ ε",
        "NC1 penultimate",
        "NC4 penultimate",
        "candidate",
        "its NC1",
        "its NC4",
    ]
    return (
        "\n\n".join(
            [
                "## Spectral normalisation delays collapse",
                "The paper: with SN, NC1 falls under 0.2 at the final layer only; without, earlier, "
                "with as high an NC4.",
                runs.markdown_table(header, lines),
                f"![NC1 and NC4 of every layer]({record['name']}-{record['scale']}-layers.svg)",
                f"{' '.join(about)} CIFAR-10 is JPEG-recompressed (quality 75). The paper: ResNet-50 on CIFAR-10.",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
