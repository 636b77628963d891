"""What fitted models have in common: their parts, saving, loading, and a trial before either."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from psc_core.bundle.io import Bundle, read_bundle, write_bundle
from psc_core.bundle.manifest import SCHEMA, Manifest
from psc_core.calibration.conformal import Calibration
from psc_core.calibration.intervals import ValueCalibration
from psc_core.compute.device import resolve_device
from psc_core.errors import BundleError, FitError
from psc_core.gates.gates import Gates
from psc_core.heads import Head
from psc_core.images.preprocess import Preprocess
from psc_core.model.inputs import ImageLike, as_batch
from psc_core.model.outputs import Matrix, Outputs
from psc_core.model.pipeline import Pipeline, Scorer
from psc_core.model.restore import restore_parts
from psc_core.network.backbone import Backbone
from psc_core.policy import Policy, ValuePolicy
from psc_core.target import Target

FUSION_TOLERANCE = {"fp32": 0.01, "bf16": 0.5}
"""Maximum difference between fused and stored features, relative to the largest; rounding is far below."""

MAX_BATCH = 64
"""Images that prediction sends through the pipeline at once."""


AnyModel = TypeVar("AnyModel", bound="FittedModel")


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """A network cut behind its candidate layer(s), with everything that was fitted to it.

    Subclasses have the ``calibration`` and the ``policy`` of their kind.
    """

    is_regression: ClassVar[bool] = False

    pipeline: Pipeline = field(repr=False)  # pixels to packed outputs, on its device
    backbone: Backbone = field(repr=False)  # as it was fitted, for the bundle; the pipeline runs a fused copy
    classes: tuple[str, ...]  # names; a class index is a position here
    calibration: Calibration | ValueCalibration = field(repr=False)
    policy: Policy | ValuePolicy  # default thresholds
    layers: tuple[str, ...]  # candidate layer(s)
    name: str
    report: Mapping[str, Any] = field(default_factory=dict, repr=False)  # collapse, metrics, provenance; JSON types
    version: str = ""  # digest of the bundle, empty before it is saved
    target: Target | None = None  # of a regression

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes."""
        return self.pipeline.scorer.scale.device

    @property
    def preprocess(self) -> Preprocess:
        """How images become inputs of the network."""
        return self.pipeline.scorer.preprocess

    @property
    def layer(self) -> str:
        """Candidate layer names as one string."""
        return "+".join(self.layers)

    @property
    def head_layers(self) -> tuple[str, ...]:
        """What the head tells apart: z, by the candidate layer(s), and the other layers that it reads."""
        return (self.layer, *(self.backbone.layers[position] for position in self.pipeline.scorer.head_layers))

    @property
    def predictions(self) -> str:
        """``"psc"`` (the head on z) or ``"base"`` (the network's own output)."""
        return "base" if self.backbone.keep_output else "psc"

    @property
    def epistemic_unit(self) -> str:
        """Unit of the head's epistemic uncertainty; empty for base predictions of a classifier, which have none."""
        head = self.pipeline.scorer.head
        if self.target is not None:
            return f"standard deviation, {self.target.unit}".removesuffix(", ")
        return head.epistemic_unit if isinstance(head, Head) else ""

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of the gates that make the OOD score; none for a model without."""
        return self.pipeline.gate_names

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores in its outputs."""
        return self.pipeline.scorer.score_names

    @property
    def num_probabilities(self) -> int:
        """Columns of class probabilities in its outputs: none of a regression."""
        return 0 if self.is_regression else len(self.classes)

    def outputs(self, packed: Matrix) -> Outputs[Matrix]:
        """Packed outputs of this model, read by name."""
        return Outputs(packed, self.gates, self.score_names)

    def compute(self, images: Sequence[ImageLike] | Tensor) -> Outputs[Tensor]:
        """Outputs for images in any form, on the CPU; see :meth:`psc_core.PSC.predict`."""
        batch = as_batch(images, self.preprocess)
        with torch.inference_mode():
            packed = [self.pipeline(part.to(self.device)).cpu() for part in torch.split(batch, MAX_BATCH)]
        columns = len(self.score_names) + self.num_probabilities + len(self.gates)
        return self.outputs(torch.cat(packed) if len(batch) else torch.empty(0, columns))

    def save(self, path: str | Path) -> Manifest:
        """Write the bundle directory ``path``; equal models give equal bytes.

        Raises:
            NetworkError: The network did not come from :func:`psc_core.load_network`.
            BundleError: ``path`` is no place for a bundle.
        """
        scorer, gates = self.pipeline.scorer, self.pipeline.gates
        parts = {
            "backbone": self.backbone.state_dict(),
            "projection": scorer.projection.state_dict(),
            "density": scorer.density.state_dict(),
            "calibration": self.calibration.tensors(),
        }
        if scorer.head is not None:
            parts["head"] = scorer.head.state_dict()
        if gates is not None:
            parts["gates"] = {**gates.state_dict(), **_prefixed("texture.", scorer.texture)}
        fields = {
            "schema_version": SCHEMA,
            "name": self.name,
            **({} if self.target is None else {"target": self.target.model_dump()}),
            "classes": self.classes,
            "preprocess": self.preprocess.to_json(),
            "precision": scorer.precision,
            "predictions": self.predictions,
            "layers": self.layers,
            "policy": self.policy.model_dump(),
            "backbone": self.backbone.spec(),
            "projection": scorer.projection.config(),
            "density": scorer.density.config(),
            "head": None if scorer.head is None else {**scorer.head.config(), **self._other_layers()},
            "calibration": {"images": len(self.calibration)},
            **({} if gates is None else {"gates": self._gates_config(gates)}),
            "collapse": self.report.get("collapse"),
            "metrics": self.report.get("metrics", {}),
            "provenance": self.report.get("provenance", {}),
        }
        return write_bundle(Path(path), fields, parts)

    def _gates_config(self, gates: Gates) -> dict[str, Any]:
        texture = self.pipeline.scorer.texture
        config: dict[str, Any] = {"names": gates.names, "images": gates.ascending.shape[1], "texture": None}
        if texture is not None:
            config["texture"] = {
                "layer": self.backbone.layers[-1],
                "density": texture.config(),
                "counts_below": gates.texture_counts_below,
            }
        return config

    def _other_layers(self) -> dict[str, list[str]]:
        """Names of the layers that the head reads beside z, where there are some."""
        others = self.head_layers[1:]
        return {"layers": list(others)} if others else {}

    @classmethod
    def load(
        cls: type[AnyModel],
        path: str | Path,
        *,
        device: str | torch.device = "auto",
        allow_factories: Collection[str] = (),
    ) -> AnyModel:
        """Read, verify and build a bundle.

        Args:
            path: Bundle directory.
            device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
            allow_factories: Network factories (``package.module:factory``) that may be imported.

        Raises:
            BundleError: The bundle is missing, altered, damaged, inconsistent, or of a model of the other kind.
        """
        return cls.from_bundle(read_bundle(Path(path)), device=device, allow_factories=allow_factories)

    @classmethod
    def from_bundle(
        cls: type[AnyModel],
        bundle: Bundle,
        *,
        device: str | torch.device = "auto",
        allow_factories: Collection[str] = (),
        check: Callable[[AnyModel], None] | None = None,
    ) -> AnyModel:
        """Build a verified bundle, see :meth:`load`; ``check`` raises for a model that should not even be tried."""
        target = resolve_device(device)
        manifest = bundle.manifest
        if (manifest.target is not None) != cls.is_regression:
            wanted, found = ("a regression", "a classifier")[:: 1 if cls.is_regression else -1]
            raise BundleError(f"expected the bundle of {wanted}, {bundle.path} is of {found}; load_model loads either")
        parts = restore_parts(bundle, allow_factories)
        scorer = Scorer(
            manifest.preprocess,
            parts.backbone.to(target).fused(manifest.precision),
            parts.projection,
            parts.density,
            parts.head,
            manifest.precision,
            parts.texture,
            parts.head_layers,
        ).to(target)
        model = cls(
            pipeline=Pipeline(scorer, parts.calibration.ood_scores, parts.gates),
            backbone=parts.backbone,
            classes=manifest.classes,
            calibration=parts.calibration,
            policy=manifest.policy,
            layers=manifest.layers,
            name=manifest.name,
            report={"collapse": manifest.collapse, "metrics": manifest.metrics, "provenance": manifest.provenance},
            version=manifest.version,
            target=manifest.target,
        )
        if check is not None:
            check(model)
        try:
            model.probe()
        except FitError as error:
            raise BundleError(str(error)) from error
        return model

    def probe(self) -> None:
        """Run a black, a white and a noise image through the pipeline.

        Raises:
            FitError: The parts do not fit together, or give something not finite.
            torch.OutOfMemoryError, torch.AcceleratorError, MemoryError: The device has no room for it, or is broken.
        """
        scorer = self.pipeline.scorer
        noise = self.preprocess.noise()
        images = torch.cat([torch.zeros_like(noise), torch.full_like(noise, 255), noise]).to(self.device)
        try:
            with torch.inference_mode():
                packed = self.pipeline(images)
                inputs = scorer.standardise(images)
                stored, _ = self.backbone(inputs)
                fused, _ = scorer.features(inputs)
        except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
            raise  # Not the bundle's fault.
        except Exception as error:  # A hostile file can make a network fail in any way.
            raise FitError(f"the parts of {self.name!r} do not fit together: {error}") from error
        # The features too: a ReLU inside a convolution turns NaN into zeros.
        finite = all(bool(part.isfinite().all()) for part in (packed, *stored))
        others, expected = len(self.score_names) + len(self.gates), self.num_probabilities
        if packed.shape[1] != others + expected or not finite:
            raise FitError(
                f"expected {expected} finite probabilities from {self.name!r}, got "
                f"{packed.shape[1] - others} columns or values that are not finite; check the weights, fit again"
            )
        for exact, got in zip(stored, fused, strict=True):
            if (exact - got.float()).abs().max() > FUSION_TOLERANCE[scorer.precision] * exact.abs().max():
                raise FitError(
                    f"expected the same features from {self.name!r} in fewer operations, got others; a module of its "
                    "network does more than its type says, please report it"
                )


def _prefixed(prefix: str, module: nn.Module | None) -> dict[str, Tensor]:
    """The tensors of a module under longer names; none without a module."""
    return {} if module is None else {prefix + name: tensor for name, tensor in module.state_dict().items()}
