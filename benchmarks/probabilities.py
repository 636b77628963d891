"""Compare the probabilities of PSC with those of its network, alone and divided by a temperature.

All are selected on the same validation images.  The chance difference between the accuracies on validation and test
images moves every ECE in the same way for all seeds, so no number of seeds averages it out.  That is why
:func:`divide` divides both sets anew at random.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmarks import fitting
from benchmarks.checkpoints import Trained
from benchmarks.runs import Json, Run
from psc_core import metrics
from psc_core.compute import track_images
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.baselines import fit_temperature
from psc_core.features import as_matrix
from psc_core.heads.base import ClassifierHead as Head
from psc_core.heads.base import ClassifierOutput, Features
from psc_core.heads.softmax import better_of, fit_temperature_head
from psc_core.model import PSC
from psc_core.tasks.classification import Classification, fit_head

DIVISIONS = 5  # The number of random divisions of validation and test images together.


@dataclass(frozen=True)
class Examples:
    """The labelled examples of a data set, on the CPU."""

    head_input: Tensor  # ``float32 (n, D)``, the input of PSC's head
    labels: Tensor  # ``int64 (n,)``
    logits: Tensor  # ``float64 (n, K)``, the network's own; empty if they are not needed
    images: Tensor  # ``int64 (n,)``, the index of each example's image in the data set

    def take(self, indices: Tensor | slice) -> Examples:
        """Return the examples at ``indices``."""
        return Examples(self.head_input[indices], self.labels[indices], self.logits[indices], self.images[indices])


@torch.inference_mode()
def examples_of(run: Run, trained: Trained, psc: PSC, data: ImageDataset, *, logits: bool = True) -> Examples:
    """Return the features and logits of a data set, which the classifiers read."""
    read, labels = [], []
    for batch in track_images(data, fitting.compute_of(run), f"features of {data.name}"):
        read.append(batch.per_example(psc.pipeline.scorer.embed(batch.images.to(run.device)).head_input).cpu())
        labels.append(batch.labels)
    own = fitting.penultimate_features(run, trained, data, per_example=True).logits if logits else torch.empty(0)
    counts = data.offsets[1:] - data.offsets[:-1]
    return Examples(torch.cat(read), torch.cat(labels), own, torch.arange(len(data)).repeat_interleave(counts))


def divide(run: Run, val: Examples, test: Examples, number: int) -> tuple[Examples, Examples]:
    """Shuffle both together and split them into parts of the same sizes."""
    names = [field.name for field in fields(Examples)]
    both = Examples(*(torch.cat([getattr(part, name) for part in (val, test)]) for name in names))
    order = torch.randperm(len(both.labels), generator=torch.Generator().manual_seed(DIVISIONS * run.seed + number))
    return both.take(order[: len(val.labels)]), both.take(order[len(val.labels) :])


def qualities(run: Run, train: Examples, val: Examples, test: Examples) -> Json:
    """Measure on ``test`` what PSC serves, its head, temperature scaling (all chosen on ``val``) and softmax."""
    head = head_of(run, train, val)
    own = fit_temperature_head(val.logits, val.labels).to(run.device)
    served = better_of(head, own, *(part.to(run.device) for part in (val.head_input, val.logits, val.labels)))
    return qualities_of(run, {"psc": served, "head": head}, val, test)


def qualities_of(run: Run, heads: Mapping[str, Head], val: Examples, test: Examples) -> Json:
    """Measure on ``test`` fitted heads, "psc" among them, temperature scaling chosen on ``val``, and softmax."""
    found = {
        **{name: probabilities(run, head, test) for name, head in heads.items()},
        "temperature": (test.logits / fit_temperature(val.logits, val.labels)).softmax(1),
        "dnn": test.logits.softmax(1),
    }
    rows = {name: quality(each, test.labels) for name, each in found.items()}
    return {**rows, "calibrated": {"ece": ece_when_calibrated(found["psc"], run.seed)}}


@torch.inference_mode()
def probabilities(run: Run, head: Head, test: Examples) -> Tensor:
    """Return the probabilities of a head for the test images, ``float64 (n, K)``."""
    output: ClassifierOutput = head((test.logits if head.kind == "own" else test.head_input).to(run.device))
    return output.probabilities.double().cpu()


def head_of(run: Run, train: Examples, val: Examples) -> Head:
    """Return the head fitted on ``train`` and selected on ``val``."""
    classes = tuple(map(str, range(val.logits.shape[1])))
    read, selection = (
        Features(z := as_matrix(part.head_input), z, {}, part.labels, part.images, classes, z.shape[1:])
        for part in (train, val)
    )
    return fit_head(read, selection, Classification.heads["laplace"], run.seed, run.device)


def ece_when_calibrated(probabilities: Tensor, seed: int, draws: int = 100) -> float:
    """Return the mean ECE of labels drawn from the probabilities: that of perfect calibration on as many images."""
    source = torch.Generator().manual_seed(seed)
    confidence, predicted = probabilities.max(1)
    drawn = [torch.multinomial(probabilities, 1, generator=source)[:, 0] for _ in range(draws)]
    return statistics.mean(metrics.ece(confidence, predicted == labels) for labels in drawn)


def quality(probabilities: Tensor, labels: Tensor) -> Json:
    """Return accuracy, NLL (nats) and ECE."""
    confidence, predicted = probabilities.max(1)
    return {
        "accuracy": metrics.accuracy(probabilities, labels),
        "nll": metrics.nll(probabilities, labels),
        "ece": metrics.ece(confidence, predicted == labels),
    }
