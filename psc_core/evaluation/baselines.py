"""Detectors that people use instead of PSC, from one forward pass of the same network.

Every score is higher for images that are less like the training data.  Symbols: ``f_c`` logits, ``p = softmax(f)``,
``h`` the penultimate features (averaged over positions if the layer has several).

===================  =================================================================================
``max-softmax``      1 − max_c p_c (Hendrycks & Gimpel 2017)
``entropy``          −Σ_c p_c log p_c, nats
``energy``           −log Σ_c exp f_c (Liu et al. 2020, equation 4 with T = 1)
``temperature``      max-softmax of f / T, T by validation NLL (Guo et al. 2017, equation 9)
``gda``              −log p(h), one Gaussian a class: DDU without spectral normalisation (Mukhoti et al. 2023)
``knn``              distance to the k-th nearest h / ‖h‖ in the training data (Sun et al. 2022, Algorithm 1)
``mahalanobis++``    smallest Mahalanobis distance of h / ‖h‖, tied covariance (Müller & Hein 2025)
===================  =================================================================================

T alone minimises the validation NLL, as is common; the T of PSC has a prior and must gain more than its error
 (:func:`psc_core.heads.softmax.choose_temperature`).  ``gda`` and ``mahalanobis++`` keep every component of the
features, because directions with almost no variance may separate OOD images.  Softmax scores are computed from logits
in float64, where a confident network does not saturate.

Only the features of a random subset of at most :data:`BANK_IMAGES` training images and :data:`BANK_BYTES` are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional

from psc_core import linalg
from psc_core.compute import Compute, passes
from psc_core.data.dataset import ImageDataset, draw
from psc_core.density import DENSITIES, ClasswiseDensity, Density, Examples, fit_density, rank_of
from psc_core.errors import FitError, NetworkError
from psc_core.evaluation.evaluate import OriginalNetwork
from psc_core.features import chunk_rows, usable
from psc_core.heads.base import entropy
from psc_core.heads.softmax import TEMPERATURES
from psc_core.images.preprocess import Images, Preprocess
from psc_core.network.cut import Backbone, trial_input, truncate
from psc_core.network.output import check_network_output


def fit_temperature(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Return the T in :data:`TEMPERATURES` with the least NLL of softmax(f / T), which is convex in β = 1/T."""

    def slope(beta: float) -> float:
        """Return that of the summed NLL in β."""
        total = 0.0
        for chunk in chunk_rows(*logits.shape):
            f = logits[chunk].double()
            mean = ((beta * f).softmax(1) * f).sum(1)
            total += float((mean - f.gather(1, labels[chunk, None]).squeeze(1)).sum())
        return total

    least, most = TEMPERATURES
    if slope(1.0) == 0:
        return 1.0
    if slope(1 / most) >= 0:
        return most
    return least if slope(1 / least) <= 0 else 1 / float(brentq(slope, 1 / most, 1 / least, rtol=1e-8))


NEIGHBOURS: Final = 50  # the largest k of ``knn``, OpenOOD's choice for CIFAR-10; at most half of the smallest class
DETECTORS: Final = {  # what the scores are, by their name
    "max-softmax": "1 − the network's highest probability",
    "entropy": "entropy of the network's probabilities",
    "energy": "−log Σ exp of the network's logits",
    "temperature": "max-softmax after one temperature for all images",
    "gda": "DDU: one Gaussian for each class, on penultimate features",
    "knn": "distance to the k-th nearest training image, on penultimate features of unit length",
    "mahalanobis++": "distance to the nearest class mean, likewise; that of psc-fit --density reads z in place of them",
}
BANK_IMAGES: Final = 50_000  # maximum number of training images whose features are kept
BANK_BYTES: Final = 1 << 28  # maximum size of the training features that are kept, in bytes of float32
BANK_CHUNK: Final = 8192  # number of images of the bank in one block of similarities
GAUSSIAN_ELEMENTS: Final = 1 << 28  # maximum K × P × P (1 GiB in float32); with many classes P is reduced


class BaselineOutputs(NamedTuple):
    scores: dict[str, Tensor]  # (B,) float64, by detector, in printed order
    probabilities: dict[str, Tensor]  # (B, K) float64, by "original" and "temperature"


@dataclass(frozen=True)
class Baselines:
    backbone: Backbone  # the whole network, returning penultimate features and logits
    preprocess: Preprocess  # of the data used for fitting
    temperature: float  # T
    gda: Density  # log p(h)
    mahalanobis: Density  # on h / ‖h‖, with a tied covariance
    bank: Float[Tensor, "images dim"]  # training features of unit length
    neighbours: int  # k

    @torch.no_grad()
    def score(self, images: Images) -> BaselineOutputs:
        features, logits = penultimate_and_logits(self.backbone, self.preprocess.standardise(images))
        tempered = logits / self.temperature
        unit = functional.normalize(features)
        scores = {
            "max-softmax": max_softmax_score(logits),
            "entropy": entropy(logits.softmax(1)),
            "energy": -logits.logsumexp(1),
            "temperature": max_softmax_score(tempered),
            "gda": -self.gda(features).log_density.double(),
            "knn": knn_score(unit, self.bank, self.neighbours).double(),
            "mahalanobis++": self.mahalanobis.explain(unit).class_distances.amin(1).double(),
        }
        return BaselineOutputs(scores, {"original": logits.softmax(1), "temperature": tempered.softmax(1)})


