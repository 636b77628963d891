"""Table "methods": the output layers of SNGP, DDU and DUQ, and PSC, on the same network and data.

    python -m benchmarks.paper.methods_table --scale cpu --data ROOT

CIFAR-10 against Fashion-MNIST and MNIST with the networks of :mod:`.cifar10_uq`.  The other methods' output layers are
``psc_core``'s, on penultimate features of the network trained as the method requires:

* random-feature GP: SNGP's layer, fitted after the network was trained with spectral normalisation (SN), where its
  authors train both together; its OOD score is theirs, Dempster and Shafer's ``K / (K + Σ exp μ)`` of the mean-field
  logits μ; a second row uses the variance of the process;
* DDU: spectral normalisation and Gaussians a class, on the plain architecture (not :mod:`benchmarks.mod`);
  probabilities are the softmax;
* DUQ: the radial-basis head on the plain network, trained without the gradient penalty, as the table notes;
* PSC: the plain network, candidate layer, Laplace head, and the paper's Gaussians a class or the default density;
* DVE and PSC as regressions: the angle of turned digits, as :mod:`benchmarks.regression.run` measured it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import checkpoints, fitting, runs
from benchmarks.checkpoints import Trained
from benchmarks.data import random_images
from benchmarks.fitting import Penultimate
from benchmarks.ood.settings import SETTINGS, Pair, test_pair
from benchmarks.paper import common
from benchmarks.probabilities import quality
from benchmarks.runs import Json, Run
from psc_core.data.dataset import split_validation
from psc_core.density.fit.density import fit_density
from psc_core.evaluation.evaluate import score_images
from psc_core.heads import Head
from psc_core.heads.fit.head import fit_head
from psc_core.heads.sngp import SngpHead, mean_field
from psc_core.metrics import classification, ranking

NAME = "methods_table"

OUTSIDE = ("fashion-mnist", "mnist")

RANDOM_FEATURES = "random-feature GP fitted post hoc (SNGP's layer), SN network"

METHODS: Mapping[str, tuple[str, str, str]] = {
    RANDOM_FEATURES: ("spectral normalisation", "yes", "classification"),
    f"{RANDOM_FEATURES}, its variance": ("spectral normalisation", "yes", "classification"),
    "DDU": ("spectral normalisation", "yes", "classification"),
    "DUQ": ("gradient penalty", "yes", "classification"),
    "DVE": ("skip connections", "no", "regression"),
    "PSC": ("skip connection", "no", "classification"),
    "PSC, pooled++": ("skip connection", "no", "classification"),
    "PSC, blr": ("skip connection", "no", "regression"),
}
"""Answer to feature collapse, whether it retrains, and its task: the paper's table."""


def main(argv: list[str] | None = None) -> Json:
    """Run and write the table."""
    cli = runs.parser(__doc__)
    cli.add_argument("--only", choices=("plain", "sn"), action="append", help="methods of one network")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for part in args.only or ("plain", "sn"):
        methods_of(run, spectral_norm=part == "sn")
    parts = run.finished()
    rows = {method: row for part in parts.values() for method, row in part["rows"].items()}
    trained = next((part["trained"] for part in parts.values()), "nothing")
    return run.write({"rows": rows, "trained": trained}, fragment)


def methods_of(run: Run, *, spectral_norm: bool) -> Json:
    """The methods of the plain network, or of the one trained with spectral normalisation."""
    job = common.job(run, "wide_resnet28_10", "cifar10", spectral_norm=spectral_norm)
    images = common.scale_of(run).fit_images

    def compute() -> Json:
        trained = checkpoints.obtain(run, job)
        test = test_pair(run, SETTINGS["cifar10"], trained, common.scale_of(run).test_images)
        if spectral_norm:
            rows = {**_sngp_rows(run, trained, test), "DDU": _density_row(run, trained, test)}
        else:
            rows = {
                "DUQ": _duq_row(run, trained, test),
                "PSC": _psc_row(run, trained, test, "gda"),
                "PSC, pooled++": _psc_row(run, trained, test, "pooled++"),
            }
        return {"trained": job.describe(), "rows": rows}

    settings = {
        "job": job.name,
        "fit_images": images,
        "test_images": common.scale_of(run).test_images,
        "head": "mean and variance of the logits with one temperature",
    }
    return run.part("sn" if spectral_norm else "plain", settings, compute)


def _psc_row(run: Run, trained: Trained, test: Pair, density: str) -> Json:
    images = common.scale_of(run).fit_images
    batch = fitting.compute_of(run).batch_images
    stages = fitting.stages(run, trained, fit_images=images, density=density)
    psc = fitting.psc_of(run, trained, stages, fit_images=images, density=density)
    known = score_images(psc, test.inside, batch_images=batch)
    unknown = {name: score_images(psc, data, batch_images=batch).ood["psc"] for name, data in test.outside.items()}
    losses = known.losses["psc"]
    return {
        "fit_images": images,
        "accuracy": float(losses.correct.double().mean()),
        "nll": float(losses.nll.mean()),
        "ece": classification.ece(losses.confidence, losses.correct),
        "auroc": {name: ranking.auroc(known.ood["psc"], found) for name, found in unknown.items()},
    }


def _features(run: Run, trained: Trained, test: Pair) -> tuple[Penultimate, Penultimate, dict[str, Penultimate]]:
    """Penultimate features of training examples, of in-distribution and of out-of-distribution test images."""
    train = random_images(trained.train, common.scale_of(run).fit_images)
    return (
        fitting.penultimate_features(run, trained, train, per_example=True),
        fitting.penultimate_features(run, trained, test.inside, per_example=False),
        {
            name: fitting.penultimate_features(run, trained, data, per_example=False)
            for name, data in test.outside.items()
        },
    )


