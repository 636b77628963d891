"""PSC: a fitted probabilistic skip connection, ready to predict, save and load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from psc_core.bundle.io import Bundle, check_shapes, read_bundle, write_bundle
from psc_core.bundle.manifest import Manifest
from psc_core.calibration.conformal import Calibration
from psc_core.compute.device import resolve_device
from psc_core.density import Density, restore_density
from psc_core.errors import BundleError, NetworkError, UsageError
from psc_core.heads import restore_head
from psc_core.images.decode import to_grey_or_rgb
from psc_core.images.preprocess import Preprocess
from psc_core.model.decision import Decisions, decide
from psc_core.model.outputs import FloatArray, Outputs
from psc_core.model.pipeline import Pipeline
from psc_core.model.prediction import Prediction
from psc_core.network.backbone import rebuild_backbone
from psc_core.policy import Policy
from psc_core.prediction import SCORES
from psc_core.projection.module import Projection

FUSION_TOLERANCE = {"fp32": 0.01, "bf16": 0.5}
"""How far served features may be from the network's own, relative to the largest; rounding is far below."""

MAX_BATCH = 64
"""Images that :meth:`PSC.predict` sends through the pipeline at once."""


ImageLike = str | Path | bytes | Image.Image | npt.NDArray[Any]
"""One image: a path, an encoded file, a Pillow image, or ``uint8`` pixels (height, width) or (height, width, 3)."""


