"""Figure "SN delays collapse": NC1 and NC4 after every convolution, pooling and linear layer, with and without SN.

    python -m benchmarks.paper.collapse_figure --scale cpu --data ROOT

The paper's network is a ResNet-50 on CIFAR-10.  Chosen layers are boxed.  A network collapses once it has learnt its
training images, which takes many epochs on CIFAR-10 and few on digits or on a subset: ``--on mnist`` and
``--on cifar10-few-5000 --network resnet18_narrow --schedule ddu --epochs 60`` add these.  ``--only mod sn-mod`` takes
the network as DDU modifies it (:mod:`benchmarks.networks`): no batch normalisation after a shortcut undoes its bound.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import fitting, plots, runs
from benchmarks.checkpoints import SPECTRAL_NORM, job_of, obtain
from benchmarks.networks import NETWORKS
from benchmarks.runs import Json, Run
from benchmarks.train import SCHEDULES, Job, correct
from psc_core.collapse import CollapseReport

NAME = "collapse_figure"

TITLES = {  # The networks, unbounded, with the paper's bound and with a tighter one; ``mod`` as DDU modifies them.
    "base": "without SN",
    "sn": "with SN",
    "sn1": "with SN ≤ 1",
    "mod": "modified, without SN",
    "sn-mod": "modified, with SN",
}

BOUNDS = {"sn": SPECTRAL_NORM, "sn1": 1.0, "sn-mod": SPECTRAL_NORM}  # The maximum spectral norm of their layers.

DATA = {"cifar10": "CIFAR-10", "cifar10-few-5000": "5,000 of CIFAR-10", "mnist": "MNIST"}

FACTORIES = {"cifar10-few-5000": "benchmarks.data:cifar10_few_5000"}  # The data sets that are not built in.


def main(argv: list[str] | None = None) -> Json:
    """Measure the networks, and write the figure and its numbers."""
    cli = runs.parser(__doc__)
    cli.add_argument("--on", choices=sorted(DATA), default="cifar10", help="training data (default: cifar10)")
    cli.add_argument("--network", choices=sorted(NETWORKS), help="default: the scale's network for the ResNet-50")
    cli.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate, instead of the scale's")
    cli.add_argument("--only", choices=sorted(TITLES), action="extend", nargs="+", help="some of the networks")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for kind in args.only or ("base", "sn"):
        job = job_of(run, "resnet50", FACTORIES.get(args.on, args.on), spectral_norm=BOUNDS.get(kind, 0.0))
        network = (args.network or job.network) + "_mod" * kind.endswith("mod")
        measured(run, f"{args.on}-{kind}", replace(job, network=network, schedule=args.schedule or job.schedule))
    draw(run, by_data(run.record()))
    return run.write(fragment)


def by_data(record: Json) -> dict[str, dict[str, Json]]:
    """Return the measured networks by their titles, by data."""
    found = runs.results(record)
    networks = {
        data: {TITLES[kind]: found[f"{data}-{kind}"] for kind in TITLES if f"{data}-{kind}" in found} for data in DATA
    }
    return {data: pair for data, pair in networks.items() if pair}


def measured(run: Run, name: str, job: Job) -> Json:
    """Measure the collapse of every layer of one network."""

    def compute() -> Json:
        trained = obtain(run, job)
        report = fitting.measure(run, trained)
        chosen = report.choose()
        return {
            "trained": job.describe(),
            "fit_images": len(trained.fit_on),
            "train_accuracy": float(correct(trained.net, trained.fit_on, run.device).mean()),
            "report": report.to_json(),
            "chosen": list(chosen.layers),
            "reason": chosen.reason,
        }

    return run.part(name, {"job": job.name}, compute)


def draw(run: Run, networks: dict[str, dict[str, Json]]) -> None:
    """Draw NC1 on the left and NC4 on the right."""
    with plots.figure(run.figure("layers"), len(networks), 2) as axes:
        for row, (data, pair) in zip(axes, networks.items(), strict=True):
            names = {title: [layer["name"] for layer in found["report"]["layers"]] for title, found in pair.items()}
            boxes = {title: [names[title].index(layer) for layer in found["chosen"]] for title, found in pair.items()}
            epsilon = next(iter(pair.values()))["report"]["epsilon"]
            for axis, key, measure, cutoff in ((row[0], "nc1", "NC1", epsilon), (row[1], "quality", "NC4", None)):
                series = {title: [layer[key] for layer in found["report"]["layers"]] for title, found in pair.items()}
                plots.draw_layers(axis, series, boxes, title=f"{DATA[data]}: {measure}", cutoff=cutoff)
            row[0].legend(frameon=False, fontsize=8)


def fragment(record: Json) -> str:
    """Return the section with the numbers and the figure."""
    lines = []
    for data, pair in by_data(record).items():
        for title, found in pair.items():
            report = CollapseReport.from_json(found["report"])
            layers = [layer for layer in report.layers if layer.role != "output"]
            collapsed = sum(layer.nc1 <= report.epsilon for layer in layers)
            numbers = [
                runs.number(number)
                for layer in (report.layer(report.penultimate), report.layer(found["chosen"][0]))
                for number in (layer.nc1, layer.quality)
            ]
            lines.append(
                [
                    f"{DATA[data]}, {title}",
                    found["trained"],
                    runs.number(found["train_accuracy"]),
                    f"{collapsed} of {len(layers)}",
                    *numbers[:2],
                    "+".join(found["chosen"]),
                    *numbers[2:],
                ]
            )
    header = ["network", "trained", "training accuracy", "layers with NC1 ≤ ε", "NC1 penultimate", "NC4 penultimate"]
    table = runs.markdown_table([*header, "chosen", "its NC1", "its NC4"], lines)
    figure = f"![NC1 and NC4 of every layer]({record['name']}-{record['scale']}-layers.svg)"
    return "\n\n".join([table, figure, runs.provenance(record)])


if __name__ == "__main__":
    main()
