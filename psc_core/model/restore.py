"""From a verified bundle to the modules of a model, on the CPU.

The shapes that the manifest promises are checked before anything of that size is allocated.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from psc_core.bundle.io import Bundle, check_shapes
from psc_core.calibration.conformal import Calibration, check_rates
from psc_core.density import Density, restore_density
from psc_core.errors import BundleError, PSCError
from psc_core.heads import Head, restore_head
from psc_core.network.backbone import Backbone, rebuild_backbone
from psc_core.projection.module import Projection


def restore_parts(
    bundle: Bundle, allow_factories: Collection[str]
) -> tuple[Backbone, Projection, Density, Head | None, Calibration]:
    """Build the modules of a bundle; there is no head for base predictions.

    Raises:
        BundleError: Parts that do not fit the manifest or each other.
    """
    manifest, tensors = bundle.manifest, bundle.parts
    try:
        check_tensors(bundle)
        backbone = rebuild_backbone(
            manifest.backbone.model_dump(), tensors["backbone"], allow_factories=allow_factories
        )
        projection = Projection.restore(manifest.projection.model_dump(), tensors["projection"])
        density = restore_density(manifest.density.model_dump(), tensors["density"], schema=manifest.schema_version)
        dim = len(projection.z_mean)
        if density.reads == "z" and len(density.mean) != dim:
            raise BundleError(f"expected density.sizes.dim to be {dim}, got {len(density.mean)}; fit the bundle again")
        head = None if manifest.head is None else restore_head(manifest.head.model_dump(), tensors["head"])
        calibration = Calibration.from_tensors(tensors["calibration"])
        check_rates(len(calibration), alpha=manifest.policy.alpha, coverage=manifest.policy.coverage)
    except PSCError as error:
        raise BundleError(f"{bundle.path}: {error}") from error
    except Exception as error:  # A hostile file can make a network's constructor fail in any way.
        raise BundleError(f"{bundle.path}: the manifest and the tensors do not fit together: {error}") from error
    return backbone, projection, density, head, calibration


def check_tensors(bundle: Bundle) -> None:
    """Raise :class:`BundleError` unless projection and calibration are as the manifest promises."""
    sizes, images = bundle.manifest.projection, bundle.manifest.calibration.images
    channels, positions = sizes.channels, sum(sizes.positions)
    c_proj, d_proj = sizes.c_proj, sizes.d_proj
    projection, calibration = bundle.parts["projection"], bundle.parts["calibration"]
    check_shapes("projection", projection, {
        "mean": (channels, positions), "inverse_std": (channels, positions), "channel_factor": (channels, c_proj),
        "spatial_factor": (positions, d_proj), "z_mean": (c_proj * d_proj,), "z_inverse_std": (c_proj * d_proj,),
    })  # fmt: skip
    check_shapes("calibration", calibration, {
        "scores": (images,), "entropies": (images,), "label_probabilities": (images,), "labels": (images,),
        "num_classes": (),
    })  # fmt: skip
    if any(tensor.dtype != torch.float32 for tensor in projection.values()):
        raise BundleError("expected float32 tensors of the projection; fit the bundle again")
    if calibration["num_classes"].item() != len(bundle.manifest.classes):
        raise BundleError(
            f"expected calibration for {len(bundle.manifest.classes)} classes, got "
            f"{calibration['num_classes'].item()}; fit the bundle again"
        )
