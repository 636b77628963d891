"""From a fitted model to what its bundle stores, and back.

:func:`store` and :func:`restore` go through the parts of a model; a part that it may lack has its two functions side by
side.  docs/bundle-format.md says what is stored where.

Each module comes from the tensors in the files and is compared with the manifest, so nothing is allocated for a size
that the manifest only claims.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from psc_core.bundle import SCHEMA, Bundle, Manifest, MapSection, ReviewedSection
from psc_core.checks import REVIEWED, TEXTURE, Checks
from psc_core.conformal import check_rates
from psc_core.density import Density, restore_density
from psc_core.errors import BundleError, NetworkError, PSCError, of_this_machine, shorten
from psc_core.fitted import restore as restore_fitted
from psc_core.learnt import AddedClass, Kind, Reviewed
from psc_core.maps import MAX_POSITIONS, POSITION_DENSITIES, Grid, LayerMap
from psc_core.network.cut import Backbone, onnx_backbone, rebuild_backbone
from psc_core.network.export import export_here
from psc_core.network.load import need_no_folder
from psc_core.network.onnx import restore_body
from psc_core.pipeline import Pipeline, Scorer, check_agreement, smooth_noise
from psc_core.projection import Projection
from psc_core.stored_images import StoredImages
from psc_core.tasks.base import BaseCalibration

if TYPE_CHECKING:
    from psc_core.model import FittedModel

logger = logging.getLogger("psc.model")

COMPARED: Final = 4  # number of calibration images by which a rebuilt network is compared with the fitted one


def store(model: FittedModel, *, graph: bool) -> tuple[dict[str, Any], dict[str, Mapping[str, Tensor]], bytes | None]:
    """Return what the bundle of a model holds: the fields of its manifest, and its tensors by part and name.

    The network is an ONNX graph, the last, in place of its tensors if that is asked for or necessary.
    """
    scorer, report = model.pipeline.scorer, model.report
    backbone = storable_backbone(model, graph=graph)
    fields = {
        "schema_version": SCHEMA,
        "name": model.name,
        **model.task.manifest_fields(),
        "classes": model.classes,
        "preprocess": model.preprocess.to_json(),
        "precision": scorer.precision,
        "predictions": model.predictions,
        "layers": model.layers,
        "policy": model.policy.model_dump(),
        "backbone": backbone.spec(),
        "projection": scorer.projection.config(),
        "density": _reading(scorer.density.config(), scorer.density_layers),
        "head": _reading(scorer.head.config(), scorer.head_layers),
        "calibration": {"images": len(model.calibration)},
        "collapse": report.get("collapse"),
        "metrics": report.get("metrics", {}),
        "provenance": report.get("provenance", {}),
    }
    tensors: dict[str, Mapping[str, Tensor]] = {
        "projection": scorer.projection.state_dict(),
        "density": scorer.density.state_dict(),
        "head": scorer.head.state_dict(),
        "calibration": model.calibration.tensors(),
    }
    if backbone.onnx is None:
        tensors["backbone"] = backbone.state_dict()
    if scorer.added:
        fields["added_classes"] = [each._asdict() for each in scorer.added]
    if model.pipeline.checks is not None:
        fields["checks"], tensors["checks"] = _store_checks(model.pipeline.checks, scorer)
    if (layer_map := model.pipeline.map) is not None:
        fields["map"], tensors["map"] = layer_map.config(), layer_map.density.state_dict()
    if (images := model.pipeline.stored_images) is not None:
        fields["stored_images"], tensors["stored_images"] = images.sizes, images.tensors()
    return fields, tensors, backbone.onnx


def _reading(config: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
    return {**config, "layers": list(layers)} if layers else dict(config)


def restore(
    bundle: Bundle, allow_factories: Collection[str], device: torch.device
) -> tuple[Pipeline, Backbone, BaseCalibration]:
    """Build the pipeline of a bundle and, as they were fitted, its backbone and its calibration, on the device."""
    need_no_folder()
    manifest, tensors = bundle.manifest, bundle.parts
    try:
        projection = Projection.restore(manifest.projection.model_dump(), tensors["projection"])
        density = restore_density(manifest.density.model_dump(exclude={"layers"}), tensors["density"])
        dim = len(projection.z_mean)
        if density.reads == "z" and len(density.mean) != dim:
            raise BundleError(f"expected density.sizes.dim to be {dim}, got {len(density.mean)}; fit the bundle again")
        if density.reads == "z" and manifest.density.layers:
            raise BundleError(f"expected no density.layers for {density.kind}, which reads z; fit the bundle again")
        heads = {**manifest.task.heads, **manifest.task.output_heads}
        head = restore_fitted(heads, manifest.head.model_dump(exclude={"layers"}), tensors["head"])
        calibration = _restore_calibration(manifest, tensors["calibration"])
        check_rates(len(calibration), alpha=manifest.policy.alpha, coverage=manifest.policy.coverage)
        texture, reviewed, checks = _restore_checks(manifest, tensors)
        layer_map = _restore_map(manifest.map, tensors["map"]) if manifest.map else None
        stored_images = None
        if manifest.stored_images:
            stored_images = StoredImages.restore(
                manifest.stored_images.model_dump(),
                tensors["stored_images"],
                components=density.basis.shape[1],
                channels=manifest.preprocess.channels,
                classes=len(manifest.classes),
                has_values=manifest.task.has_numbers,
            )
        if reviewed is not None and len(reviewed.directions) != density.basis.shape[1]:
            raise BundleError(
                f"expected checks.reviewed of {density.basis.shape[1]} components, got {len(reviewed.directions)}; "
                "learn it again"
            )
        backbone = _restore_backbone(bundle, allow_factories)
    except PSCError as error:
        raise BundleError(f"{bundle.path}: {error}") from error
    except (OSError, ImportError) as error:
        logger.warning("%s: %s", bundle.path, shorten(repr(error)))
        raise BundleError(f"{bundle.path} is intact, but cannot be loaded here: {of_this_machine(error)}") from error
    except Exception as error:  # a hostile file can make a constructor fail in any way
        logger.warning("%s: %s", bundle.path, shorten(repr(error)))  # clients see only the error below
        raise BundleError(
            f"{bundle.path}: the manifest and the tensors do not fit together: {type(error).__name__}, see the log; "
            "fit the bundle again"
        ) from error
    running = backbone.to(device).fused(manifest.precision)
    layers = tuple(manifest.head.layers), tuple(manifest.density.layers)
    added = tuple(AddedClass(**each.model_dump()) for each in manifest.added_classes)
    scorer = Scorer(manifest.preprocess, running, projection, density, head, texture, reviewed, *layers, added)
    scorer = scorer.to(device)
    return Pipeline(scorer, calibration.ood_scores, checks, layer_map, stored_images), backbone, calibration


def storable_backbone(model: FittedModel, *, graph: bool) -> Backbone:
    """Return the network as a bundle stores it: an ONNX graph if that is asked for or no name builds it."""
    if model.backbone.onnx is not None or (not graph and _is_built_by_name(model)):
        return model.backbone
    scorer, kept = model.pipeline.scorer, model.backbone
    if scorer.precision != "fp32":
        raise NetworkError("a network is stored as an ONNX graph in float32 only; fit with precision fp32")
    outputs = len(kept.layers) + kept.keep_output
    body = restore_body(export_here(kept, model.preprocess.shape), model.preprocess.shape, outputs=outputs)
    stored = onnx_backbone(body, kept.layers, keep_output=kept.keep_output)
    images = smooth_noise(model.preprocess) if model.trial is None else model.trial
    with torch.inference_mode():
        calibrated = model.pipeline(images.to(model.device)).cpu()
        other = copy.deepcopy(model.pipeline).cpu().with_backbone(stored)(images)
    check_agreement(model, model.outputs(calibrated), model.outputs(other))
    return stored


@torch.inference_mode()
def _is_built_by_name(model: FittedModel) -> bool:
    """Return whether the network's spec still builds it; it does not if somebody has changed a module."""
    network = model.backbone.cut.network
    if network is None or network.num_classes != model.task.network_outputs(model.network_classes):
        return False
    if model.trial is None:  # loaded from a bundle, by its spec
        return True
    try:
        built = rebuild_backbone(model.backbone.spec(), model.backbone.state_dict(), [network.spec]).to(model.device)
    except PSCError:
        return False
    inputs = model.preprocess.standardise(model.trial[:COMPARED].to(model.device))
    pairs = zip(model.backbone.body(inputs), built.body(inputs), strict=True)  # of all layers, and the logits if kept
    return all(torch.allclose(got, other, rtol=0, atol=1e-3 * float(got.abs().max())) for got, other in pairs)


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


