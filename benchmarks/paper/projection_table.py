"""Table "projection": NC1 and NC4 of the chosen layer before and after projection, and the c_proj/d_proj figure.

    python -m benchmarks.paper.projection_table --scale cpu --data ROOT

The rows "MNIST" use the networks of the DDU case study (trained on Dirty-MNIST), measured and projected on MNIST.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import fitting, plots, runs
from benchmarks.checkpoints import job_of, obtain
from benchmarks.runs import Json, Run

NAME = "projection_table"

PAPER: Mapping[tuple[str, str], tuple[float, float, float, float]] = {  # NC1, NC4, before and after.
    ("resnet18", "mnist"): (0.28, 0.28, 0.99, 0.99),
    ("wide_resnet28_10", "cifar10"): (0.73, 0.75, 0.95, 0.95),
    ("resnet50", "cifar10"): (0.28, 0.50, 0.95, 0.94),
    ("vgg16", "mnist"): (0.26, 0.36, 0.97, 0.97),
}

TRAINED_ON = {"mnist": "dirty-mnist", "cifar10": "cifar10"}


def main(argv: list[str] | None = None) -> Json:
    """Measure the rows, and write the table and the figure."""
    cli = runs.parser(__doc__)
    networks = [network for network, _ in PAPER]
    cli.add_argument("--only", choices=networks, action="extend", nargs="+", help="some of the networks")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for network, data in PAPER:
        if network in (args.only or networks):
            measured(run, network, data)
    rows = runs.results(run.record())
    if "resnet18-mnist" in rows:
        draw(run, rows["resnet18-mnist"])
    return run.write(fragment)


def measured(run: Run, network: str, data: str) -> Json:
    """Return the row of one network: its chosen and projection."""
    job = job_of(run, network, TRAINED_ON[data])

    def compute() -> Json:
        trained = obtain(run, job)
        pair = fitting.pair_of(run, trained, data)
        found = fitting.stages(run, trained, data=pair)
        report = found.projection.report
        layers = [found.report.layer(name) for name in found.chosen.layers]
        return {
            "trained": job.describe(),
            "layer": "+".join(found.chosen.layers),
            "nc1": [layer.nc1 for layer in layers],
            "nc4": [layer.quality for layer in layers],
            "scaled_nc4": report.scaled_nc4,
            "projected_nc1": report.of_size()[0],
            "projected_nc4": report.of_size()[1],
            "c_proj": report.c_proj,
            "d_proj": report.d_proj,
            "sizes_nc1": report.nc1.tolist(),
            "sizes_nc4": report.nc4.tolist(),
            "epsilon": found.report.epsilon,
            "fit_images": len(pair[0]),
        }

    return run.part(f"{network}-{data}", {"job": job.name, "data": data}, compute)


def draw(run: Run, found: Json) -> None:
    """Draw NC1 and NC4 against d_proj, a line for each c_proj."""
    c_max = len(found["sizes_nc1"])
    sizes = sorted({c for c in (1, 2, 4, 8, 16, 32, 64) if c <= c_max} | {c_max})
    with plots.figure(run.figure("sizes"), 1, 2) as axes:
        plots.draw_sizes(axes[0, 0], found["sizes_nc1"], sizes, title="NC1", cutoff=found["epsilon"])
        plots.draw_sizes(axes[0, 1], found["sizes_nc4"], sizes, title="NC4")
        axes[0, 1].legend(frameon=False, fontsize=8)


def fragment(record: Json) -> str:
    """Return the table with the paper's numbers."""
    rows, lines = runs.results(record), []
    for (network, data), paper in PAPER.items():
        found = rows.get(f"{network}-{data}")
        theirs = [f"{paper[0]:.2f} → {paper[1]:.2f}", f"{paper[2]:.2f} → {paper[3]:.2f}"]
        nc1, nc4, what = "not run", "not run", "—"
        if found is not None:
            nc1, nc4 = (f"{found[key][-1]:.3f} → {found[f'projected_{key}']:.3f}" for key in ("nc1", "nc4"))
            nc4 += f" (scaled {found['scaled_nc4']:.3f})"
            what = f"{found['trained']}; {found['layer']}, {found['c_proj']} × {found['d_proj']}"
            what += f"; {found['fit_images']:,} images"
        lines.append([f"{network}, {data}", nc1, theirs[0], nc4, theirs[1], what])
    header = ["network, data", "NC1 layer → z", "paper", "NC4 layer → z", "paper", "what was run"]
    figure = f"![NC1 and NC4 for c_proj and d_proj]({record['name']}-{record['scale']}-sizes.svg)"
    shown = [figure] if "resnet18-mnist" in rows else []
    return "\n\n".join([runs.markdown_table(header, lines), *shown, runs.provenance(record)])


if __name__ == "__main__":
    main()
