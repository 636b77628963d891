"""Table "CIFAR-10 UQ": accuracy, NLL and ECE of the network, of temperature scaling, of PSC and of SN.

    python -m benchmarks.paper.cifar10_uq --scale cpu --data ROOT --seeds 0 1 2

Every seed and network is a part; the table holds all parts run so far.  Means ± standard errors over seeds, which
change initialisation, order, and the split of the validation images.

The temperature is fitted on all validation images.  ``psc-fit`` selects on one half of them and keeps the other for
calibration (p-values, prediction sets), so PSC has two rows: as ``psc-fit`` makes it, and with a head selected on the
same images as the temperature.  "Calibrated" is a perfectly calibrated classifier on as many images: the ECE of labels
drawn from PSC's own probabilities.

How well accuracy on the validation images happens to agree with that on the test images moves every ECE, alike for all
seeds, so no number of seeds averages it out.  A second column divides validation and test images anew at random, in the
same proportion, several times for every network.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import checkpoints, fitting, runs
from benchmarks.checkpoints import Job, Trained
from benchmarks.data import random_images
from benchmarks.paper import common
from benchmarks.runs import Json, Run
from psc_core.compute.passes import track_images
from psc_core.data.dataset import ImageDataset
from psc_core.heads import Head, HeadOutput
from psc_core.heads.fit.head import fit_head
from psc_core.heads.fit.temperature import fit_temperature
from psc_core.metrics import classification
from psc_core.model.predictor import PSC

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

DIVISIONS = 5
"""Random divisions of validation and test images together."""

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
            "rows": qualities(run, train, val, tested, psc.pipeline.scorer.head),
            "divided": [qualities(run, train, *divide(run, val, tested, number)) for number in range(DIVISIONS)],
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
        return {"trained": job.describe(), "rows": {"sn": _quality(test.logits.softmax(1), test.labels)}}

    return run.part(f"seed{run.seed}-sn", _settings(run, job), compute)


def _settings(run: Run, job: Job) -> Json:
    scale = common.scale_of(run)
    return {"job": job.name, "epochs": run.epochs, "fit_images": scale.fit_images, "test_images": scale.test_images}


@dataclass(frozen=True)
class Examples:
    """Labelled examples of a data set, on the CPU.

    Attributes:
        z: ``float32 (n, D)``, of PSC's layer.
        labels: ``int64 (n,)``.
        logits: ``float64 (n, K)``, the network's own; empty where they are not needed.
    """

    z: Tensor
    labels: Tensor
    logits: Tensor

    def take(self, indices: Tensor | slice) -> Examples:
        """Those at ``indices``."""
        return Examples(self.z[indices], self.labels[indices], self.logits[indices])


@torch.inference_mode()
def examples_of(run: Run, trained: Trained, psc: PSC, data: ImageDataset, *, logits: bool = True) -> Examples:
    """What the classifiers of the table read of a data set."""
    z, labels = [], []
    for batch in track_images(data, fitting.compute_of(run), f"z of {data.name}"):
        z.append(batch.per_example(psc.pipeline.scorer.embed(batch.images.to(run.device)).z).cpu())
        labels.append(batch.labels)
    own = fitting.penultimate_features(run, trained, data, per_example=True).logits if logits else torch.empty(0)
    return Examples(torch.cat(z), torch.cat(labels), own)


def divide(run: Run, val: Examples, test: Examples, number: int) -> tuple[Examples, Examples]:
    """Both shuffled together and split into parts of the same sizes."""
    both = Examples(*(torch.cat([getattr(part, name) for part in (val, test)]) for name in ("z", "labels", "logits")))
    order = torch.randperm(len(both.labels), generator=torch.Generator().manual_seed(DIVISIONS * run.seed + number))
    return both.take(order[: len(val.labels)]), both.take(order[len(val.labels) :])


def qualities(run: Run, train: Examples, val: Examples, test: Examples, head: Head | None = None) -> Json:
    """Softmax, temperature scaling and PSC on the test images.

    Args:
        run: Of the script.
        train: Examples to fit PSC's heads on.
        val: Examples to select temperature and head on.
        test: Examples to test on.
        head: Of ``psc-fit``; by default one selected on half of ``val``.
    """

    @torch.inference_mode()
    def probabilities(head: Head) -> Tensor:
        output: HeadOutput = head(test.z.to(run.device))
        return output.probabilities.double().cpu()

    alike = probabilities(head_of(run, train, val))
    found = {
        "psc": probabilities(head or head_of(run, train, val.take(slice(len(val.labels) // 2)))),
        "psc_all": alike,
        "dnn": test.logits.softmax(1),
        "temperature": (test.logits / fit_temperature(val.logits, val.labels)).softmax(1),
    }
    rows = {name: _quality(each, test.labels) for name, each in found.items()}
    return {**rows, "calibrated": {"ece": ece_when_calibrated(alike, run.seed)}}


def head_of(run: Run, train: Examples, val: Examples) -> Head:
    """The head fitted on ``train`` and selected on ``val``."""
    classes = val.logits.shape[1]
    return fit_head(train.z, train.labels, val.z, val.labels, num_classes=classes, seed=run.seed, device=run.device)


def ece_when_calibrated(probabilities: Tensor, seed: int, draws: int = 100) -> float:
    """Mean ECE of labels drawn from the probabilities themselves: that of perfect calibration on so few images."""
    source = torch.Generator().manual_seed(seed)
    confidence, predicted = probabilities.max(1)
    drawn = [torch.multinomial(probabilities, 1, generator=source)[:, 0] for _ in range(draws)]
    return statistics.mean(classification.ece(confidence, predicted == labels) for labels in drawn)


def _quality(probabilities: Tensor, labels: Tensor) -> Json:
    confidence, predicted = probabilities.max(1)
    return {
        "accuracy": classification.accuracy(probabilities, labels),
        "nll": classification.nll(probabilities, labels),
        "ece": classification.ece(confidence, predicted == labels),
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
        divided = [_mean(key, part["divided"]) for part in parts.values() if key in part.get("divided", [{}])[0]]
        cells = [_cell(rows, *column) for column in (("accuracy", 100, 2), ("nll", 1, 4), ("ece", 1, 4))]
        cells.append(_cell(divided, "ece", 1, 4) if divided else "—")
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