class PlainClassifier(OriginalNetwork):
    """A classifier as it was trained, shown beside its PSC."""

    def score(self, images: Images) -> BaselineOutputs:
        """Return the max-softmax score and the softmax of a batch, in float64."""
        logits = self.outputs(images)
        return BaselineOutputs({"max-softmax": max_softmax_score(logits)}, {"original": logits.softmax(1)})


def fit_baselines(
    net: nn.Module,
    penultimate_layer: str,
    train: ImageDataset,
    val: ImageDataset,
    *,
    compute: Compute,  # the device and batch size; baselines always run in float32
    seed: int = 0,
) -> Baselines:
    """Fit every detector: one pass over (a subset of) ``train``, one over ``val``."""
    compute = replace(compute, precision="fp32")
    net.to(compute.device)
    trial = trial_input(train.preprocess).to(compute.device)
    backbone = truncate(net, [penultimate_layer], keep_output=True, trial=trial)
    check_network_output(backbone, trial, len(train.classes), name=train.name)
    step = partial(penultimate_and_logits, backbone)
    logits, labels = [], []
    for (_, output), batch in passes(val, compute, "baselines: temperature", step):
        logits.append(batch.per_example(output).float().cpu())
        labels.append(batch.labels)
    temperature = fit_temperature(torch.cat(logits), torch.cat(labels))
    features, image_index, train_labels = _training_features(backbone, train, compute, seed)
    unit, counts = functional.normalize(features), train_labels.bincount()
    return Baselines(
        backbone,
        train.preprocess,
        temperature,
        gda=_usable_density(features, image_index, train_labels, kind="gda"),
        mahalanobis=_usable_density(unit, image_index, train_labels, kind="tied"),
        bank=unit,
        # With more neighbours than a class has images, an image of it is far from them all.
        neighbours=max(1, min(NEIGHBOURS, int(counts[counts > 0].min()) // 2)),
    )


def full_density(z: Float[Tensor, "n dim"], labels: Int[Tensor, " n"], *, num_classes: int, kind: str) -> Density:
    """Fit a density to classes of two labels or more with as many components of the features as memory allows."""
    inputs = functional.normalize(z.double()) if DENSITIES[kind].unit_length else z
    mean = linalg.mean_of_rows(inputs)
    found = linalg.eigh(linalg.scatter_about(inputs, mean) / (len(inputs) - 1))
    # Stricter, where the mean is small, than the density's own rank, which the number must not exceed.
    noise = max(1e-9 * float(found.values[0]), (10 * torch.finfo(z.dtype).eps * float(mean.norm())) ** 2)
    components = max(1, min(int((found.values > noise).sum()), rank_of(mean, found, z.dtype)))
    if issubclass(DENSITIES[kind], ClasswiseDensity):
        components = min(components, max(1, math.isqrt(GAUSSIAN_ELEMENTS // num_classes)))
    return fit_density(Examples(z, labels, num_classes), kind=kind, pca=components)


def penultimate_and_logits(
    backbone: Backbone, images: Float[Tensor, "batch channels height width"]
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch classes"]]:
    """Return features averaged over positions (float32) and logits (float64) of standardised images."""
    (features,), logits = backbone(images)
    if logits is None:
        raise NetworkError("expected a backbone that keeps the network's output; truncate with keep_output=True")
    return features.float().mean(2), logits.double()


def max_softmax_score(logits: Float[Tensor, "batch classes"]) -> Float[Tensor, " batch"]:
    """Return 1 − max p as −expm1(max f − logsumexp f), exact for p near one."""
    return -(logits.amax(1) - logits.logsumexp(1)).expm1()


def knn_score(
    unit: Float[Tensor, "batch dim"], bank: Float[Tensor, "images dim"], neighbours: int
) -> Float[Tensor, " batch"]:
    """Return the distance to the k-th nearest unit vector of ``bank``, ``√(2 − 2 cos)``; the bank is read in blocks."""
    k = min(neighbours, len(bank))
    best = unit.new_empty(len(unit), 0)
    for block in torch.split(bank, BANK_CHUNK):
        candidates = torch.cat([best, unit @ block.T], dim=1)
        best = candidates.topk(min(k, candidates.shape[1]), dim=1).values
    return (2 - 2 * best[:, -1]).clamp_min(0).sqrt()


def _training_features(
    backbone: Backbone, train: ImageDataset, compute: Compute, seed: int
) -> tuple[Float[Tensor, "images dim"], Int[Tensor, " examples"], Int[Tensor, " examples"]]:
    """Return the features of a random subset, and the image index and label of each labelled example in it."""
    subset = draw(train, BANK_IMAGES, seed)
    kept, image_index, labels = [], [], []
    images = 0
    step = partial(penultimate_and_logits, backbone)
    for (features, _), batch in passes(subset, compute, "baselines: features", step):
        kept.append(features)
        image_index.append(batch.image_index + images)
        labels.append(batch.labels)
        images += len(features)
        if images * features.shape[1] * features.element_size() >= BANK_BYTES:
            break
    return torch.cat(kept), torch.cat(image_index).to(compute.device), torch.cat(labels).to(compute.device)


def _usable_density(features: Tensor, image_index: Tensor, labels: Tensor, *, kind: str) -> Density:
    """Fit :func:`full_density` to the classes with at least two labelled examples; others have no covariance."""
    kept, renumbered, classes = usable(image_index, labels)
    if not classes:
        raise FitError("the baselines need a class with at least two images; fit on more images")
    return full_density(features[kept], renumbered, num_classes=classes, kind=kind)
