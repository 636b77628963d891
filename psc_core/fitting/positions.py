"""Choose how many spatial components of the projection a density of z needs.

The input is the largest projection, to z (n, c_max · d_max), and a few sizes c_proj × d_proj within it; the output
is the mean AUROC of each d_proj, of which :func:`fewest_positions` takes the smallest that is good enough.

NC1 and NC4 only ask for what tells the known classes apart, and often one component a channel is enough for that: it
says what is in the image and not where.  A density needs more.  So it is fitted with d_proj spatial components, with
twice as many, and so on, and asked to tell images made from the selection split (:mod:`psc_core.gates.fit.made_up`)
from the images as they are; the fewest components within :data:`AUROC_LOSS` of the best mean AUROC are kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.compute.device import autocast
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import drawn
from psc_core.density.fit.density import Examples, fit_density
from psc_core.fitting.data import FitData
from psc_core.fitting.job import FitJob
from psc_core.gates.fit.made_up import REAL, by_transform, made_up_batches
from psc_core.images.preprocess import Pixels
from psc_core.metrics.ranking import auroc
from psc_core.network.backbone import Backbone, FeatureStep, feature_step
from psc_core.numerics.matrix import usable
from psc_core.projection.fit.projection import SizedProjection
from psc_core.projection.module import Projection

AUROC_LOSS: Final = 0.005
"""Mean AUROC that may be given up for fewer components."""

TRAINING_IMAGES: Final = 10_000
"""Maximum number of training images that the densities are fitted on."""


def compare_positions(
    backbone: Backbone,
    sized: SizedProjection,
    sizes: Sequence[tuple[int, int]],
    job: FitJob,
) -> dict[int, float]:
    """Return the mean AUROC of made-up against real images for each number of spatial components.

    Args:
        backbone: The network, cut behind the candidate layer(s).
        sized: The largest projection.
        sizes: The pairs (c_proj, d_proj) to compare, within it.
        job: The images, settings with a density that reads z, and the device.
    """
    data, compute = job.data, job.compute
    step = feature_step(backbone, compute.precision)
    few = drawn(data.train, TRAINING_IMAGES, data.seed)
    kept, of_batches = [], []
    for features, batch in passes(few, compute, "positions: features", step):
        kept.append(batch.per_example(sized.largest(features)).cpu())
        of_batches.append(batch.labels)
    made = _made_up_features(sized.largest, step, data, compute)
    z, labels, classes = usable(torch.cat(kept), torch.cat(of_batches))
    found = {}
    for c_proj, d_proj in sizes:
        columns = _columns(sized.largest, c_proj, d_proj)
        fitted = fit_density(Examples(z[:, columns], labels, classes), kind=job.settings.density)
        scores = {name: -fitted(values[:, columns]).log_density for name, values in made.items()}
        real = scores.pop(REAL)
        found[d_proj] = statistics.mean(auroc(real, made_up) for made_up in scores.values())
    return found


def fewest_positions(found: Mapping[int, float]) -> int:
    """Return the smallest number of spatial components within :data:`AUROC_LOSS` of the best."""
    return min(d for d, value in found.items() if value >= max(found.values()) - AUROC_LOSS)


def _made_up_features(
    largest: Projection, step: FeatureStep, data: FitData, compute: Compute
) -> dict[str, Float[Tensor, "n dim"]]:
    """Return z of the selection split's images under :data:`.REAL`, and of the images made from them by transform."""
    mixed, selection = not data.is_ambiguous, data.selection

    def project(images: Pixels) -> dict[str, Tensor]:
        with autocast(compute.device, compute.precision):
            features = step(selection.preprocess.standardise(images))
        return {"z": largest(features)}

    batches = made_up_batches(selection, compute, "positions: made-up images", mixed=mixed, seed=data.seed)
    return {name: found["z"] for name, found in by_transform(batches, project).items()}


def _columns(largest: Projection, c_proj: int, d_proj: int) -> Tensor:
    """Return the columns of z that hold the leading components, ``int64 (c_proj · d_proj,)``."""
    grid = torch.arange(largest.c_proj * largest.d_proj).view(largest.c_proj, largest.d_proj)
    return grid[:c_proj, :d_proj].flatten()
