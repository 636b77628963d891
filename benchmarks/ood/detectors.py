"""PSC's OOD scores, and the detectors that come from no library, on one network.

PSC: models fitted as ``psc-fit`` fits them, with each of its OOD scores (:data:`PSC_OPTIONS`), and the sum of density
and entropy.

Penultimate features (the input h of the last linear layer), all components of them:

* ``gda``, ``tied``, ``gda++``, ``mahalanobis++``: a Gaussian for each class, or all with one covariance, of h or, with
  ``++``, of h / ‖h‖; ``pooled++``: PSC's density, of h alone;
* ``gda++ + entropy``: the sum with the entropy of softmax, each divided by its upper spread over validation images;
* ``fDBD`` (Liu & Qin 2024): distance to the decision boundaries over the distance to the mean of the training features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks import fitting
from benchmarks.checkpoints import Trained
from benchmarks.fitting import Penultimate
from benchmarks.runs import Run
from psc_core.calibrate import calibrate_scorer, score_dataset
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.baselines import full_density
from psc_core.fit_data import FitData, FitJob
from psc_core.heads.base import entropy
from psc_core.model import PSC
from psc_core.pipeline import Pipeline
from psc_core.tasks.base import Outputs

DEFAULT = "PSC"  # The title of ``psc-fit`` without options.

PAPER = "PSC, the paper's"  # The title of Gaussians on z alone.

DENSITY = "PSC, density"
WITH_ENTROPY = "PSC, density+entropy"  # Their sum, each divided by its upper spread.

PSC_OPTIONS: Mapping[str, Mapping[str, str]] = {  # The flags of each PSC.
    DEFAULT: {"density": "pooled++", "ood_score": "checks"},
    DENSITY: {"density": "pooled++", "ood_score": "density"},
    # Its head has no part in its score, and takes long with many classes.
    PAPER: {"density": "gda", "ood_score": "density", "predictions": "original"},
}

GAUSSIANS = ("gda", "tied", "gda++", "mahalanobis++", "pooled++")

BATCH_IMAGES = 32  # On a CPU, batches of 256 images of 96 pixels take three times as long per image.


@dataclass(frozen=True)
class Images(Penultimate):
    """Images' penultimate features, logits and labels, and PSC's scores, on the CPU."""

    psc: Mapping[str, Float[Tensor, " n"]] = field(default_factory=dict)  # OOD scores by the name of the options.


Score = Callable[[Images], Tensor]  # Returns OOD scores ``(n,)`` of images; higher is more out-of-distribution.


@dataclass(frozen=True)
class Detector:
    name: str  # The name in tables.
    family: str  # ``"psc"``, ``"penultimate"`` or ``"pytorch-ood"``.
    score: Score


@torch.no_grad()
def scored(detector: Detector, images: Images) -> Float[Tensor, " n"]:
    """Return the scores as float64; NaN counts as infinitely out-of-distribution."""
    return torch.nan_to_num(detector.score(images).double().cpu(), nan=torch.inf)


@dataclass(frozen=True)
class Pscs:
    """The models that ``psc-fit`` makes with each of :data:`PSC_OPTIONS`; those with one density share its fit."""

    default: PSC  # The model with the options of :data:`DEFAULT`.
    pipelines: Mapping[str, Pipeline]  # The pipelines by the name of the options.
    entropy_weight: float  # The weight of the entropy in :data:`WITH_ENTROPY`.

    @torch.inference_mode()
    def read(self, data: ImageDataset) -> dict[str, Float[Tensor, " n"]]:
        """Return the OOD scores of all images, by the name of the options."""
        parts: dict[str, list[Tensor]] = {name: [] for name in (*self.pipelines, WITH_ENTROPY)}
        for batch in data.batches(BATCH_IMAGES):
            images = batch.images.to(self.default.device)
            scored = {scorer: scorer(images) for scorer in {each.scorer for each in self.pipelines.values()}}
            for name, pipeline in self.pipelines.items():
                outputs = Outputs(
                    pipeline.outputs(scored[pipeline.scorer]).cpu(),
                    pipeline.scorer.head.score_names,
                    pipeline.check_names,
                )
                parts[name].append(outputs["ood_score"])
                if name == DENSITY:
                    parts[WITH_ENTROPY].append(
                        outputs["ood_score"] + self.entropy_weight * outputs["predictive_entropy"]
                    )
        return {name: torch.cat(values) for name, values in parts.items()}


def fit_pscs(run: Run, trained: Trained) -> Pscs:
    """Fit once for each density, and calibrate once for each OOD score."""
    of_density: dict[str, PSC] = {}
    pipelines = {}
    data = FitData.of(trained.fit_on, trained.val, seed=run.seed)
    for name, options in PSC_OPTIONS.items():
        density = options["density"]
        if density not in of_density:
            parts = fitting.stages(run, trained, density=density)
            of_density[density] = fitting.psc_of(run, trained, parts, **options)
            pipelines[name] = of_density[density].pipeline
        else:
            settings = fitting.settings_of(run).changed({"ood_score": options["ood_score"]})
            scorer = of_density[density].pipeline.scorer
            pipelines[name], _ = calibrate_scorer(scorer, FitJob(data, settings, settings.compute()))
    selected = score_dataset(pipelines[DENSITY].scorer, data.selection, fitting.compute_of(run), "selection").scores
    weight = upper_spread(-selected["log_density"]) / upper_spread(selected["predictive_entropy"])
    return Pscs(of_density[PSC_OPTIONS[DEFAULT]["density"]], pipelines, weight)


def upper_spread(score: Float[Tensor, " n"]) -> float:
    """Return the distance from a score's median to its 95 % quantile, on the side of unusual images."""
    middle, high = torch.quantile(score.double(), torch.tensor([0.5, 0.95], dtype=torch.float64))
    return float(high - middle)


