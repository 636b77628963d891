"""Table "methods": SNGP, DDU, DUQ and PSC on the same network and data.

    python -m benchmarks.paper.methods_table --scale cpu --data ROOT

Dirty-MNIST against Fashion-MNIST with the ResNet-18 of the DDU case study.  The rivals' output layers are
``psc_core``'s own, on the penultimate features, of the network trained as the method asks:

* SNGP: spectral normalisation and the random-feature Gaussian process; OOD score is its epistemic part;
* DDU: spectral normalisation and Gaussians a class; probabilities are the softmax;
* DUQ: the radial-basis head on the plain network; its gradient penalty in training is left out, which the
  table says;
* PSC: the plain network, candidate layer, Gaussians a class and Laplace head;
* DVE averages regressions over all layers: it is for regression, and nothing is run.

``--checkpoint FILE`` takes the plain ResNet-18 from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import checkpoints, fitting, runs
from benchmarks.checkpoints import Trained
from benchmarks.data import random_images
from benchmarks.fitting import Penultimate
from benchmarks.paper import common
from benchmarks.paper.ddu_case_study import test_sets
from benchmarks.runs import Json, Run
from psc_core import scores
from psc_core.data import split_validation
from psc_core.density import fit_density
from psc_core.evaluate import score_images
from psc_core.heads import fit_head

NAME = "methods_table"

METHODS: Mapping[str, tuple[str, str, str]] = {
    "SNGP": ("spectral normalisation", "yes", "classification"),
    "DDU": ("spectral normalisation", "yes", "classification"),
    "DUQ": ("gradient penalty", "yes", "classification"),
    "DVE": ("skip connections", "no", "regression"),
    "PSC": ("skip connection", "no", "classification"),
}
"""Answer to feature collapse, whether it retrains, and its task: the paper's table."""


def main(argv: list[str] | None = None) -> Json:
    """Run and write the table."""
    cli = runs.parser(__doc__)
    cli.add_argument("--checkpoint", type=Path, metavar="FILE", help="the plain ResNet-18, already trained")
    cli.add_argument("--only", choices=("plain", "sn"), action="append", help="methods of one network")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    if "plain" in (args.only or ["plain"]):
        plain(run, args.checkpoint)
    if "sn" in (args.only or ["sn"]):
        spectral(run)
    rows = {method: row for part in run.finished().values() for method, row in part.items()}
    return run.write({"rows": rows}, fragment)


def plain(run: Run, checkpoint: Path | None) -> dict[str, Json]:
    """DUQ and PSC."""
    job = common.job(run, "resnet18", "dirty-mnist")

    def compute() -> Json:
        trained = checkpoints.obtain(run, job, file=checkpoint)
        images = common.scale_of(run).fit_images
        inside, outside = test_sets(run, trained.test)
        batch = fitting.compute_of(run).batch_images
        psc = fitting.psc_of(run, trained, fitting.stations(run, trained, fit_images=images), fit_images=images)
        known, unknown = (score_images(psc, data, batch_images=batch) for data in (inside, outside))
        losses = known.losses["psc"]
        own = {
            "fit_images": images,
            "accuracy": float(losses.correct.double().mean()),
            "nll": float(losses.nll.mean()),
            "ece": scores.ece(losses.confidence, losses.correct),
            "auroc": scores.auroc(known.ood["psc"], unknown.ood["psc"]),
        }
        return {"PSC": own, "DUQ": _head_rows(run, trained, "duq")}

    return run.part("plain", _settings(run, job.name, checkpoint), compute)


def spectral(run: Run) -> dict[str, Json]:
    """SNGP and DDU."""
    job = common.job(run, "resnet18", "dirty-mnist", spectral_norm=True)

    def compute() -> Json:
        trained = checkpoints.obtain(run, job)
        return {"SNGP": _head_rows(run, trained, "sngp"), "DDU": _density_row(run, trained)}

    return run.part("sn", _settings(run, job.name, None), compute)


def _settings(run: Run, job: str, checkpoint: Path | None) -> Json:
    scale = common.scale_of(run)
    return {
        "job": job,
        "checkpoint": checkpoint and checkpoint.name,
        "epochs": run.epochs,
        "fit_images": scale.fit_images,
        "test_images": scale.test_images,
    }


def _features(run: Run, trained: Trained) -> tuple[Penultimate, Penultimate, Penultimate]:
    """Penultimate features of (some) training rows, of in- and of out-of-distribution test images."""
    train = random_images(trained.train, common.scale_of(run).fit_images)
    inside, outside = test_sets(run, trained.test)
    return (
        fitting.penultimate_features(run, trained, train, rows=True),
        fitting.penultimate_features(run, trained, inside, rows=False),
        fitting.penultimate_features(run, trained, outside, rows=False),
    )


def _head_rows(run: Run, trained: Trained, kind: str) -> Json:
    """A head on the penultimate features: its probabilities, and its epistemic part as the OOD score."""
    train, inside, outside = _features(run, trained)
    val = fitting.penultimate_features(run, trained, split_validation(trained.val, run.seed)[0], rows=True)
    head = fit_head(
        train.features,
        train.labels,
        val.features,
        val.labels,
        num_classes=len(trained.train.classes),
        kind=kind,
        seed=run.seed,
        device=run.device,
    )
    known, unknown = head(inside.features.to(run.device)), head(outside.features.to(run.device))
    return _quality(run, known.probabilities.cpu(), inside.labels, known.epistemic.cpu(), unknown.epistemic.cpu())


def _density_row(run: Run, trained: Trained) -> Json:
    train, inside, outside = _features(run, trained)
    density = fit_density(
        train.features.to(run.device), train.labels.to(run.device), num_classes=len(trained.train.classes)
    )
    known, unknown = (-density(each.features.to(run.device)).log_density.cpu() for each in (inside, outside))
    return _quality(run, inside.logits.softmax(1), inside.labels, known, unknown)


def _quality(run: Run, probabilities: Tensor, labels: Tensor, known: Tensor, unknown: Tensor) -> Json:
    confidence, predicted = probabilities.double().max(1)
    return {
        "fit_images": common.scale_of(run).fit_images,
        "accuracy": scores.accuracy(probabilities, labels),
        "nll": scores.nll(probabilities, labels),
        "ece": scores.ece(confidence, torch.eq(predicted, labels)),
        "auroc": scores.auroc(known, unknown),
    }


def fragment(record: Json) -> str:
    """The paper's table, with what was measured."""
    rows, lines = record["result"]["rows"], []
    for method, words in METHODS.items():
        found = rows.get(method)
        if method == "DVE":
            cells = ["regression: not applicable", "", "", ""]
        elif found is None:
            cells = ["not run", "", "", ""]
        else:
            cells = [common.number(found[key], 4) for key in ("accuracy", "nll", "ece", "auroc")]
        lines.append([method, *words, *cells])
    header = [
        "method",
        "answer to feature collapse",
        "retrains",
        "task",
        "accuracy",
        "NLL, nats",
        "ECE",
        "AUROC iD/OOD",
    ]
    job = common.SCALES[record["scale"]]
    fitted = next(iter(rows.values()))["fit_images"] or "all"
    return (
        "\n\n".join(
            [
                "### Methods: what they ask for, and what they give on the same network and data",
                runs.markdown_table(header, lines),
                f"Dirty-MNIST against Fashion-MNIST, {job.networks['resnet18']}; fitted on {fitted} training "
                "images. SNGP and DDU run on the network trained with spectral normalisation, DUQ "
                "and PSC on the plain one. "
                "DUQ here is its output layer alone: the network was not trained with the gradient penalty.",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
