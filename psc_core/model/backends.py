"""Run the truncated network of a fitted model in other ways, with the same outputs up to rounding.

``folded`` is the network that fitting and calibration run; ``plain`` is the network as it was trained; ``onnx`` runs in
ONNX Runtime.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from psc_core.errors import NetworkError, PSCError
from psc_core.images.preprocess import Preprocess
from psc_core.model import BACKENDS, Backend
from psc_core.model.pipeline import Pipeline
from psc_core.network.backbone import Backbone, onnx_backbone, rebuild_backbone
from psc_core.network.onnx import INSTALLED
from psc_core.network.onnx.export import export_here, to_onnx
from psc_core.network.onnx.restore import restore_body
from psc_core.tasks.outputs import Outputs

if TYPE_CHECKING:
    from psc_core.model.base import FittedModel

OUTPUT_TOLERANCE = 1e-4
"""Maximum difference between two backends: of probabilities, of means in standard deviations, and of log densities
relative to their magnitude."""

_CHECKED_IMAGES = 32
_FEW = 4


def available_backends(model: FittedModel) -> tuple[Backend, ...]:
    """Return the backends on which a model can run, ``folded`` first.

    Only a traced float32 network on a CPU has a choice, and a network stored as an ONNX graph runs only in ONNX
    Runtime.
    """
    if model.backbone.onnx is not None:
        return ("onnx",)
    if model.device.type != "cpu" or not model.pipeline.is_traced or model.pipeline.scorer.precision != "fp32":
        return BACKENDS[:1]
    return BACKENDS if INSTALLED else BACKENDS[:2]


def pipeline_on(model: FittedModel, backend: Backend) -> Pipeline:
    """Return the pipeline of a model on one of its :func:`available_backends`.

    Raises:
        NetworkError: If the backend is not installed, the network cannot be exported, or its outputs differ from the
            calibrated ones.
    """
    if backend == "folded" or model.backbone.onnx is not None:
        return model.pipeline
    if backend == "plain":
        return model.pipeline.with_backbone(model.backbone)
    if not INSTALLED:
        raise NetworkError("the backend onnx needs ONNX Runtime; pip install 'psc[onnx]'")
    pipeline = model.pipeline.with_backbone(to_onnx(model.backbone, model.preprocess.shape))
    images = _smooth_noise(model.preprocess)
    with torch.inference_mode():
        check_agreement(model, model.outputs(model.pipeline(images)), model.outputs(pipeline(images)))
    return pipeline


def storable_backbone(model: FittedModel, *, graph: bool) -> Backbone:
    """Return the network as a bundle stores it: an ONNX graph if ``graph`` is set or no name builds it, else unchanged.

    Raises:
        NetworkError: If it cannot be exported, or the graph gives other outputs.
    """
    if model.backbone.onnx is not None or (not graph and _is_built_by_name(model)):
        return model.backbone
    scorer, kept = model.pipeline.scorer, model.backbone
    if scorer.precision != "fp32":
        raise NetworkError("a network is stored as an ONNX graph in float32 only; fit with precision fp32")
    outputs = len(kept.layers) + kept.keep_output
    body = restore_body(export_here(kept, model.preprocess.shape), model.preprocess.shape, outputs=outputs)
    stored = onnx_backbone(body, kept.layers, keep_output=kept.keep_output)
    images = _smooth_noise(model.preprocess) if model.trial is None else model.trial
    with torch.inference_mode():
        calibrated = model.pipeline(images.to(model.device)).cpu()
        other = copy.deepcopy(model.pipeline).cpu().with_backbone(stored)(images)
    check_agreement(model, model.outputs(calibrated), model.outputs(other))
    return stored


@torch.inference_mode()
def _is_built_by_name(model: FittedModel) -> bool:
    """Return whether the network's recipe still builds it; it does not if somebody has replaced a module."""
    recipe = model.backbone.cut.recipe
    if recipe is None or recipe.num_classes != model.task.network_outputs(model.classes):
        return False
    if model.trial is None:  # loaded from a bundle, by its recipe
        return True
    try:
        built = rebuild_backbone(model.backbone.spec(), model.backbone.state_dict(), [recipe.spec]).to(model.device)
    except PSCError:
        return False
    inputs = model.preprocess.standardise(model.trial[:_FEW].to(model.device))
    pairs = zip(model.backbone(inputs)[0], built(inputs)[0], strict=True)
    return all(torch.allclose(got, other, rtol=0, atol=1e-3 * float(got.abs().max())) for got, other in pairs)


def check_agreement(model: FittedModel, calibrated: Outputs[Tensor], other: Outputs[Tensor]) -> None:
    """Compare the outputs of a model on two backends for the same images.

    A p-value may differ by one calibration image, because rounding may move a score past that image's.

    Raises:
        NetworkError: If they differ by more than rounding.
    """
    size = calibrated["log_density"].abs().clamp(min=1)
    predictions, apart = model.task.difference(calibrated, other)
    limits = {
        predictions: (apart, OUTPUT_TOLERANCE),
        "log densities": ((calibrated["log_density"] - other["log_density"]) / size, OUTPUT_TOLERANCE),
        "p-values": (calibrated["ood_p_value"] - other["ood_p_value"], 1.5 / (len(model.calibration) + 1)),
    }
    for name, (difference, limit) in limits.items():
        if not difference.abs().max() <= limit:
            raise NetworkError(
                f"the network gives other {name} on another backend, by up to {difference.abs().max():.3g}"
            )


def _smooth_noise(preprocess: Preprocess) -> Tensor:
    """Return ``uint8`` images of noise, from coarse to fine, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    images = []
    for index in range(_CHECKED_IMAGES):
        cells = 1 + index * (min(preprocess.height, preprocess.width) - 1) // (_CHECKED_IMAGES - 1)
        coarse = torch.randint(0, 256, (1, preprocess.channels, cells, cells), generator=generator).float()
        images.append(torch.nn.functional.interpolate(coarse, (preprocess.height, preprocess.width), mode="bilinear"))
    return torch.cat(images).round().to(torch.uint8)
