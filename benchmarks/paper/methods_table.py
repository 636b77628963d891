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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import fitting, runs
from benchmarks.checkpoints import SPECTRAL_NORM, Trained, job_of, obtain
from benchmarks.fitting import Penultimate
from benchmarks.ood.settings import SETTINGS, test_images
from benchmarks.probabilities import quality
from benchmarks.runs import Json, Run
from psc_core.data.dataset import ImageDataset, split_validation
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
    cli.add_argument("--only", choices=("plain", "sn"), action="extend", nargs="+", help="methods of one network")
    args = cli.parse_args(argv)
    run = runs.start(NAME, args)
    for part in args.only or ("plain", "sn"):
        methods_of(run, part, spectral_norm=SPECTRAL_NORM if part == "sn" else 0.0)
    rows = {method: row for part in run.finished().values() for method, row in part["rows"].items()}
    return run.write({"rows": rows}, fragment)


def methods_of(run: Run, part: str, *, spectral_norm: float) -> Json:
    """The methods of the plain network, or of the one trained with spectral normalisation."""
    job = job_of(run, "wide_resnet28_10", "cifar10", spectral_norm=spectral_norm)

    def compute() -> Json:
        trained = obtain(run, job)
        outside = test_images(run, SETTINGS["cifar10"], trained)
        features = Features.of(run, trained, outside)
        if spectral_norm:
            rows = {**_sngp_rows(features), "DDU": _density_row(features)}
        else:
            kinds = {"PSC": "gda", "PSC, pooled++": "pooled++"}
            rows = {name: _psc_row(run, trained, outside, kind) for name, kind in kinds.items()}
            rows["DUQ"] = _duq_row(features)
        return {"trained": job.describe(), "rows": rows}

    return run.part(part, {"job": job.name}, compute)


def _psc_row(run: Run, trained: Trained, outside: Mapping[str, ImageDataset], density: str) -> Json:
    batch = fitting.compute_of(run).batch_images
    psc = fitting.psc_of(run, trained, fitting.stages(run, trained, density=density), density=density)
    known = score_images(psc, trained.test_on, batch_images=batch)
    unknown = {name: score_images(psc, data, batch_images=batch).ood["psc"] for name, data in outside.items()}
    losses = known.losses["psc"]
    return {
        "accuracy": float(losses.correct.double().mean()),
        "nll": float(losses.nll.mean()),
        "ece": classification.ece(losses.confidence, losses.correct),
        "auroc": {name: ranking.auroc(known.ood["psc"], found) for name, found in unknown.items()},
    }


@dataclass(frozen=True)
class Features:
    """Penultimate features of one network, and what is fitted on them.

    Attributes:
        run: Gives seed and device.
        train: Training examples.
        val: Validation examples, the half that selects.
        inside: In-distribution test images.
        outside: Out-of-distribution test images by name.
    """

    run: Run
    train: Penultimate
    val: Penultimate
    inside: Penultimate
    outside: Mapping[str, Penultimate]

    @classmethod
    def of(cls, run: Run, trained: Trained, outside: Mapping[str, ImageDataset]) -> Features:
        """Four passes of the network."""

        def features(data: ImageDataset, *, per_example: bool = False) -> Penultimate:
            return fitting.penultimate_features(run, trained, data, per_example=per_example)

        return cls(
            run,
            features(trained.fit_on, per_example=True),
            features(split_validation(trained.val, run.seed)[0], per_example=True),
            features(trained.test_on),
            {name: features(data) for name, data in outside.items()},
        )

    def head(self, kind: str) -> Head:
        """A head on them."""
        return fit_head(
            self.train.features,
            self.train.labels,
            self.val.features,
            self.val.labels,
            num_classes=self.train.logits.shape[1],
            kind=kind,
            seed=self.run.seed,
            device=self.run.device,
        )

    def row(self, score: Callable[[Tensor], Tensor], probabilities: Tensor | None = None) -> Json:
        """Quality of in-distribution probabilities, by default the network's own, and AUROC of a score of features."""
        known, *unknown = (
            score(each.features.to(self.run.device)).cpu() for each in (self.inside, *self.outside.values())
        )
        given = self.inside.logits.softmax(1) if probabilities is None else probabilities.cpu().double()
        return {
            **quality(given, self.inside.labels),
            "auroc": {name: ranking.auroc(known, each) for name, each in zip(self.outside, unknown, strict=True)},
        }


@torch.inference_mode()
def _duq_row(features: Features) -> Json:
    head = features.head("duq")
    probabilities = head(features.inside.features.to(features.run.device)).probabilities
    return features.row(lambda h: head(h).epistemic, probabilities)


@torch.inference_mode()
def _sngp_rows(features: Features) -> dict[str, Json]:
    head = features.head("sngp")
    assert isinstance(head, SngpHead)
    probabilities = mean_field(*head.logits(features.inside.features.to(features.run.device))).softmax(1)
    return {
        RANDOM_FEATURES: features.row(lambda h: dempster_shafer(mean_field(*head.logits(h))), probabilities),
        f"{RANDOM_FEATURES}, its variance": features.row(lambda h: head.logits(h)[1], probabilities),
    }


@torch.inference_mode()
def _density_row(features: Features) -> Json:
    train, device = features.train, features.run.device
    density = fit_density(train.features.to(device), train.labels.to(device), num_classes=train.logits.shape[1])
    return features.row(lambda h: -density(h).log_density)


def dempster_shafer(logits: Tensor) -> Tensor:
    """``K / (K + Σ exp μ)`` of logits ``(n, K)``: the OOD score of SNGP's authors."""
    classes = logits.shape[1]
    return torch.sigmoid(math.log(classes) - logits.double().logsumexp(1))


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
            aurocs = [of_number["auroc"].get(name) for name in OUTSIDE]
            cells = [f"RMSE {of_number['rmse']:.2f}°", runs.number(of_number["nll"], 4), runs.number(None)]
            cells += [runs.number(value, 4) for value in aurocs]
        elif found is None:
            cells = ["not run", "", "", "", ""]
        else:
            values = [found[key] for key in ("accuracy", "nll", "ece")] + [found["auroc"][name] for name in OUTSIDE]
            cells = [runs.number(value, 4) for value in values]
        lines.append([method, *words, *cells])
    header = ["method", "answer to feature collapse", "retrains", "task", "accuracy", "NLL, nats", "ECE"]
    table = runs.markdown_table([*header, *(f"AUROC {name}" for name in OUTSIDE)], lines)
    return "\n\n".join([table, runs.provenance(record)])


if __name__ == "__main__":
    main()