def _head(run: Run, trained: Trained, train: Penultimate, kind: str) -> Head:
    """A head on the penultimate features."""
    val = fitting.penultimate_features(run, trained, split_validation(trained.val, run.seed)[0], per_example=True)
    return fit_head(
        train.features,
        train.labels,
        val.features,
        val.labels,
        num_classes=len(trained.train.classes),
        kind=kind,
        seed=run.seed,
        device=run.device,
    )


@torch.inference_mode()
def _duq_row(run: Run, trained: Trained, test: Pair) -> Json:
    train, inside, outside = _features(run, trained, test)
    head = _head(run, trained, train, "duq")
    known, *unknown = (head(each.features.to(run.device)) for each in (inside, *outside.values()))
    scored = {name: found.epistemic.cpu() for name, found in zip(outside, unknown, strict=True)}
    return _quality(run, known.probabilities.cpu(), inside.labels, known.epistemic.cpu(), scored)


@torch.inference_mode()
def _sngp_rows(run: Run, trained: Trained, test: Pair) -> dict[str, Json]:
    train, inside, outside = _features(run, trained, test)
    head = _head(run, trained, train, "sngp")
    assert isinstance(head, SngpHead)
    known, *unknown = (head.logits(each.features.to(run.device)) for each in (inside, *outside.values()))
    logits = mean_field(*known).cpu()

    def row(score: Callable[[Tensor, Tensor], Tensor]) -> Json:
        scored = {name: score(*found).cpu() for name, found in zip(outside, unknown, strict=True)}
        return _quality(run, logits.softmax(1), inside.labels, score(*known).cpu(), scored)

    return {
        RANDOM_FEATURES: row(lambda mean, variance: dempster_shafer(mean_field(mean, variance))),
        f"{RANDOM_FEATURES}, its variance": row(lambda _, variance: variance),
    }


def dempster_shafer(logits: Tensor) -> Tensor:
    """``K / (K + Σ exp μ)`` of logits ``(n, K)``: the OOD score of SNGP's authors."""
    classes = logits.shape[1]
    return torch.sigmoid(math.log(classes) - logits.double().logsumexp(1))


def _density_row(run: Run, trained: Trained, test: Pair) -> Json:
    train, inside, outside = _features(run, trained, test)
    density = fit_density(
        train.features.to(run.device), train.labels.to(run.device), num_classes=len(trained.train.classes)
    )
    known = -density(inside.features.to(run.device)).log_density.cpu()
    unknown = {name: -density(each.features.to(run.device)).log_density.cpu() for name, each in outside.items()}
    return _quality(run, inside.logits.softmax(1), inside.labels, known, unknown)


def _quality(run: Run, probabilities: Tensor, labels: Tensor, known: Tensor, unknown: Mapping[str, Tensor]) -> Json:
    return {
        "fit_images": common.scale_of(run).fit_images,
        **quality(probabilities.double(), labels),
        "auroc": {name: ranking.auroc(known, found) for name, found in unknown.items()},
    }


REGRESSIONS: Mapping[str, str] = {"DVE": "PSC, head dve", "PSC, blr": "PSC"}
"""Methods for regression by their rows in :mod:`benchmarks.regression.run`."""


def regression_rows(file: Path) -> dict[str, Json]:
    """What :mod:`benchmarks.regression.run` found, by its rows; nothing where it was not run."""
    if not file.exists():
        return {}
    parts = json.loads(file.read_text())["result"]["parts"].values()
    return {method: row for part in parts for method, row in part["rows"].items()}


def fragment(record: Json) -> str:
    """The paper's table, with what was measured."""
    rows, lines = record["result"]["rows"], []
    numbers = regression_rows(runs.RESULTS / f"regression-{record['scale']}.json")
    for method, words in METHODS.items():
        found = rows.get(method)
        of_number = numbers.get(REGRESSIONS.get(method, ""))
        if of_number is not None:
            cells = [f"RMSE {of_number['rmse']:.2f}°", common.number(of_number["nll"], 4), "–"]
            cells += [common.number(of_number["auroc"][name], 4) if name in of_number["auroc"] else "–"
                      for name in OUTSIDE]  # fmt: skip
        elif found is None:
            cells = ["not run", "", "", "", ""]
        else:
            cells = [common.number(found[key], 4) for key in ("accuracy", "nll", "ece")]
            cells += [common.number(found["auroc"][name], 4) for name in OUTSIDE]
        lines.append([method, *words, *cells])
    header = ["method", "answer to feature collapse", "retrains", "task", "accuracy", "NLL, nats", "ECE"]
    header += [f"AUROC {name}" for name in OUTSIDE]
    fitted = next(iter(rows.values()))["fit_images"] or "all"
    return (
        "\n\n".join(
            [
                "## Methods on the same network and data",
                runs.markdown_table(header, lines),
                f"CIFAR-10, JPEG-recompressed (quality 75); {record['result']['trained']}, and the same with or "
                f"without spectral norm ≤ {checkpoints.SPECTRAL_NORM:g}; fitted on {fitted} training images. The "
                "random-feature GP and DDU run on the network trained with spectral normalisation (SN), without DDU's "
                "modified shortcuts and LeakyReLU, DUQ and PSC on the plain one. DUQ "
                "here is its output layer alone; the network was trained without the gradient penalty. The regressions "
                "predict the angle of turned digits (benchmarks/results/regression.md): errors are in degrees, and "
                "Fashion-MNIST is told from digits by the gates of both.",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
