"""Table "CIFAR-10 UQ": accuracy, NLL and ECE of the network, of temperature scaling, of PSC and of SN.

    python -m benchmarks.paper.cifar10_uq --scale cpu --data ROOT --seeds 0 1 2

Every seed and network is a part: run some, later more, and the table holds all that are there.  Means ± standard errors
over seeds, which change initialisation, order, and the split of the validation images.

The temperature is chosen by all validation images.  ``psc-fit`` chooses by one half of them and keeps the other for
what it promises (p-values, prediction sets), so PSC has two rows: as ``psc-fit`` makes it, and with a head that is
chosen by the same images as the temperature.  "Calibrated" is what a classifier whose probabilities are right has on as
many images: the ECE of labels drawn from PSC's own probabilities.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import checkpoints, fitting, runs
from benchmarks.checkpoints import Job, Trained
from benchmarks.data import random_images
from benchmarks.paper import common
from benchmarks.runs import Json, Run
from psc_core import scores
from psc_core.data import ImageDataset
from psc_core.heads import fit_head
from psc_core.passes import track_images
from psc_core.predictor import PSC
from psc_core.temperature import fit_temperature

NAME = "cifar10_uq"

ROWS: Mapping[str, str] = {
    "dnn": "DNN",
    "temperature": "DNN, temperature scaling",
    "psc_all": "DNN-PSC, head chosen by the same images",
    "psc": "DNN-PSC, as `psc-fit` makes it",
    "calibrated": "a calibrated classifier",
    "sn": "DNN-SN (retrained)",
}
"""What is measured, in the table's order."""

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
        stations = fitting.stations(run, trained, fit_images=images)
        psc = fitting.psc_of(run, trained, stations, fit_images=images)
        test = common.test_images(run, trained.test)
        probabilities, labels, chosen_alike = psc_probabilities(run, trained, psc, images)
        return {
            "trained": base.describe(),
            "layer": psc.layer,
            "fit_images": images,
            "images": len(test),
            "rows": {
                "psc": _quality(probabilities, labels),
                "psc_all": _quality(chosen_alike, labels),
                "calibrated": {"ece": ece_when_calibrated(probabilities, run.seed)},
                **softmax_rows(run, trained, "dnn", temperature=True),
            },
        }

    settings = {
        **_settings(run, base),
        "heads_chosen_by": ["half", "all"],
        "head": "laplace, precision with temperature",
    }
    return run.part(f"seed{run.seed}-base", settings, compute)


def spectral(run: Run) -> Json:
    """Softmax of one seed's network with spectral normalisation."""
    job = common.job(run, "wide_resnet28_10", "cifar10", spectral_norm=True)

    def compute() -> Json:
        trained = checkpoints.obtain(run, job)
        return {"trained": job.describe(), "rows": softmax_rows(run, trained, "sn", temperature=False)}

    return run.part(f"seed{run.seed}-sn", _settings(run, job), compute)


def _settings(run: Run, job: Job) -> Json:
    scale = common.scale_of(run)
    return {"job": job.name, "epochs": run.epochs, "fit_images": scale.fit_images, "test_images": scale.test_images}


def psc_probabilities(run: Run, trained: Trained, psc: PSC, fit_images: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of the test rows: PSC's probabilities, the labels, and the probabilities with a head chosen by all of val."""
    head = psc.pipeline.head
    if head is None:
        raise RuntimeError("PSC of this table has a head")
    train, train_labels = features(run, psc, random_images(trained.train, fit_images))
    val, val_labels = features(run, psc, trained.val)
    test, test_labels = features(run, psc, common.test_images(run, trained.test))
    other = fit_head(
        train, train_labels, val, val_labels, num_classes=len(psc.classes), seed=run.seed, device=run.device
    )
    with torch.inference_mode():
        found = [each(test.to(run.device)).probabilities.double().cpu() for each in (head, other)]
    return found[0], test_labels, found[1]


@torch.inference_mode()
def features(run: Run, psc: PSC, data: ImageDataset) -> tuple[Tensor, Tensor]:
    """z and the label of every row of a data set, on the CPU."""
    z, labels = [], []
    for batch in track_images(data, fitting.compute_of(run), f"features of {data.name}"):
        z.append(batch.rows(psc.pipeline.embed(batch.images.to(run.device)).z).cpu())
        labels.append(batch.labels)
    return torch.cat(z), torch.cat(labels)


def ece_when_calibrated(probabilities: Tensor, seed: int, draws: int = 100) -> float:
    """Mean ECE of labels drawn from the probabilities themselves: what few images leave of a perfect calibration."""
    source = torch.Generator().manual_seed(seed)
    confidence, predicted = probabilities.max(1)
    drawn = [torch.multinomial(probabilities, 1, generator=source)[:, 0] for _ in range(draws)]
    return statistics.mean(scores.ece(confidence, predicted == labels) for labels in drawn)


def softmax_rows(run: Run, trained: Trained, name: str, *, temperature: bool) -> Json:
    """Accuracy, NLL and ECE of a network's softmax, and with the temperature that its validation images ask for."""
    test = fitting.penultimate_features(run, trained, common.test_images(run, trained.test), rows=True)
    rows = {name: _quality(test.logits.softmax(1), test.labels)}
    if temperature:
        val = fitting.penultimate_features(run, trained, trained.val, rows=True)
        scaled = test.logits / fit_temperature(val.logits, val.labels)
        rows["temperature"] = _quality(scaled.softmax(1), test.labels)
    return rows


def _quality(probabilities: Tensor, labels: Tensor) -> Json:
    confidence, predicted = probabilities.max(1)
    return {
        "accuracy": scores.accuracy(probabilities, labels),
        "nll": scores.nll(probabilities, labels),
        "ece": scores.ece(confidence, predicted == labels),
    }


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
        cells = [_cell(rows, *column) for column in (("accuracy", 100, 2), ("nll", 1, 4), ("ece", 1, 4))]
        lines.append([f"{title} ({len(rows)} seeds)" if rows else title, *cells])
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
                "### CIFAR-10: accuracy, likelihood and calibration",
                runs.markdown_table(["classifier", "accuracy, %", "NLL, nats", "ECE"], [*lines, *map(list, PUBLISHED)]),
                f"Measured: {measured}. The images are JPEG-recompressed (quality 75, 4:2:0), so "
                f"accuracy is a little below "
                "the original data's. Published rows are copied, not run.",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


def _cell(rows: Sequence[Json], metric: str, scale: float, digits: int) -> str:
    if not rows:
        return "not run"
    if metric not in rows[0]:
        return "—"
    mean, error = mean_and_error([scale * row[metric] for row in rows])
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


if __name__ == "__main__":
    main()
