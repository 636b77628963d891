"""Table "projection": NC1 and NC4 of the candidate layer before and after projection, and the c_proj/d_proj figure.

    python -m benchmarks.paper.projection_table --scale cpu --data ROOT

Rows "MNIST" use the networks of the DDU case study (trained on Dirty-MNIST), measured and projected on MNIST.
``--checkpoint FILE`` takes the ResNet-18 from a file; ``--only resnet50 --network resnet50`` runs another network than
the scale's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks import checkpoints, fitting, plots, runs
from benchmarks.checkpoints import Job
from benchmarks.networks import NETWORKS
from benchmarks.paper import common
from benchmarks.runs import Json, Run

NAME = "projection_table"

PAPER: Mapping[tuple[str, str], tuple[float, float, float, float]] = {
    ("resnet18", "mnist"): (0.28, 0.28, 0.99, 0.99),
    ("wide_resnet28_10", "cifar10"): (0.73, 0.75, 0.95, 0.95),
    ("resnet50", "cifar10"): (0.28, 0.50, 0.95, 0.94),
    ("vgg16", "mnist"): (0.26, 0.36, 0.97, 0.97),
}
"""NC1 before and after, NC4 before and after."""

TRAINED_ON = {"mnist": "dirty-mnist", "cifar10": "cifar10"}


def main(argv: list[str] | None = None) -> Json:
    """Run and write the table and the figure."""
    cli = runs.parser(__doc__)
    cli.add_argument("--checkpoint", type=Path, metavar="FILE", help="the ResNet-18, already trained")
    cli.add_argument(
        "--only",
        choices=sorted({network for network, _ in PAPER}),
        action="append",
        help="one network; repeat for more",
    )
    cli.add_argument("--network", choices=sorted(NETWORKS), help="of the one row of --only, instead of the scale's")
    args = cli.parse_args(argv)
    if args.network and len(args.only or ()) != 1:
        cli.error("--network goes with exactly one --only")
    run = runs.start(NAME, args)
    for network, data in PAPER:
        if network in (args.only or [network]):
            job = common.job(run, network, TRAINED_ON[data])
            job = replace(job, network=args.network or job.network)
            measured(run, f"{network}-{data}", job, data, args.checkpoint if network == "resnet18" else None)
    rows = run.finished()
    if "resnet18-mnist" in rows:
        draw(run, rows["resnet18-mnist"])
    return run.write({"rows": rows}, fragment)


def measured(run: Run, name: str, job: Job, data: str, checkpoint: Path | None) -> Json:
    """One row: candidate and projection of one network."""
    images = common.scale_of(run).fit_images
    settings = {
        "job": job.name,
        "checkpoint": checkpoint and checkpoint.name,
        "data": data,
        "epochs": run.epochs,
        "fit_images": images,
    }

    def compute() -> Json:
        trained = checkpoints.obtain(run, job, file=checkpoint)
        datasets = None if data == job.data else fitting.open_pair(run, data, trained)
        found = fitting.stages(run, trained, fit_images=images, datasets=datasets)
        report = found.projection.report
        layers = [found.report.layer(name) for name in found.candidate.layers]
        return {
            "trained": trained.name if checkpoint else job.describe(),
            "layer": "+".join(found.candidate.layers),
            "nc1": [layer.nc1 for layer in layers],
            "nc4": [layer.nc4 for layer in layers],
            "scaled_nc1": report.scaled_nc1,
            "scaled_nc4": report.scaled_nc4,
            "projected_nc1": report.choice.nc1,
            "projected_nc4": report.choice.nc4,
            "c_proj": report.choice.c_proj,
            "d_proj": report.choice.d_proj,
            "warning": report.choice.warning,
            "pooled": report.note,
            "sizes_nc1": report.nc1.tolist(),
            "sizes_nc4": report.nc4.tolist(),
            "epsilon": found.report.epsilon,
            "fit_images": images,
        }

    return run.part(name, settings, compute)


def draw(run: Run, found: Json) -> None:
    """NC1 and NC4 against d_proj, a line for each c_proj."""
    c_max = len(found["sizes_nc1"])
    sizes = sorted({c for c in (1, 2, 4, 8, 16, 32, 64) if c <= c_max} | {c_max})
    with plots.figure(run.figure("sizes"), 1, 2) as axes:
        plots.draw_sizes(axes[0, 0], found["sizes_nc1"], sizes, title="NC1", cutoff=found["epsilon"])
        plots.draw_sizes(axes[0, 1], found["sizes_nc4"], sizes, title="NC4")
        axes[0, 1].legend(frameon=False, fontsize=8)


def fragment(record: Json) -> str:
    """The table with the paper's numbers."""
    rows, lines = record["result"]["rows"], []
    for (network, data), paper in PAPER.items():
        found = rows.get(f"{network}-{data}")
        theirs = [f"{paper[0]:.2f} → {paper[1]:.2f}", f"{paper[2]:.2f} → {paper[3]:.2f}"]
        if found is None:
            lines.append([f"{network}, {data}", "not run", theirs[0], "not run", theirs[1], "—"])
            continue
        numbers = [f"{found[key][-1]:.3f} → {found[f'projected_{key}']:.3f}" for key in ("nc1", "nc4")]
        images = f"{found['fit_images']:,}" if found["fit_images"] else "all"
        what = f"{found['trained']}; {found['layer']}, {found['c_proj']} × {found['d_proj']}; {images} images"
        lines.append(
            [
                f"{network}, {data}",
                numbers[0],
                theirs[0],
                f"{numbers[1]} (scaled {found['scaled_nc4']:.3f})",
                theirs[1],
                what,
            ]
        )
    header = ["network, data", "NC1 layer → z", "paper", "NC4 layer → z", "paper", "what was run"]
    parts = ["## Projection keeps NC1 and NC4", runs.markdown_table(header, lines)]
    if "resnet18-mnist" in rows:
        parts.append(f"![NC1 and NC4 for c_proj and d_proj]({record['name']}-{record['scale']}-sizes.svg)")
    parts += [
        "The last column has the number of training images; scaled: the unprojected layer after the first scaling.",
        runs.provenance(record),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
