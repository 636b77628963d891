"""Fit what needs no calibration: density and head on the features of the training images."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import ImageDataset, stable_order
from psc_core.density import kind_of
from psc_core.density.fit.density import fit_density
from psc_core.fitting.options import FitOptions
from psc_core.heads import Head, ValueHead
from psc_core.heads.fit.head import fit_head
from psc_core.heads.fit.value import fit_value_head
from psc_core.model.pipeline import Scorer, average_positions, read_by_head
from psc_core.network.backbone import Backbone, example_input, feature_step, truncate
from psc_core.numerics.matrix import FeatureFile, FeatureMatrix, blocks
from psc_core.projection.module import Projection


def cut(net: nn.Module, layers: Sequence[str], data: ImageDataset, compute: Compute, *, keep_output: bool) -> Backbone:
    """``net`` cut behind some layers, on the device, checked on one input."""
    example = example_input(data.preprocess).to(compute.device)
    return truncate(net.to(compute.device), layers, keep_output=keep_output, example=example)


def fit_scorer(
    backbone: Backbone,
    projection: Projection,
    train: ImageDataset,
    selection: ImageDataset,
    *,
    density: str,
    pca: int | None,
    head: str | None,
    options: FitOptions,
) -> Scorer:
    """Density on ``train``; head on ``train``, what it chooses by validation on ``selection``.

    The head also reads the layers of ``backbone`` behind those of ``projection``.  ``pca`` is the dimension that the
    density works in, or None to choose it.  Without a ``head`` (base predictions of a classifier) the backbone keeps
    the network's output.

    Raises:
        UsageError: An unknown density or head.
        FitError: Features that cannot be fitted.
    """
    compute = options.compute()
    projection = projection.to(compute.device)
    classes = train.classes
    with tempfile.TemporaryDirectory(prefix="psc-fit-") as scratch:
        file, pooled = Path(scratch) / "train", kind_of(density).input_kind == "pooled"
        embedded = embed(backbone, projection, train, compute, file, options.reducer, pooled=pooled)
        fitted_density = fit_density(
            embedded.density_input,
            embedded.labels,
            num_classes=len(classes),
            kind=density,
            pca=pca,
            class_names=classes,
            images=embedded.images,
        ).to(compute.device)
        fitted_head: Head | ValueHead | None = None
        if head is not None:
            held_out = embed(backbone, projection, selection, compute, Path(scratch) / "val", options.reducer)
            if train.values is None or selection.values is None:
                fitted_head = fit_head(
                    embedded.z,
                    embedded.labels,
                    held_out.z[:],
                    held_out.labels,
                    num_classes=len(classes),
                    kind=head,
                    seed=options.seed,
                    device=compute.device,
                    class_names=classes,
                    images=embedded.images,
                ).to(compute.device)
            else:
                own = own_values(backbone, selection, compute) if backbone.keep_output else None
                fitted_head = fit_value_head(
                    embedded.head_input,
                    train.values[embedded.images],
                    held_out.head_input[:],
                    selection.values[held_out.images],
                    kind=head,
                    seed=options.seed,
                    device=compute.device,
                    val_mean=None if own is None else own[held_out.images],
                    widths=embedded.widths,
                    images=embedded.images,
                ).to(compute.device)
    fused = backbone.fused(compute.precision)
    head_layers = range(len(projection.positions), len(backbone.layers))
    parts = (projection, fitted_density, fitted_head, compute.precision)
    return Scorer(train.preprocess, fused, *parts, head_layers=head_layers)


def own_values(backbone: Backbone, data: ImageDataset, compute: Compute) -> Float[Tensor, " n"]:
    """What the network itself predicts for every image of a regression, on the CPU."""
    parts = []
    for (_, output), _ in passes(data, compute, f"the network on {data.name}", backbone):
        parts.append(output[:, 0].float().cpu())
    return torch.cat(parts)


class Embedded(NamedTuple):
    """The features of n labelled examples, ordered by class."""

    z: FeatureMatrix  # (n, D) projected features
    head_input: FeatureMatrix  # what the head reads: z, and behind it pooled features of layers behind the projection's
    density_input: FeatureMatrix  # what the density reads: z itself, or (n, C) pooled features
    labels: Int[Tensor, " n"]  # class indices, ascending
    images: Int[Tensor, " n"]  # which image of the data set each one shows
    widths: tuple[int, ...]  # columns of z, and of each other layer in head_input


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
    """Features of every labelled example, in the new ``file``, so that memory does not grow with the images.

    They are written class by class, because a density reads one class at a time; with ``pooled``, pooled features lie
    beside z for a density that reads them.
    """
    candidates = len(projection.positions)
    with torch.inference_mode():
        features = backbone(example_input(dataset.preprocess).to(compute.device))[0]
    widths = (projection.c_proj * projection.d_proj, *(layer.shape[1] for layer in features[candidates:]))
    channels = average_positions(features[:candidates]).shape[1] if pooled else 0
    features_of = feature_step(backbone, compute.precision)

    def read(images: Tensor) -> Tensor:
        features = features_of(images)
        candidate = features[:candidates]
        head_input = read_by_head(projection(candidate), features[candidates:])
        return torch.cat([head_input, *([average_positions(candidate)] if pooled else [])], dim=1)

    kept, labels, images = store_features(read, sum(widths) + channels, dataset, compute, file, reducer)

    def columns(first: int, count: int) -> FeatureMatrix:
        return kept.map(lambda part: part[:, first : first + count], count, kept.dtype)

    z = columns(0, widths[0])
    density_input = columns(sum(widths), channels) if pooled else z
    return Embedded(z, columns(0, sum(widths)), density_input, labels, images, widths)


def store_features(
    read: Callable[[Tensor], Tensor],
    width: int,
    dataset: ImageDataset,
    compute: Compute,
    file: Path,
    reducer: Reducer,
) -> tuple[FeatureFile, Int[Tensor, " n"], Int[Tensor, " n"]]:
    """``read(images)``, (B, ``width``), of every labelled example in the new ``file``, class by class.

    Returns:
        The features, their labels, and which image of the data set each one shows.
    """
    kept = FeatureFile(file, (dataset.examples, width))
    order = stable_order(dataset.labels)
    where = torch.empty_like(order)
    where[order] = torch.arange(len(where))
    if reducer.world > 1:
        where = where[reducer.shard_examples(dataset)]
    at = 0
    for features, batch in passes(reducer.shard(dataset), compute, "features", read):
        values = batch.per_example(features).cpu()
        kept.write(where[at : at + len(values)], values)
        at += len(values)
    if reducer.world > 1:
        for chunk, block in blocks(kept):
            kept.write(chunk, reducer.sum_(block))
    counts = dataset.labels.bincount(minlength=len(dataset.classes))
    images = torch.arange(len(dataset)).repeat_interleave(dataset.offsets.diff())[order]
    return kept, torch.arange(len(counts)).repeat_interleave(counts), images
