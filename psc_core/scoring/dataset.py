"""Run a fitted model over a data set, through the path that a service uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.compute import BATCH_IMAGES
from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import Batch, ImageDataset
from psc_core.errors import UsageError
from psc_core.images.preprocess import Images
from psc_core.model.base import FittedModel
from psc_core.tasks.outputs import Outputs


def scored_batches(
    model: FittedModel, data: ImageDataset, batch_images: int = BATCH_IMAGES, *, description: str = ""
) -> Iterator[tuple[Batch, Images, Float[Tensor, "batch columns"]]]:
    """Yield each batch of ``data``, its images on the model's device, and the pipeline's packed outputs on the CPU.

    Raises:
        UsageError: If :func:`check_read_by` raises it.
    """
    check_read_by(model, data)
    compute = Compute(model.device, batch_images=batch_images)
    for batch in track_images(data, compute, description or f"evaluating {data.name}"):
        images = batch.images.to(model.device)
        yield batch, images, model.pipeline(images).cpu()


def check_read_by(model: FittedModel, data: ImageDataset) -> None:
    """Check that ``data`` is read through the model's preprocessing.

    Raises:
        UsageError: If it is read through another one.
    """
    if different := model.preprocess.differences(data.preprocess):
        raise UsageError(
            f"expected {data.name} to be read through the model's preprocessing {model.preprocess}, got "
            f"{data.preprocess}, with another {', '.join(different)}; open it with preprocess=model.preprocess"
        )


@torch.inference_mode()
def dataset_outputs(model: FittedModel, data: ImageDataset, description: str) -> Outputs[Tensor]:
    """Return the outputs for every image, on the CPU; raises the errors of :func:`scored_batches`."""
    return model.outputs(torch.cat([packed for _, _, packed in scored_batches(model, data, description=description)]))
