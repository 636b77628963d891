"""Turn a verified bundle into the modules of a model, on the CPU.

Each module is made from the tensors in the files and then compared with the manifest, so nothing is allocated for a
size that the manifest only claims.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from psc_core.bundle.io import Bundle
from psc_core.bundle.manifest import Manifest, MapSection, ThumbnailsSection
from psc_core.calibration.conformal import check_rates
from psc_core.density.base import Density, restore_density
from psc_core.errors import BundleError, PSCError, of_this_machine, shortened
from psc_core.fitted import restore
from psc_core.gates.combined import Gates
from psc_core.maps.grid import MAX_POSITIONS, Grid
from psc_core.maps.layer_map import LayerMap, PositionDensity
from psc_core.network.backbone import Backbone, onnx_backbone, rebuild_backbone
from psc_core.network.cache import need_no_folder
from psc_core.network.onnx.restore import restore_body
from psc_core.projection.module import Projection
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.head import Head
from psc_core.thumbnails.thumbnails import Thumbnails

logger = logging.getLogger("psc.model")


class Modules(NamedTuple):
    backbone: Backbone
    projection: Projection
    density: Density
    head: Head
    calibration: BaseCalibration
    texture: Density | None  # for the gate "texture"
    gates: Gates | None
    map: LayerMap | None
    thumbnails: Thumbnails | None


def restore_modules(bundle: Bundle, allow_factories: Collection[str]) -> Modules:
    """Build the modules of a bundle.

    Raises:
        BundleError: If tensors do not match the manifest or each other.
    """
    need_no_folder()
    manifest, tensors = bundle.manifest, bundle.parts
    try:
        projection = Projection.restore(manifest.projection.model_dump(), tensors["projection"])
        density = restore_density(manifest.density.model_dump(), tensors["density"])
        dim = len(projection.z_mean)
        if density.reads == "z" and len(density.mean) != dim:
            raise BundleError(f"expected density.sizes.dim to be {dim}, got {len(density.mean)}; fit the bundle again")
        head = manifest.task.restore_head(manifest.head.model_dump(exclude={"layers"}), tensors["head"])
        calibration = _restore_calibration(manifest, tensors["calibration"])
        check_rates(len(calibration), alpha=manifest.policy.alpha, coverage=manifest.policy.coverage)
        texture, gates = _restore_gates(manifest, tensors)
        layer_map = _restore_map(manifest.map, tensors["map"]) if manifest.map else None
        thumbnails = None
        if manifest.thumbnails:
            thumbnails = _restore_thumbnails(manifest, manifest.thumbnails, tensors["thumbnails"], density)
        backbone = _restore_backbone(bundle, allow_factories)
    except PSCError as error:
        raise BundleError(f"{bundle.path}: {error}") from error
    except (OSError, ImportError) as error:
        logger.warning("%s: %s", bundle.path, shortened(repr(error)))
        raise BundleError(f"{bundle.path} is intact, but cannot be loaded here: {of_this_machine(error)}") from error
    except Exception as error:  # a hostile file can make a constructor fail in any way
        logger.warning("%s: %s", bundle.path, shortened(repr(error)))  # clients see only the error below
        raise BundleError(
            f"{bundle.path}: the manifest and the tensors do not fit together: {type(error).__name__}, see the log; "
            "fit the bundle again"
        ) from error
    return Modules(backbone, projection, density, head, calibration, texture, gates, layer_map, thumbnails)


def _restore_backbone(bundle: Bundle, allow_factories: Collection[str]) -> Backbone:
    spec = bundle.manifest.backbone
    if bundle.graph is None:
        return rebuild_backbone(spec.model_dump(), bundle.parts["backbone"], allow_factories)
    size = bundle.manifest.preprocess.shape
    body = restore_body(bundle.graph, size, outputs=len(spec.layers) + spec.keep_output)
    return onnx_backbone(body, spec.layers, keep_output=spec.keep_output)


def _restore_calibration(manifest: Manifest, tensors: Mapping[str, Tensor]) -> BaseCalibration:
    restored, images = manifest.task.calibration_type.from_tensors(tensors), manifest.calibration.images
    if len(restored) != images:
        raise BundleError(
            f"expected a calibration of {images} images, got one of {len(restored)}; fit the bundle again"
        )
    restored.check_classes(len(manifest.classes))
    return restored


def _restore_gates(
    manifest: Manifest, files: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Density | None, Gates | None]:
    if manifest.gates is None:
        return None, None
    tensors = files["gates"]
    texture, of_gates = None, {name: tensor for name, tensor in tensors.items() if "." not in name}
    if manifest.gates.texture is not None:
        texture_tensors = {name.removeprefix("texture."): tensor for name, tensor in tensors.items() if "." in name}
        texture = restore_density(manifest.gates.texture.density.model_dump(), texture_tensors)
    wanted = {"ascending", "scales", "calibration"}
    if set(of_gates) != wanted or (texture is None and len(of_gates) != len(tensors)):
        raise BundleError(
            f"expected gates tensors {sorted(wanted)}, got {shortened(repr(sorted(tensors)))}; fit it again"
        )
    below = 1.0 if manifest.gates.texture is None else manifest.gates.texture.counts_below
    gates = Gates.of(manifest.gates.names, **of_gates, texture_counts_below=below)
    expected = manifest.gates.images, manifest.calibration.images
    got = gates.ascending.shape[1], gates.calibration.shape[1]
    if expected != got:
        raise BundleError(f"expected {expected} readings of the gates, got {got}; fit the bundle again")
    return texture, gates


def _restore_map(section: MapSection, tensors: Mapping[str, Tensor]) -> LayerMap:
    density = restore({PositionDensity.kind: PositionDensity}, section.density.model_dump(), tensors)
    grid = Grid(**section.grid.model_dump())
    if grid.rows * grid.columns > MAX_POSITIONS:
        raise BundleError(f"expected a map of at most {MAX_POSITIONS} positions, got {grid}; fit the bundle again")
    return LayerMap(section.layer, grid, density)


def _restore_thumbnails(
    manifest: Manifest, section: ThumbnailsSection, tensors: Mapping[str, Tensor], density: Density
) -> Thumbnails:
    return Thumbnails.restore(
        section.model_dump(),
        tensors,
        components=density.basis.shape[1],
        channels=manifest.preprocess.channels,
        classes=len(manifest.classes),
        has_values=manifest.task.has_numbers,
    )
