"""Evaluate a PSC through its served path, beside the detectors people use instead.

One pass over each data set keeps a handful of float64 numbers for each image (scores) and each labelled example
(losses), but no features and no probabilities.

Where images have several labels, accuracy, likelihood and selective metrics count labelled examples; OOD scores, false
alarms and prediction sets count images, and a set is right if it holds the first label, as in calibration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.evaluation.baselines import Baselines
from psc_core.evaluation.losses import METRICS, Losses, losses_of
from psc_core.evaluation.own import OwnNetwork
from psc_core.evaluation.report import ENTROPY, EPISTEMIC, PRIMARY, EvaluationReport, ObservedRate, Separation
from psc_core.evaluation.selective import acceptance
from psc_core.heads import entropy
from psc_core.metrics import intervals, ranking
from psc_core.model.outputs import Outputs
from psc_core.model.predictor import PSC
from psc_core.rates import tolerant_ceil

LEVEL = 0.99
"""Probability of the intervals around observed rates."""

AMBIGUOUS_PREFIX = "ambiguous"
"""Prefix of the names of groups of ambiguous images; images of all other groups are clean."""


@dataclass(frozen=True)
class ScoredImages:
    """What one pass keeps of n images, on the CPU, in the order of the data set."""

    ood: Mapping[str, Tensor]  # by score, float64 (n,); higher is more unusual
    alarm: Tensor  # bool (n,), p-value ≤ α
    entropy: Mapping[str, Tensor]  # by classifier, float64 (n,), nats
    set_size: Tensor  # int64 (n,), classes in the prediction set
    predicted: Tensor  # int64 (n,), the most probable class
    correct: Tensor  # bool (n,), the first label is predicted; empty for data of other classes
    covered: Tensor  # bool (n,), the first label is in the set; empty for data of other classes
    losses: Mapping[str, Losses]  # by classifier; empty for data of other classes


def compare(
    psc: PSC, id_data: ImageDataset, inside: ScoredImages, outside: Mapping[str, ScoredImages]
) -> EvaluationReport:
    """The report of scored images: ``inside`` those of ``id_data``, ``outside`` out-of-distribution ones by name."""
    calibration_images = len(psc.calibration)
    return EvaluationReport(
        model={"name": psc.name, "version": psc.version, "layer": psc.layer},
        id_name=id_data.name,
        images=len(id_data),
        examples=id_data.examples,
        classification=classification_of(inside.losses),
        ood_images={name: len(scored.alarm) for name, scored in outside.items()},
        separation={name: separation(inside.ood, scored.ood, psc.policy.alpha) for name, scored in outside.items()},
        acceptance={name: acceptance(inside.ood, scored.ood, inside.correct) for name, scored in outside.items()},
        flagged={name: float(scored.alarm.double().mean()) for name, scored in outside.items()},
        false_alarms=observed_rate(inside.alarm, psc.policy.alpha, calibration_images),
        misses=observed_rate(~inside.covered, 1 - psc.policy.coverage, calibration_images),
        mean_set_size=float(inside.set_size.double().mean()),
        ambiguity=ambiguity(inside.entropy, id_data.groups),
    )


def classification_of(losses: Mapping[str, Losses]) -> dict[str, dict[str, float]]:
    """Every metric of :data:`psc_core.evaluation.losses.METRICS`, by classifier."""
    return {
        name: {metric: compute(of_one) for metric, (_, compute) in METRICS.items()} for name, of_one in losses.items()
    }


def check_model_classes(psc: PSC, data: ImageDataset) -> None:
    """Require data of the model's classes.

    Raises:
        UsageError: They differ; the message says how.
    """
    if data.classes != psc.classes:
        theirs, ours = set(data.classes), set(psc.classes)
        found = [f"{title}: {_some(names)}" for title, names in (("missing", ours - theirs), ("unknown", theirs - ours))
                 if names]  # fmt: skip
        raise UsageError(
            f"expected the model's {len(psc.classes)} classes in {data.name}, got {len(data.classes)} "
            f"({'; '.join(found) or 'in another order'}); use data of the model's classes "
            "(an empty folder is enough for a class without images)"
        )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")


def score_images(
    psc: PSC, data: ImageDataset, baselines: Baselines | OwnNetwork | None = None, *, batch_images: int = 256
) -> ScoredImages:
    """One pass of ``data`` through the served pipeline and the baselines.

    Raises:
        UsageError: Data read through another preprocessing than the model's.
    """
    if data.preprocess != psc.preprocess:
        raise UsageError(
            f"expected {data.name} to be read through the model's preprocessing {psc.preprocess}, got "
            f"{data.preprocess}; open it with preprocess=psc.preprocess"
        )
    ood, entropies = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)
    losses = defaultdict[str, list[Losses]](list)
    alarm: list[Tensor] = []
    set_size: list[Tensor] = []
    predicted: list[Tensor] = []
    correct: list[Tensor] = []
    covered: list[Tensor] = []
    labelled = data.classes == psc.classes
    with torch.inference_mode():
        for batch in track_images(data, Compute(psc.device, batch_images=batch_images), f"evaluating {data.name}"):
            images = batch.images.to(psc.device)
            packed = psc.pipeline(images).cpu()
            outputs, decisions = Outputs(packed, psc.gates), psc.decide(Outputs(packed.numpy(), psc.gates))
            batch_scores = {PRIMARY: outputs["ood_score"], ENTROPY: outputs["predictive_entropy"]}
            if psc.predictions == "psc":
                batch_scores[EPISTEMIC] = outputs["epistemic"]
            probabilities = {PRIMARY: outputs.probabilities}
            if baselines is not None:
                others = baselines.score(images)
                batch_scores |= others.scores
                probabilities |= others.probabilities
            for name, values in batch_scores.items():
                ood[name].append(values.double().cpu())
            for name, p in probabilities.items():
                entropies[name].append(entropy(p.double()).cpu())
                if labelled:
                    losses[name].append(losses_of(p.cpu(), batch))
            sets = torch.from_numpy(decisions.prediction_set)
            alarm.append(torch.from_numpy(decisions.is_ood))
            set_size.append(sets.sum(1))
            predicted.append(outputs.probabilities.argmax(1))
            if labelled:
                first = torch.searchsorted(batch.image_index, torch.arange(len(images)))
                correct.append(predicted[-1] == batch.labels[first])
                covered.append(sets.gather(1, batch.labels[first, None]).squeeze(1))
    return ScoredImages(
        ood={name: torch.cat(parts) for name, parts in ood.items()},
        alarm=torch.cat(alarm),
        entropy={name: torch.cat(parts) for name, parts in entropies.items()},
        set_size=torch.cat(set_size),
        predicted=torch.cat(predicted),
        correct=torch.cat(correct or [torch.empty(0, dtype=torch.bool)]),
        covered=torch.cat(covered or [torch.empty(0, dtype=torch.bool)]),
        losses={name: Losses(*map(torch.cat, zip(*parts, strict=True))) for name, parts in losses.items()},
    )


def separation(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor], alpha: float) -> dict[str, Separation]:
    """How well every score separates the two sets of images, and the difference to PSC."""
    return {
        name: Separation(
            auroc=ranking.auroc(inside[name], outside[name]),
            aupr_in=ranking.aupr(-inside[name], -outside[name]),
            aupr_out=ranking.aupr(outside[name], inside[name]),
            fpr95=ranking.fpr95(inside[name], outside[name]),
            auroc_difference=ranking.auroc_difference(inside[PRIMARY], outside[PRIMARY], inside[name], outside[name]),
            threshold=float(inside[name].kthvalue(max(1, tolerant_ceil((1 - alpha) * len(inside[name])))).values),
        )
        for name in inside
    }


def observed_rate(happened: Bool[Tensor, " n"], nominal: float, calibration_images: int) -> ObservedRate:
    """How often something happened, beside its nominal rate."""
    count, images = int(happened.sum()), len(happened)
    return ObservedRate(
        promised=nominal,
        count=count,
        images=images,
        level=LEVEL,
        interval=intervals.binomial_interval(count, images, level=LEVEL),
        acceptance=intervals.binomial_acceptance(images, nominal, level=LEVEL),
        calibrated_acceptance=intervals.beta_binomial_acceptance(images, nominal, calibration_images, level=LEVEL),
    )


def ambiguity(entropies: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> dict[str, float]:
    """AUROC of each classifier's entropy, ambiguous against clean images; empty unless there are both."""
    ambiguous = [positions for name, positions in groups.items() if name.startswith(AMBIGUOUS_PREFIX)]
    clean = [positions for name, positions in groups.items() if not name.startswith(AMBIGUOUS_PREFIX)]
    if not ambiguous or not clean:
        return {}
    inside, outside = torch.cat(clean), torch.cat(ambiguous)
    if min(len(inside), len(outside)) == 0:
        return {}
    return {name: ranking.auroc(values[inside], values[outside]) for name, values in entropies.items()}