@dataclass(frozen=True)
class PSC:
    """A classifier with honest uncertainty in one forward pass.

    Attributes:
        pipeline: Pixels to packed outputs, on its device.
        preprocess: Host and device preprocessing.
        classes: Class names; a class index is a position in it.
        calibration: Calibration scores, thresholds and prediction sets.
        policy: Default thresholds.
        layers: Names of the candidate layer(s).
        name: Model name.
        report: What fitting measured: ``collapse``, ``metrics`` and ``provenance``, JSON types.
        version: Digest of the bundle, empty before it is saved.
    """

    pipeline: Pipeline = field(repr=False)
    preprocess: Preprocess
    classes: tuple[str, ...]
    calibration: Calibration = field(repr=False)
    policy: Policy
    layers: tuple[str, ...]
    name: str
    report: Mapping[str, Any] = field(default_factory=dict, repr=False)
    version: str = ""

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes."""
        return self.pipeline.scale.device

    @property
    def layer(self) -> str:
        """Candidate layer names as one string."""
        return "+".join(self.layers)

    @property
    def alpha(self) -> float:
        """Default false-alarm rate."""
        return self.policy.alpha

    @property
    def predictions(self) -> str:
        """``"psc"`` (the head on z) or ``"base"`` (the network's own output)."""
        return "base" if self.pipeline.head is None else "psc"

    @property
    def epistemic_unit(self) -> str:
        """Unit of the head's epistemic uncertainty; empty for base predictions, which have none."""
        return "" if self.pipeline.head is None else self.pipeline.head.epistemic_unit

    def predict(self, images: Sequence[ImageLike] | Tensor) -> Prediction:
        """Classify images with uncertainty.

        Args:
            images: A list of paths, encoded files (bytes), Pillow images or ``uint8`` arrays (height, width) or
                (height, width, 3), of any size; or a tensor ``uint8 (n, channels, height, width)`` already of the
                network's input size.

        Raises:
            ImageError: An image cannot be decoded.
            UsageError: Something else than these, a file that cannot be read, a tensor of another shape or type.
        """
        batch = images if isinstance(images, Tensor) else self._read(images)
        expected = (self.preprocess.channels, self.preprocess.height, self.preprocess.width)
        if batch.dtype != torch.uint8 or tuple(batch.shape[1:]) != expected:
            raise UsageError(
                f"expected uint8 images of shape (n, {', '.join(map(str, expected))}), got "
                f"{batch.dtype} {tuple(batch.shape)}"
            )
        with torch.inference_mode():
            packed = [self.pipeline(part.to(self.device)).cpu() for part in torch.split(batch, MAX_BATCH)]
        outputs = Outputs(torch.cat(packed) if len(batch) else torch.empty(0, len(SCORES) + len(self.classes)))
        return Prediction(outputs, self.decide(Outputs(outputs.packed.numpy())), self.classes)

    def decide(self, outputs: Outputs[FloatArray]) -> Decisions:
        """Decisions under the bundle's policy."""
        return decide(outputs, self.calibration.set_thresholds(self.policy.coverage).numpy(), self.policy)

    def _read(self, images: Sequence[ImageLike]) -> Tensor:
        if isinstance(images, (str, bytes, Path, Image.Image, np.ndarray)):
            raise UsageError(f"expected a list of images or a tensor, got {_described(images)}; put it into a list")
        arrays = [self._read_one(image) for image in images]
        shape = (0, self.preprocess.channels, self.preprocess.height, self.preprocess.width)
        return torch.from_numpy(np.stack(arrays)) if arrays else torch.empty(shape, dtype=torch.uint8)

    def _read_one(self, image: ImageLike) -> npt.NDArray[np.uint8]:
        if isinstance(image, str | Path):
            try:
                image = Path(image).read_bytes()
            except (OSError, ValueError) as error:
                raise UsageError(f"expected an image file, {error}; correct the path") from error
        if isinstance(image, bytes):
            return self.preprocess.from_bytes(image)
        if isinstance(image, np.ndarray) and _is_picture(image):
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            return self.preprocess.from_image(to_grey_or_rgb(image))
        raise UsageError(
            "expected paths, encoded images (bytes), Pillow images, or uint8 arrays (height, width) or "
            f"(height, width, 3), got {_described(image)}"
        )

    def save(self, path: str | Path) -> Manifest:
        """Write the bundle directory ``path``; equal models give equal bytes."""
        p = self.pipeline
        parts = {
            "backbone": p.backbone.state_dict(),
            "projection": p.projection.state_dict(),
            "density": p.density.state_dict(),
            "calibration": self.calibration.tensors(),
        }
        if p.head is not None:
            parts["head"] = p.head.state_dict()
        fields = {
            "name": self.name,
            "classes": self.classes,
            "preprocess": self.preprocess.to_json(),
            "precision": p.precision,
            "predictions": self.predictions,
            "layers": self.layers,
            "policy": self.policy.model_dump(),
            "backbone": p.backbone.spec(),
            "projection": p.projection.config(),
            "density": p.density.config(),
            "head": None if p.head is None else p.head.config(),
            "calibration": {
                "images": len(self.calibration),
                **({"entropy_weight": p.entropy_weight} if p.entropy_weight else {}),
            },
            "collapse": self.report.get("collapse"),
            "metrics": self.report.get("metrics", {}),
            "provenance": self.report.get("provenance", {}),
        }
        return write_bundle(Path(path), fields, parts)

    @classmethod
    def load(
        cls, path: str | Path, *, device: str | torch.device = "auto", allow_factories: Collection[str] = ()
    ) -> PSC:
        """Read, verify and build a bundle.

        Args:
            path: Bundle directory.
            device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
            allow_factories: Network factories (``package.module:factory``) that may be imported.

        Raises:
            BundleError: The bundle is missing, altered, damaged or inconsistent.
        """
        target = resolve_device(device)
        bundle = read_bundle(Path(path))
        manifest, parts = bundle.manifest, bundle.parts
        try:
            _check_tensors(bundle)
            preprocess = Preprocess.from_json(manifest.preprocess)
            backbone = rebuild_backbone(manifest.backbone, parts["backbone"], allow_factories=allow_factories)
            projection = Projection.restore(manifest.projection, parts["projection"])
            density = restore_density(manifest.density, parts["density"])
            _check_density(density, projection)
            head = None if manifest.head is None else restore_head(manifest.head, parts["head"])
            calibration = Calibration.from_tensors(parts["calibration"])
            calibration.ood_score_threshold(manifest.policy.alpha)
            calibration.set_thresholds(manifest.policy.coverage)
            pipeline = Pipeline(
                preprocess,
                backbone,
                projection,
                density,
                head,
                calibration.scores,
                manifest.precision,
                manifest.calibration.get("entropy_weight", 0.0),
            )
        except BundleError:
            raise
        except NetworkError as error:
            raise BundleError(f"{path}: {error}") from error
        except Exception as error:  # a hostile file can make a network's constructor fail in any way
            raise BundleError(f"{path}: the manifest and the tensors do not fit together: {error}") from error
        psc = cls(
            pipeline=pipeline.to(target),
            preprocess=preprocess,
            classes=manifest.classes,
            calibration=calibration,
            policy=manifest.policy,
            layers=manifest.layers,
            name=manifest.name,
            report={"collapse": manifest.collapse, "metrics": manifest.metrics, "provenance": manifest.provenance},
            version=manifest.version,
        )
        psc.probe()
        return psc

    def probe(self) -> None:
        """Run a black, a white and a noise image through the pipeline.

        Raises:
            BundleError: The parts do not fit together, or give something not finite.
            torch.OutOfMemoryError, torch.AcceleratorError, MemoryError: The device has no room for it, or is broken.
        """
        shape = (1, self.preprocess.channels, self.preprocess.height, self.preprocess.width)
        noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        images = torch.cat([torch.zeros_like(noise), torch.full_like(noise, 255), noise]).to(self.device)
        try:
            with torch.inference_mode():
                packed = self.pipeline(images)
                # by itself, too: a ReLU that a convolution takes along makes zeros of what is not a number
                inputs = images.float() * self.pipeline.scale + self.pipeline.shift
                features, _ = self.pipeline.backbone(inputs)
                fused = self.pipeline.features(inputs)[0]
        except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
            raise  # not the bundle's fault
        except Exception as error:  # as in load
            raise BundleError(f"the parts of {self.name!r} do not fit together: {error}") from error
        finite = all(bool(part.isfinite().all()) for part in (packed, *features))
        if packed.shape[1] != len(SCORES) + len(self.classes) or not finite:
            raise BundleError(
                f"expected {len(self.classes)} finite probabilities from {self.name!r}, got "
                f"{packed.shape[1] - len(SCORES)} columns or values that are not finite; fit the bundle again"
            )
        for ours, served in zip(features, fused, strict=True):
            if (ours - served.float()).abs().max() > FUSION_TOLERANCE[self.pipeline.precision] * ours.abs().max():
                raise BundleError(
                    f"expected the network of {self.name!r} to give the same features in fewer operations, it does "
                    "not: one of its modules does more than its type says; please report it"
                )


def _is_picture(array: npt.NDArray[Any]) -> bool:
    return array.dtype == np.uint8 and array.size > 0 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3))


def _described(image: Any) -> str:
    if isinstance(image, np.ndarray):
        return f"an array of {image.dtype} {image.shape}"
    return f"a {type(image).__name__}"


def _check_density(density: Density, projection: Projection) -> None:
    """Whether the density is of z; one that reads pooled features is checked by :meth:`PSC.probe`.

    Raises:
        BundleError: It has another dimension.
    """
    dim = projection.c_proj * projection.d_proj
    if density.reads == "z" and len(density.mean) != dim:
        raise BundleError(f"expected density.sizes.dim to be {dim}, got {len(density.mean)}; fit the bundle again")


def _check_tensors(bundle: Bundle) -> None:
    """Shapes that the manifest promises for the projection and the calibration, before they are allocated.

    Raises:
        BundleError: The tensors are not as promised.
    """
    sizes, images = bundle.manifest.projection, bundle.manifest.calibration["images"]
    channels, positions = sizes["channels"], sum(sizes["positions"])
    c_proj, d_proj = sizes["c_proj"], sizes["d_proj"]
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
