"""Table "CIFAR-10 UQ": accuracy, NLL and ECE of the network, with temperature scaling, PSC or SN.

    python -m benchmarks.paper.cifar10_uq --scale cpu --data ROOT --seeds 0 1 2

Every seed and network is a part, and the table holds all parts so far.  Its numbers are means ± standard errors over
seeds, which change the initialisation, the order and the split of the validation images.

The temperature is fitted on all validation images.  ``psc-fit`` selects on one half of them and keeps the other for
calibration (p-values, prediction sets), so PSC has two rows: as ``psc-fit`` fits it, and with a head selected on the
same images as the temperature.  "Calibrated" is a perfectly calibrated classifier on as many images: the ECE of labels
drawn from PSC's own probabilities.

For a second column, validation and test images are divided anew at random, in the same proportion, several times for
every network (:mod:`benchmarks.probabilities` says why).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from benchmarks import fitting, runs
from benchmarks.checkpoints import SPECTRAL_NORM, job_of, obtain, scale_of
from benchmarks.probabilities import (
    DIVISIONS,
    Examples,
    divide,
    examples_of,
    head_of,
    probabilities,
    qualities,
    quality,
)
from benchmarks.runs import Json, Run
from psc_core.heads.base import ClassifierHead as Head

NAME = "cifar10_uq"

ROWS: Mapping[str, str] = {  # The measured rows, in the table's order.
    "dnn": "DNN",
    "temperature": "DNN, temperature scaling",
    "psc_all": "DNN-PSC, head selected on the same images",
    "psc": "DNN-PSC, as `psc-fit` makes it",
    "calibrated": "a calibrated classifier",
    "sn": "DNN-SN (retrained)",
}

PUBLISHED: Sequence[tuple[str, str, str, str]] = (  # The published rows, all on the original CIFAR-10.
    ("paper, WRN-28-10, 10 seeds: DNN", "96.00 ± 0.01", "0.150 ± 0.001", "0.023 ± 0.001"),
    ("paper: DNN-PSC", "95.80 ± 0.01", "0.136 ± 0.001", "0.005 ± 0.000"),
    ("paper: DNN-SN", "96.00 ± 0.03", "0.153 ± 0.002", "0.022 ± 0.001"),
    ("uncertainty-baselines, WRN-28-10: deterministic", "—", "0.159", "0.023"),
    ("uncertainty-baselines: SNGP", "—", "0.134", "0.007"),
    ("uncertainty-baselines: ensemble of 4", "—", "0.114", "0.010"),
)


def main(argv: list[str] | None = None) -> Json:
    """Measure the seeds asked for, and write the table of all seeds so far."""
    cli = runs.parser(__doc__)
    cli.add_argument("--seeds", type=int, nargs="+", help="default: the scale's")
    cli.add_argument("--only", choices=("base", "sn"), action="extend", nargs="+", help="rows of one network")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for seed in args.seeds or scale_of(run).seeds:
        for part in args.only or ("base", "sn"):
            (plain if part == "base" else spectral)(replace(run, seed=seed))
    return run.write(fragment)


def plain(run: Run) -> Json:
    """Measure softmax, temperature scaling and PSC on one seed's network."""
    job = job_of(run, "wide_resnet28_10", "cifar10")

    def compute() -> Json:
        trained = obtain(run, job)
        psc = fitting.psc_of(run, trained, fitting.stages(run, trained))
        train = examples_of(run, trained, psc, trained.fit_on, logits=False)
        val, test = (examples_of(run, trained, psc, data) for data in (trained.val, trained.test_on))
        return {
            "trained": job.describe(),
            "layer": psc.layer,
            "fit_images": len(trained.fit_on),
            "images": len(trained.test_on),
            "rows": rows_of(run, train, val, test, cast(Head, psc.pipeline.scorer.head)),
            "divided": [rows_of(run, train, *divide(run, val, test, number)) for number in range(DIVISIONS)],
        }

    return run.part(f"seed{run.seed}-base", {"job": job.name, "divisions": DIVISIONS}, compute)


def spectral(run: Run) -> Json:
    """Measure softmax on one seed's network with spectral normalisation."""
    job = job_of(run, "wide_resnet28_10", "cifar10", spectral_norm=SPECTRAL_NORM)

    def compute() -> Json:
        trained = obtain(run, job)
        test = fitting.penultimate_features(run, trained, trained.test_on, per_example=True)
        return {"trained": job.describe(), "rows": {"sn": quality(test.logits.softmax(1), test.labels)}}

    return run.part(f"seed{run.seed}-sn", {"job": job.name}, compute)


def rows_of(run: Run, train: Examples, val: Examples, test: Examples, head: Head | None = None) -> Json:
    """Return the rows of both heads of PSC, by default selected on half of ``val``, beside those of the others."""
    found = qualities(run, train, val, test)
    half = head or head_of(run, train, val.take(slice(len(val.labels) // 2)))
    return {**found, "psc_all": found["psc"], "psc": quality(probabilities(run, half, test), test.labels)}


def fragment(record: Json) -> str:
    """Return the table beside the published rows."""
    parts = runs.results(record).values()
    lines = []
    for key, title in ROWS.items():
        rows = [part["rows"][key] for part in parts if key in part["rows"]]
        divided = [part["divided"] for part in parts if key in part.get("divided", [{}])[0]]
        cells = [_cell(rows, *column) for column in (("accuracy", 100, 2), ("nll", 1, 4), ("ece", 1, 4))]
        eces = [statistics.mean(division[key]["ece"] for division in each) for each in divided]
        seeds = f" ({len(rows)} {'seed' if len(rows) == 1 else 'seeds'})" if rows else ""
        lines.append([f"{title}{seeds}", *cells, runs.plus_minus(eces) if eces else "—"])
    header = ["classifier", "accuracy, %", "NLL, nats", "ECE", "ECE, divided at random"]
    table = runs.markdown_table(header, [*lines, *([*row, "—"] for row in PUBLISHED)])
    return "\n\n".join([table, runs.provenance(record)])


def _cell(rows: Sequence[Json], metric: str, scale: float, digits: int) -> str:
    if not rows:
        return "not run"
    return runs.plus_minus([scale * row[metric] for row in rows], digits) if metric in rows[0] else "—"


if __name__ == "__main__":
    main()
