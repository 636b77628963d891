"""Table "CIFAR-10 UQ": accuracy, NLL and ECE of the network, of temperature scaling, of PSC and of SN.

    python -m benchmarks.paper.cifar10_uq --scale cpu --data ROOT --seeds 0 1 2

Every seed and network is a part; the table holds all parts run so far.  Means ± standard errors over seeds, which
change initialisation, order, and the split of the validation images.

The temperature is fitted on all validation images.  ``psc-fit`` selects on one half of them and keeps the other for
calibration (p-values, prediction sets), so PSC has two rows: as ``psc-fit`` makes it, and with a head selected on the
same images as the temperature.  "Calibrated" is a perfectly calibrated classifier on as many images: the ECE of labels
drawn from PSC's own probabilities.

A second column divides validation and test images anew at random, in the same proportion, several times for every
network (:mod:`benchmarks.probabilities` says why).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks import checkpoints, fitting, runs
from benchmarks.checkpoints import Job
from benchmarks.data import random_images
from benchmarks.paper import common
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
from psc_core.heads import Head

NAME = "cifar10_uq"

ROWS: Mapping[str, str] = {
    "dnn": "DNN",
    "temperature": "DNN, temperature scaling",
    "psc_all": "DNN-PSC, head selected on the same images",
    "psc": "DNN-PSC, as `psc-fit` makes it",
    "calibrated": "a calibrated classifier",
    "sn": "DNN-SN (retrained)",
}
"""Measured rows, in the table's order."""

PUBLISHED: Sequence[tuple[str, str, str, str]] = (
    ("paper, WRN-28-10, 10 seeds: DNN", "96.00 ± 0.01", "0.150 ± 0.001", "0.023 ± 0.001"),
    ("paper: DNN-PSC", "95.80 ± 0.01", "0.136 ± 0.001", "0.005 ± 0.000"),
    ("paper: DNN-SN", "96.00 ± 0.03", "0.153 ± 0.002", "0.022 ± 0.001"),
    ("uncertainty-baselines, WRN-28-10: deterministic", "—", "0.159", "0.023"),
    ("uncertainty-baselines: SNGP", "—", "0.134", "0.007"),
    ("uncertainty-baselines: ensemble of 4", "—", "0.114", "0.010"),
)
"""Published rows, all on the original CIFAR-10."""


def main(argv: list[str] | None = None) -> Json:
    """Run the seeds asked for and write the table of all seeds there are."""
    cli = runs.parser(__doc__)
    cli.add_argument("--seeds", type=int, nargs="+", help="default: the scale's")
    cli.add_argument("--only", choices=("base", "sn"), action="append", help="rows of one network")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for seed in args.seeds or common.scale_of(run).seeds:
        for part in args.only or ("base", "sn"):
            (plain if part == "base" else spectral)(replace(run, seed=seed))
    return run.write({"parts": run.finished()}, fragment)


def plain(run: Run) -> Json:
    """Softmax, temperature scaling and PSC of one seed's network."""
    base = common.job(run, "wide_resnet28_10", "cifar10")
    images = common.scale_of(run).fit_images

    def compute() -> Json:
        trained = checkpoints.obtain(run, base)
        stages = fitting.stages(run, trained, fit_images=images)
        psc = fitting.psc_of(run, trained, stages, fit_images=images)
        test = common.test_images(run, trained.test)
        train = examples_of(run, trained, psc, random_images(trained.train, images), logits=False)
        val, tested = (examples_of(run, trained, psc, data) for data in (trained.val, test))
        return {
            "trained": base.describe(),
            "layer": psc.layer,
            "fit_images": images,
            "images": len(test),
            "rows": rows_of(run, train, val, tested, psc.pipeline.scorer.head),
            "divided": [rows_of(run, train, *divide(run, val, tested, number)) for number in range(DIVISIONS)],
        }

    settings = {
        **_settings(run, base),
        "heads_chosen_by": ["half", "all"],
        "head": "laplace, mean and variance of the logits with one temperature",
        "divisions": DIVISIONS,
    }
    return run.part(f"seed{run.seed}-base", settings, compute)


def spectral(run: Run) -> Json:
    """Softmax of one seed's network with spectral normalisation."""
    job = common.job(run, "wide_resnet28_10", "cifar10", spectral_norm=True)

    def compute() -> Json:
        trained = checkpoints.obtain(run, job)
        test = fitting.penultimate_features(run, trained, common.test_images(run, trained.test), per_example=True)
        return {"trained": job.describe(), "rows": {"sn": quality(test.logits.softmax(1), test.labels)}}

    return run.part(f"seed{run.seed}-sn", _settings(run, job), compute)


def _settings(run: Run, job: Job) -> Json:
    scale = common.scale_of(run)
    return {"job": job.name, "epochs": run.epochs, "fit_images": scale.fit_images, "test_images": scale.test_images}


def rows_of(run: Run, train: Examples, val: Examples, test: Examples, head: Head | None = None) -> Json:
    """Both heads of PSC, the one of ``psc-fit`` by default selected on half of ``val``, beside the others."""
    found = qualities(run, train, val, test)
    half = head or head_of(run, train, val.take(slice(len(val.labels) // 2)))
    return {**found, "psc_all": found["psc"], "psc": quality(probabilities(run, half, test), test.labels)}


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; none from one value."""
    if len(values) < 2:
        return values[0], None
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def fragment(record: Json) -> str:
    """The table beside the published rows."""
    parts = record["result"]["parts"]
    lines = []
    for key, title in ROWS.items():
        rows = [part["rows"][key] for part in parts.values() if key in part["rows"]]
        divided = [_mean(key, part["divided"]) for part in parts.values() if key in part.get("divided", [{}])[0]]
        cells = [_cell(rows, *column) for column in (("accuracy", 100, 2), ("nll", 1, 4), ("ece", 1, 4))]
        cells.append(_cell(divided, "ece", 1, 4) if divided else "—")
        lines.append([f"{title} ({len(rows)} {'seed' if len(rows) == 1 else 'seeds'})" if rows else title, *cells])
    about = [part for part in parts.values() if "layer" in part]
    first = about[0] if about else None
    measured = (
        "PSC was not run"
        if first is None
        else (
            f"{first['trained']} and the other seeds; PSC at {', '.join(sorted({part['layer'] for part in about}))}, "
            f"fitted on {first['fit_images'] or 'all'} training images; {first['images']} test images"
        )
    )
    return (
        "\n\n".join(
            [
                "## CIFAR-10: accuracy, likelihood and calibration",
                runs.markdown_table(
                    ["classifier", "accuracy, %", "NLL, nats", "ECE", "ECE, divided at random"],
                    [*lines, *([*row, "—"] for row in PUBLISHED)],
                ),
                f"Measured: {measured}. The last column: mean over {DIVISIONS} random divisions of validation and test "
                "images together, for every network, of the same sizes as in the others. "
                "The images are JPEG-recompressed (quality 75, 4:2:0), so accuracy is a little below the original "
                "data's. Published rows are copied, not run.",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


def _mean(key: str, divided: Sequence[Json]) -> Json:
    return {"ece": statistics.mean(rows[key]["ece"] for rows in divided)}


def _cell(rows: Sequence[Json], metric: str, scale: float, digits: int) -> str:
    if not rows:
        return "not run"
    if metric not in rows[0]:
        return "—"
    mean, error = mean_and_error([scale * row[metric] for row in rows])
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


if __name__ == "__main__":
    main()