def _store_checks(checks: Checks, scorer: Scorer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, texture, below = checks.state_dict(), None, checks.counts_below
    if scorer.texture is not None:
        tensors |= _under(TEXTURE, scorer.texture.state_dict())
        layer, config = scorer.backbone.layers[-1], scorer.texture.config()
        texture = {"layer": layer, "density": config, "counts_below": below.get(TEXTURE, 1.0)}
    section = {"names": checks.names, "images": checks.ascending.shape[1], "texture": texture}
    if (reviewed := scorer.reviewed) is not None:
        section[REVIEWED], of_reviewed = _store_reviewed(reviewed, below[REVIEWED])
        tensors |= _under(REVIEWED, of_reviewed)
    return section, tensors


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _restore_checks(
    manifest: Manifest, files: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Density | None, Reviewed | None, Checks | None]:
    if manifest.checks is None:
        return None, None, None
    section, tensors = manifest.checks, files["checks"]
    parts: dict[str, dict[str, Tensor]] = {"": {}, TEXTURE: {}, REVIEWED: {}}
    for name, tensor in tensors.items():
        part, _, rest = name.rpartition(".")
        parts.setdefault(part, {})[rest] = tensor
    of_checks, wanted = parts.pop(""), {"ascending", "scales", "calibration"}
    named = {name for name, part in ((TEXTURE, section.texture), (REVIEWED, section.reviewed)) if part is not None}
    if set(of_checks) != wanted or {name for name, part in parts.items() if part} != named:
        raise BundleError(
            f"expected checks tensors {sorted(wanted)}, got {shorten(repr(sorted(tensors)))}; fit it again"
        )
    texture, reviewed, below = None, None, {}
    if section.texture is not None:
        texture = restore_density(section.texture.density.model_dump(), parts[TEXTURE])
        below[TEXTURE] = section.texture.counts_below
    if section.reviewed is not None:
        reviewed = _restore_reviewed(section.reviewed, parts[REVIEWED], manifest.preprocess.channels)
        below[REVIEWED] = section.reviewed.counts_below
    checks = Checks(section.names, **of_checks, counts_below=below)
    expected = section.images, manifest.calibration.images
    got = checks.ascending.shape[1], checks.calibration.shape[1]
    if expected != got:
        raise BundleError(f"expected {expected} values of the checks, got {got}; fit the bundle again")
    return texture, reviewed, checks


def _store_reviewed(reviewed: Reviewed, counts_below: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {name: reviewed.get_buffer(name) for name in reviewed.layout}
    section: dict[str, Any] = {"kinds": [kind._asdict() for kind in reviewed.kinds], "counts_below": counts_below}
    if (images := reviewed.stored_images) is not None:
        tensors |= images.tensors()
        section["stored_images"] = images.sizes
    return section, tensors


def _restore_reviewed(section: ReviewedSection, tensors: Mapping[str, Tensor], channels: int) -> Reviewed:
    own = {name: tensors[name] for name in Reviewed.layout if name in tensors}
    kinds = [Kind(**kind.model_dump()) for kind in section.kinds]
    shapes = {name: (tensor.dtype, tensor.shape[-1:]) for name, tensor in own.items()}
    if shapes != dict.fromkeys(Reviewed.layout, (torch.float64, (len(kinds),))):
        raise BundleError(f"expected float64 checks.reviewed tensors of {len(kinds)} kinds, got others; learn it again")
    images = None
    if section.stored_images is not None:
        images = StoredImages.restore(
            section.stored_images.model_dump(),
            {name: tensor for name, tensor in tensors.items() if name not in own},
            components=len(own["directions"]),
            channels=channels,
            classes=len(kinds),
            has_values=False,
        )
    elif len(own) != len(tensors):
        raise BundleError(f"expected checks.reviewed tensors {sorted(own)}, got others too; learn it again")
    return Reviewed(own["directions"], own["offsets"], kinds, images)


def _restore_map(section: MapSection, tensors: Mapping[str, Tensor]) -> LayerMap:
    density = restore_fitted(POSITION_DENSITIES, section.density.model_dump(), tensors)
    grid = Grid(**section.grid.model_dump())
    if grid.rows * grid.columns > MAX_POSITIONS:
        raise BundleError(f"expected a map of at most {MAX_POSITIONS} positions, got {grid}; fit the bundle again")
    return LayerMap(section.layer, grid, density)
