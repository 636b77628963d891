"""Figure "SN delays collapse": NC1 and NC4 after every convolution, pooling and linear layer, with and without SN.

    python -m benchmarks.paper.collapse_figure --scale cpu --data ROOT

The paper's network is a ResNet-50 on CIFAR-10.  Candidate layers are boxed.  A network collapses on its training
images once it classifies them all; without crops and flips (``--plain``) a few epochs do that.
"""

from __future__ import annotations

from benchmarks import checkpoints, fitting, plots, runs
from benchmarks.paper import common
from benchmarks.runs import Json, Run
from psc_core.candidate import CollapseReport

NAME = "collapse_figure"

TITLES = {"base": "without SN", "sn": "with SN"}
"""The two networks by part."""


def main(argv: list[str] | None = None) -> Json:
    """Run and write the figure with the numbers under it."""
    cli = runs.parser(__doc__)
    cli.add_argument("--only", choices=sorted(TITLES), action="append", help="one network; repeat for more")
    cli.add_argument("--plain", action="store_true", help="train without crops and flips")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for part in args.only or TITLES:
        measured(run, part, augment=not args.plain)
    networks = {TITLES[part]: found for part, found in run.finished().items()}
    draw(run, networks)
    return run.write({"networks": networks}, fragment)


def measured(run: Run, part: str, *, augment: bool) -> Json:
    """Collapse of every layer of one network."""
    job = common.job(run, "resnet50", "cifar10", spectral_norm=part == "sn", augment=augment)
    images = common.scale_of(run).fit_images
    settings = {"job": job.name, "epochs": run.epochs, "fit_images": images}

    def compute() -> Json:
        trained = checkpoints.obtain(run, job)
        report = fitting.measure(run, trained, fit_images=images)
        candidate = report.candidate()
        return {
            "trained": job.describe(),
            "fit_images": images,
            "report": report.to_json(),
            "candidate": list(candidate.layers),
            "reason": candidate.reason,
        }

    return run.part(part, settings, compute)


def draw(run: Run, networks: dict[str, Json]) -> None:
    """NC1 left, NC4 right."""
    names = {title: [layer["name"] for layer in found["report"]["layers"]] for title, found in networks.items()}
    boxes = {title: [names[title].index(layer) for layer in found["candidate"]] for title, found in networks.items()}
    epsilon = next(iter(networks.values()))["report"]["epsilon"]
    with plots.figure(run.figure("layers"), 1, 2) as axes:
        for axis, key, cutoff in zip(axes.flat, ("nc1", "nc4"), (epsilon, None), strict=True):
            series = {title: [layer[key] for layer in found["report"]["layers"]] for title, found in networks.items()}
            plots.draw_layers(axis, series, boxes, title=key.upper(), cutoff=cutoff)
        axes.flat[0].legend(frameon=False, fontsize=8)


def fragment(record: Json) -> str:
    """The figure, and the numbers that its message rests on."""
    lines = []
    for title, found in record["result"]["networks"].items():
        report = CollapseReport.from_json(found["report"])
        layers = [layer for layer in report.layers if layer.role != "output"]
        last = report.layer(report.penultimate)
        chosen = report.layer(found["candidate"][0])
        collapsed = sum(layer.nc1 <= report.epsilon for layer in layers)
        lines.append(
            [
                title,
                f"{collapsed} of {len(layers)}",
                common.number(last.nc1),
                common.number(last.nc4),
                "+".join(found["candidate"]),
                common.number(chosen.nc1),
                common.number(chosen.nc4),
            ]
        )
    header = ["network", "layers with NC1 ≤ ε", "NC1 penultimate", "NC4 penultimate", "candidate", "its NC1", "its NC4"]
    trained = next(iter(record["result"]["networks"].values()))["trained"]
    return (
        "\n\n".join(
            [
                "### Spectral normalisation delays collapse",
                "The paper: with SN, NC1 falls under 0.2 at the final layer only; without, earlier, "
                "with as high an NC4.",
                runs.markdown_table(header, lines),
                f"![NC1 and NC4 of every layer]({record['name']}-{record['scale']}-layers.svg)",
                f"CIFAR-10, JPEG-recompressed (quality 75); {trained}, and the same with SN ≤ 3. The paper: ResNet-50.",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
