"""Passes over a data set whose results a stage keeps: what density and head are fitted on, and scores."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute, passes, track_images
from psc_core.data.dataset import ImageDataset, stable_order
from psc_core.model.pipeline import Scored, Scorer, pool
from psc_core.network.backbone import Backbone, example_input, feature_step
from psc_core.numerics.matrix import FeatureFile, FeatureMatrix, blocks
from psc_core.projection.module import Projection


class Embedded(NamedTuple):
    """The features of n labelled examples, ordered by class.

    Attributes:
        z: (n, D) projected features, which the head reads.
        read: What the density reads: z itself, or (n, C) pooled features.
        labels: (n,) class indices, ascending.
    """

    z: FeatureMatrix
    read: FeatureMatrix
    labels: Int[Tensor, " n"]


def embed(
    backbone: Backbone,
    projection: Projection,
    dataset: ImageDataset,
    compute: Compute,
    file: Path,
    reducer: Reducer,
    *,
    pooled: bool = False,
) -> Embedded:
    """Features of every labelled example, in ``file``, so that memory does not grow with the images.

    They are written class by class, because a density reads one class at a time.

    Args:
        backbone: Truncated network.
        projection: Features to z.
        dataset: Images with labels.
        compute: Device, precision and batch size.
        file: A new file.
        reducer: Sums over processes.
        pooled: Keep pooled features beside z, for a density that reads them.
    """
    dim = projection.c_proj * projection.d_proj
    channels = _pooled_channels(backbone, dataset, compute) if pooled else 0
    features_of = feature_step(backbone, compute.precision)
    kept = FeatureFile(file, (dataset.examples, dim + channels))
    where = torch.empty_like(dataset.labels)
    where[stable_order(dataset.labels)] = torch.arange(len(where))
    if reducer.world > 1:
        where = where[reducer.shard_examples(dataset)]
    at = 0
    for features, batch in passes(reducer.shard(dataset), compute, "features", features_of):
        parts = [projection(features), *([pool(features)] if pooled else [])]
        values = batch.per_example(torch.cat(parts, dim=1)).cpu()
        kept.write(where[at : at + len(values)], values)
        at += len(values)
    if reducer.world > 1:
        for chunk, block in blocks(kept):
            kept.write(chunk, reducer.sum_(block))
    counts = dataset.labels.bincount(minlength=len(dataset.classes))
    labels = torch.arange(len(counts)).repeat_interleave(counts)
    if not pooled:
        return Embedded(kept, kept, labels)
    return Embedded(
        kept.map(lambda part: part[:, :dim], dim, kept.dtype),
        kept.map(lambda part: part[:, dim:], channels, kept.dtype),
        labels,
    )


@torch.inference_mode()
def _pooled_channels(backbone: Backbone, dataset: ImageDataset, compute: Compute) -> int:
    return pool(backbone(example_input(dataset.preprocess).to(compute.device))[0]).shape[1]


@torch.inference_mode()
def score_dataset(
    scorer: Scorer, dataset: ImageDataset, compute: Compute, description: str
) -> tuple[Scored, Int[Tensor, " n"]]:
    """Scores and probabilities of every image through the path that serves, on the CPU, and one label of each."""
    parts = []
    for batch in track_images(dataset, compute, description):
        scored = scorer(batch.images.to(compute.device))
        parts.append(Scored({name: values.cpu() for name, values in scored.scores.items()}, scored.probabilities.cpu()))
    scores = {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores}
    return Scored(scores, torch.cat([part.probabilities for part in parts])), dataset.first_labels()