def read(run: Run, trained: Trained, pscs: Pscs, data: ImageDataset) -> Images:
    found = fitting.penultimate_features(run, trained, data, per_example=False)
    return Images(found.features, found.logits, found.labels, pscs.read(data))


def _psc_score(name: str, images: Images) -> Tensor:
    return images.psc[name]


def of_psc(names: Sequence[str]) -> list[Detector]:
    return [Detector(name, "psc", partial(_psc_score, name)) for name in names]


def fit_penultimate(train: Penultimate, val: Penultimate, classes: int, output: nn.Linear) -> list[Detector]:
    scores: dict[str, Score] = {}
    for kind in GAUSSIANS:
        density = full_density(train.features, train.labels, num_classes=classes, kind=kind)
        scores[kind] = lambda images, density=density: -density(images.features).log_density  # type: ignore[misc]
    gaussian = scores["gda++"]
    spreads = [upper_spread(score(_images(val))) for score in (gaussian, _entropy)]
    scores["gda++ + entropy"] = lambda images: gaussian(images) / spreads[0] + _entropy(images) / spreads[1]
    weight, mean = output.weight.detach().cpu(), train.features.mean(0)
    scores["fDBD"] = lambda images: fdbd(images.features, images.logits, weight, mean)
    return [Detector(f"penultimate {name}", "penultimate", score) for name, score in scores.items()]


def fdbd(
    features: Float[Tensor, "n dim"],
    logits: Float[Tensor, "n classes"],
    weight: Float[Tensor, "classes dim"],
    mean: Float[Tensor, " dim"],
) -> Float[Tensor, " n"]:
    """Return −(1/(K−1)) Σ_{k≠c} (f_c − f_k) / ‖w_c − w_k‖ / ‖h − mean‖ with c the predicted class."""
    predicted = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, predicted) - logits
    distances = torch.cdist(weight.double(), weight.double())[predicted[:, 0]]
    others = torch.ones_like(margins).scatter_(1, predicted, 0.0)
    to_boundaries = (others * margins / distances.clamp_min(1e-12)).sum(1) / others.sum(1)
    return -to_boundaries / (features - mean).double().norm(dim=1)


def _entropy(images: Images) -> Tensor:
    return entropy(images.logits.softmax(1))


def _images(of: Penultimate) -> Images:
    return Images(of.features, of.logits, of.labels)
