"""Evaluate a classifier, beside the detectors that people use instead.

One pass over each data set keeps a handful of float64 numbers for each image (scores) and each labelled example
(losses), but no features and no probabilities.

If images have several labels, accuracy, likelihood and selective metrics count labelled examples; OOD scores, false
alarms and prediction sets count images, and a set is right if it contains the first label, as in calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from psc_core.compute import BATCH_IMAGES
from psc_core.compute.passes import Compute
from psc_core.data.classes import check_same
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import is_table, open_dataset
from psc_core.errors import UsageError
from psc_core.evaluation.base import PRIMARY, observed_rate
from psc_core.evaluation.baselines import Baselines, PlainClassifier, fit_baselines
from psc_core.evaluation.classification_report import ClassificationReport
from psc_core.evaluation.losses import QUALITIES, Losses, losses_of
from psc_core.evaluation.selective import acceptance
from psc_core.evaluation.separation import ENTROPY, EPISTEMIC, separation
from psc_core.metrics import ranking
from psc_core.model.classifier import PSC
from psc_core.network.backbone import trial_input
from psc_core.network.layers import list_layers
from psc_core.network.load import bounded_size, load_network
from psc_core.scoring.dataset import scored_batches
from psc_core.tasks.classification.decide import ACCEPT
from psc_core.tasks.classification.heads.base import entropy

AMBIGUOUS_PREFIX: Final = "ambiguous"
"""Prefix of the names of groups of ambiguous images; the images of all other groups are clean."""


@dataclass(frozen=True)
class ScoredImages:
    """The scores and losses that one pass keeps of n images, on the CPU, in the order of the data set."""

    ood: Mapping[str, Float[Tensor, " n"]]  # by score, float64; higher is more unusual
    alarm: Bool[Tensor, " n"]  # p-value ≤ α
    accepted: Bool[Tensor, " n"]  # neither out of distribution nor ambiguous
    entropy: Mapping[str, Float[Tensor, " n"]]  # by classifier, float64, nats
    set_size: Int[Tensor, " n"]  # classes in the prediction set
    predicted: Int[Tensor, " n"]  # the most probable class
    correct: Bool[Tensor, " m"]  # whether the first label is predicted; empty for data of other classes
    covered: Bool[Tensor, " m"]  # whether the first label is in the set; empty for data of other classes
    losses: Mapping[str, Losses]  # by classifier; empty for data of other classes

    @classmethod
    def joined(cls, parts: Sequence[ScoredImages]) -> ScoredImages:
        """Return the images of all parts, in order."""
        first = parts[0]
        return cls(
            ood={name: torch.cat([part.ood[name] for part in parts]) for name in first.ood},
            alarm=torch.cat([part.alarm for part in parts]),
            accepted=torch.cat([part.accepted for part in parts]),
            entropy={name: torch.cat([part.entropy[name] for part in parts]) for name in first.entropy},
            set_size=torch.cat([part.set_size for part in parts]),
            predicted=torch.cat([part.predicted for part in parts]),
            correct=torch.cat([part.correct for part in parts]),
            covered=torch.cat([part.covered for part in parts]),
            losses={
                name: Losses(*map(torch.cat, zip(*(part.losses[name] for part in parts), strict=True)))
                for name in first.losses
            },
        )


def open_images(model: PSC, spec: str, *, split: str = "test", target: str | None = None) -> ImageDataset:
    """Open the labelled images that ``spec`` names, with the classes in the model's order.

    Args:
        model: The fitted model.
        spec: The images.
        split: One of :data:`psc_core.data.spec.SPLITS`.
        target: The column of a table that holds the classes; None if there is only one.

    Raises:
        DataError: If the spec or the data set is invalid.
    """
    target = target if is_table(spec) else None
    data = open_dataset(spec, split=split, preprocess=model.preprocess, numbers=False, target=target)
    return data.in_order(model.classes)


def open_baselines(
    model: PSC, weights: Path, train: ImageDataset, val: ImageDataset, *, batch_images: int = BATCH_IMAGES
) -> Baselines:
    """Fit the other detectors on the network that the model was cut from.

    Args:
        model: The fitted model.
        weights: The checkpoint of the whole network.
        train: The training images.
        val: The validation images.
        batch_images: Maximum number of images in a batch.

    Raises:
        DataError: If the data has other classes.
        UsageError: If the network has no layer before its output, or no name builds it from a checkpoint.
    """
    net = _whole_network(model, weights)
    for data in (train, val):
        check_same(data, model.classes, "model's")
    layers = list_layers(net, trial_input(model.preprocess))
    penultimate = [layer.name for layer in layers if layer.role == "penultimate"]
    if not penultimate:
        raise UsageError(f"expected a network with a layer before its output for the baselines, {weights} has none")
    return fit_baselines(net, penultimate[0], train, val, compute=Compute(model.device, batch_images=batch_images))


def _whole_network(model: PSC, weights: Path) -> nn.Module:
    """Build the network that the model was cut from: by its name, or if a bundle has none from the file given to fit.

    Raises:
        UsageError: If ``weights`` is a checkpoint and no name builds the network.
    """
    recipe = model.backbone.cut.recipe
    if recipe is not None:
        with bounded_size(recipe):
            return load_network(**asdict(recipe), weights=weights)
    if weights.suffix == ".onnx" or weights.is_dir():
        return load_network(f"{'hf' if weights.is_dir() else 'onnx'}:{weights}", num_classes=len(model.classes))
    raise UsageError(
        f"expected --weights to be an ONNX file, or a folder of transformers, of the whole network: the bundle of "
        f"{model.name} holds a graph that ends at its layers, and no name builds the rest; got {weights}"
    )


def plain_network(net: nn.Module, data: ImageDataset, compute: Compute) -> PlainClassifier:
    """Return the plain network as a baseline, on the device."""
    return PlainClassifier(net.to(compute.device), data.preprocess, compute.precision)


@torch.inference_mode()
def score_images(
    model: PSC,
    data: ImageDataset,
    baselines: Baselines | PlainClassifier | None = None,
    *,
    batch_images: int = BATCH_IMAGES,
) -> ScoredImages:
    """Send ``data`` through the served path and the baselines once.

    Raises:
        UsageError: If the data is read through another preprocessing than the model's.
    """
    parts = []
    labelled = data.classes == model.classes
    for batch, images, packed in scored_batches(model, data, batch_images):
        outputs, decisions = model.outputs(packed), model.decide(model.outputs(packed.numpy()))
        scores = {PRIMARY: outputs["ood_score"], ENTROPY: outputs["predictive_entropy"]}
        if model.predictions == "psc":
            scores[EPISTEMIC] = outputs["epistemic"]
        probabilities = {PRIMARY: outputs.probabilities}
        if baselines is not None:
            others = baselines.score(images)
            scores |= others.scores
            probabilities |= others.probabilities
        sets, predicted = torch.from_numpy(decisions.prediction_set), outputs.probabilities.argmax(1)
        first = batch.first_labels() if labelled else None
        none = torch.empty(0, dtype=torch.bool)
        parts.append(
            ScoredImages(
                ood={name: values.double().cpu() for name, values in scores.items()},
                alarm=torch.from_numpy(decisions.is_ood),
                accepted=torch.from_numpy(decisions.decision == ACCEPT),
                entropy={name: entropy(p.double()).cpu() for name, p in probabilities.items()},
                set_size=sets.sum(1),
                predicted=predicted,
                correct=none if first is None else predicted == first,
                covered=none if first is None else sets.gather(1, first[:, None]).squeeze(1),
                losses={name: losses_of(p.cpu(), batch) for name, p in probabilities.items()} if labelled else {},
            )
        )
    return ScoredImages.joined(parts)


def quality_of(scored: ScoredImages, data: ImageDataset) -> dict[str, dict[str, float]]:
    """Return every metric of :data:`.losses.QUALITIES` by classifier; none for data of other classes."""
    return {
        name: {metric: compute(losses) for metric, (_, compute) in QUALITIES.items()}
        for name, losses in scored.losses.items()
    }


def compare(
    model: PSC, id_data: ImageDataset, inside: ScoredImages, outside: Mapping[str, ScoredImages]
) -> ClassificationReport:
    """Return the report of scored images: ``inside`` for ``id_data``, ``outside`` for each OOD set."""
    alpha, calibration_images = model.policy.alpha, len(model.calibration)
    return ClassificationReport(
        model={"name": model.name, "version": model.version, "layer": model.layer},
        id_name=id_data.name,
        images=len(id_data),
        examples=id_data.examples,
        classification=quality_of(inside, id_data),
        ood_images={name: len(scored.alarm) for name, scored in outside.items()},
        separation={name: separation(inside.ood, scored.ood, alpha) for name, scored in outside.items()},
        acceptance={name: acceptance(inside.ood, scored.ood, inside.correct) for name, scored in outside.items()},
        flagged={name: float(scored.alarm.double().mean()) for name, scored in outside.items()},
        false_alarms=observed_rate(inside.alarm, alpha, calibration_images),
        misses=observed_rate(~inside.covered, 1 - model.policy.coverage, calibration_images),
        accepted=int(inside.accepted.sum()),
        accepted_wrong=int((inside.accepted & ~inside.correct).sum()),
        mean_set_size=float(inside.set_size.double().mean()),
        ambiguity=ambiguity(inside.entropy, id_data.groups),
    )


def ambiguity(entropies: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the AUROC of each classifier's entropy for ambiguous against clean images; none unless there are both."""
    ambiguous = [positions for name, positions in groups.items() if name.startswith(AMBIGUOUS_PREFIX)]
    clean = [positions for name, positions in groups.items() if not name.startswith(AMBIGUOUS_PREFIX)]
    if not ambiguous or not clean:
        return {}
    inside, outside = torch.cat(clean), torch.cat(ambiguous)
    if min(len(inside), len(outside)) == 0:
        return {}
    return {name: ranking.auroc(values[inside], values[outside]) for name, values in entropies.items()}
