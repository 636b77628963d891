"""The base class of fitted models: their modules, saving, loading, and a trial run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from psc_core.answers import UNNAMED, BasePolicy, ClassificationPolicy, RegressionPolicy, Target
from psc_core.bundle import Bundle, Manifest, read_bundle, write_bundle
from psc_core.compute import own_state, resolve_device
from psc_core.data.loaders import FEW_INPUTS, LoaderDescription, warn_of_range
from psc_core.errors import BundleError, FitError, PSCError, UsageError, of_this_machine, shorten
from psc_core.images.preprocess import MAKE_KNOWN, ImageLike, Inputs, Preprocess, as_batch
from psc_core.network.cut import Backbone
from psc_core.network.output import See, dependence, first_dependent, trial_images
from psc_core.pipeline import NO_MAP, Pipeline
from psc_core.settings import FitOptions
from psc_core.storage import restore, store
from psc_core.tasks.base import BaseCalibration, BaseDecisions, BasePrediction, FloatArray, Matrix, Outputs, Task
from psc_core.tasks.classification import Calibration, Classification
from psc_core.tasks.regression import Calibration as RegressionCalibration
from psc_core.tasks.regression import Regression

if TYPE_CHECKING:
    from psc_core.data.loaders import Statistic
    from psc_core.tasks.classification import ClassificationPrediction, Decisions
    from psc_core.tasks.regression import Decisions as RegressionDecisions
    from psc_core.tasks.regression import RegressionPrediction


logger = logging.getLogger("psc.model")

FUSION_TOLERANCE = {"fp32": 0.01, "bf16": 0.5}  # of fused features, relative to the largest
MAX_BATCH = 64  # maximum number of images that pass through the pipeline at once
TRIAL_IMAGES: Final = 64  # the number of calibration images that a fitted model keeps for checking a copy of it

AnyModel = TypeVar("AnyModel", bound="FittedModel")


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedModel:
    """A network cut after its chosen layer(s), with all fitted parts, ready to predict.

    A subclass for the models of one task only narrows the types.
    """

    task_type: ClassVar[type[Task]] = Task  # type: ignore[type-abstract]

    task: Task  # what the model predicts
    pipeline: Pipeline = field(repr=False)  # from pixels to packed outputs, on its device
    backbone: Backbone = field(repr=False)  # the network as fitted, for the bundle; the pipeline runs a fused copy
    classes: tuple[str, ...]  # class names; a class index is a position in them
    calibration: BaseCalibration = field(repr=False)
    policy: BasePolicy  # the default thresholds
    layers: tuple[str, ...]  # chosen layer(s)
    name: str
    report: Mapping[str, Any] = field(default_factory=dict, repr=False)  # collapse, metrics, provenance; JSON types
    version: str = ""  # digest of the bundle, empty before saving
    trial: Tensor | None = field(default=None, repr=False)  # calibration images; not stored in bundles

    @property
    def device(self) -> torch.device:
        return self.pipeline.scorer.scale.device

    @property
    def preprocess(self) -> Preprocess:
        return self.pipeline.scorer.preprocess

    @property
    def layer(self) -> str:
        """The names of the chosen layers as one string."""
        return "+".join(self.layers)

    @property
    def head_layers(self) -> tuple[str, ...]:
        """The names of the head's inputs: the chosen layer(s) for z, and the other layers that the head reads."""
        return (self.layer, *self.pipeline.scorer.head_layers)

    @property
    def network_classes(self) -> tuple[str, ...]:
        """The classes that the network was trained on: all but the added ones, which are the last."""
        return self.classes[: len(self.classes) - len(self.pipeline.scorer.added)]

    @property
    def predictions(self) -> str:
        """``"psc"`` if the head on z predicts, ``"original"`` if the network's own output does."""
        return "original" if self.backbone.keep_output else "psc"

    @property
    def epistemic_unit(self) -> str:
        """The unit of the epistemic uncertainty; empty where the original network classifies, which has none."""
        return self.task.epistemic_unit(self.pipeline.scorer.head)

    @cached_property
    def checks(self) -> tuple[str, ...]:
        """The names of the checks in the OOD score; empty if the model has none."""
        return self.pipeline.check_names

    @cached_property
    def score_names(self) -> tuple[str, ...]:
        return self.pipeline.scorer.head.score_names

    @property
    def num_probabilities(self) -> int:
        return self.task.probabilities(self.classes)

    def headline(self, policy: BasePolicy) -> str:
        """Return the sentence on what is promised of images that a policy accepts."""
        return policy.headline(self.report.get("metrics", {}))

    def outputs(self, packed: Matrix) -> Outputs[Matrix]:
        """Give names to the columns of packed outputs."""
        return Outputs(packed, self.score_names, self.checks)

    @own_state()
    def compute(self, images: Sequence[ImageLike] | Tensor) -> Outputs[Tensor]:
        """Return the outputs for images in any form, on the CPU; see :meth:`psc_core.PSC.predict`."""
        batch = self._batch(images)
        with torch.inference_mode():
            packed = [self.pipeline(part.to(self.device)).cpu() for part in torch.split(batch, MAX_BATCH)]
        columns = len(self.score_names) + self.num_probabilities + len(self.checks)
        return self.outputs(torch.cat(packed) if len(batch) else torch.empty(0, columns))

    @own_state()
    def predict(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> BasePrediction:
        """Predict with uncertainty, under the bundle's policy.

        Args:
            images: A list of paths, encoded files (bytes), Pillow images or ``uint8`` arrays (height, width) or
                (height, width, 3), of any size; or a tensor (n, channels, height, width) of the network's input size:
                ``uint8`` pixels, or floats from a loader, which enter the network unchanged.
            maps: Also return ``maps``, which show where the images are unusual.

        Raises:
            ImageError: If an image cannot be decoded.
            UsageError: If ``images`` has another type, a file cannot be read, a tensor has the wrong shape or is not
                finite, the preprocessing of pixels is unknown, or the model has no maps.
        """
        grey = None
        if maps:
            outputs, grey = self._compute_with_maps(self._batch(images))
        else:
            outputs = self.compute(images)
        decisions = self.decide(self.outputs(outputs.packed.numpy()))
        prediction = self.task.prediction(outputs, decisions, self.classes)
        return prediction if grey is None else replace(prediction, maps=grey)

    def _batch(self, images: Sequence[ImageLike] | Tensor) -> Tensor:
        """Read images into one batch; warn, once, of float inputs that another transform made than the fit's."""
        batch = as_batch(images, self.preprocess)
        if batch.is_floating_point() and len(batch) and self.preprocess.is_known and not self._warned:
            few = batch[:FEW_INPUTS]
            low, high = (end((0, 2, 3)).tolist() for end in (few.amin, few.amax))
            if warn_of_range("this tensor", self.preprocess, few, low, high):
                self._warned.append(True)
        return batch

    @cached_property
    def _warned(self) -> list[bool]:
        return []

    def _compute_with_maps(self, batch: Tensor) -> tuple[Outputs[Tensor], Tensor]:
        if self.pipeline.map is None:
            raise UsageError(NO_MAP)
        if not len(batch):
            grid = self.pipeline.map.grid
            return self.compute(batch), torch.empty(0, grid.rows, grid.columns, dtype=torch.uint8)
        with torch.inference_mode():
            parts = [self.pipeline.forward_with_map(part.to(self.device)) for part in torch.split(batch, MAX_BATCH)]
        packed, grey = (torch.cat([part.cpu() for part in each]) for each in zip(*parts, strict=True))
        return self.outputs(packed), grey

    def __call__(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> BasePrediction:
        return self.predict(images, maps=maps)

    @own_state()
    def calibrate(self: AnyModel, loader: Any, **settings: Any) -> AnyModel:
        """Return this model with p-values, thresholds and prediction sets from other validation images.

        All of these images calibrate, none selects; everything else stays.  The ambiguity threshold is chosen again;
        where the images are too few or too often wrong to show one, nothing is accepted, and a warning says so.  This
        model does not change: ``psc = psc.calibrate(loader)``.

        Args:
            loader: A loader as in :meth:`psc_core.PSC.fit`, or an :class:`psc_core.ImageDataset`, of images that were
                not used for training or fitting.
            settings: New values of ``alpha``, ``coverage``, and ``risk`` (classifier) or ``max_width`` (regression), if
                they change; and ``batch_images``.

        Raises:
            UsageError: If ``loader`` is not a loader, images have another size, a setting is of the other task, or
                there are too few images for a rate.
            DataError: If a batch cannot be used, or the classes differ.
        """
        from psc_core.fit import calibrate_on  # imported here, so that services load no fitting code

        return cast(AnyModel, calibrate_on(self, loader, **settings))

    @own_state()
    def learn(self: AnyModel, unknown: Any, loader: Any, **settings: Any) -> AnyModel:
        """Return this model with a check that knows images of none of the classes, calibrated on ``loader``.

        The check ``reviewed`` finds images that are like the ``unknown`` ones, of which ten are enough to begin with.
        It is left out, with a warning, where it does not help on those that were held back, or does harm to synthetic
        OOD images.  Nothing else is fitted.  A quarter of the images of the classes measures that; the others
        calibrate, as in :meth:`calibrate`.

        Args:
            unknown: A loader as in :meth:`psc_core.PSC.fit`, or an :class:`psc_core.ImageDataset`, of images that show
                none of the classes.  Their labels are the kinds of what they show: a kind of at least ten images has
                its own part of the check.
            loader: Images of the classes, which were not used for training or fitting, as in :meth:`calibrate`.
            settings: As in :meth:`calibrate`.

        Raises:
            UsageError: As in :meth:`calibrate`, and if there are fewer than ten unknown images or a hundred others, or
                the model has no checks.
            DataError: If a batch cannot be used, or the classes differ.
        """
        from psc_core.fit import learn_from  # imported here, so that services load no fitting code

        return cast(AnyModel, learn_from(self, unknown, loader, **settings))

    @own_state()
    def add_class(self: AnyModel, name: str, images: Any, loader: Any, **settings: Any) -> AnyModel:
        """Return this model with one more class, calibrated on ``loader``.

        Nothing is fitted: the class is known by the mean of its ``images``, of which ten are enough to begin with, and
        takes at most 0.5 % of the right answers of other classes on the images of ``loader`` that measure that, a
        quarter.  The others calibrate, as in :meth:`calibrate`.  ``report["provenance"]["recalibrations"][-1]`` says
        how many of its images are recognised.  A check ``reviewed`` is lost; :meth:`learn` makes it again.

        Args:
            name: The name of the class, which becomes the last one.
            images: A loader as in :meth:`psc_core.PSC.fit`, or an :class:`psc_core.ImageDataset`, of images of it;
                their labels mean nothing.
            loader: Images of all classes, which were not used for training or fitting, as in :meth:`calibrate`.
                Without images of the new class the rates hold for images of the others.
            settings: As in :meth:`calibrate`.

        Raises:
            UsageError: As in :meth:`calibrate`, and if the name is that of a class, there are fewer than ten images of
                it or 25 others in the quarter, or they cannot be told apart.
            DataError: If a batch cannot be used, or the classes differ.
        """
        from psc_core.fit import add_class_from  # imported here, so that services load no fitting code

        return cast(AnyModel, add_class_from(self, name, images, loader, **settings))

    def decide(self, outputs: Outputs[FloatArray]) -> BaseDecisions:
        """Return the decisions under the bundle's policy."""
        return self.calibration.decide(outputs, self.policy)

    @own_state()
    def save(self, path: str | Path, *, graph: bool = False) -> Manifest:
        """Write the bundle directory ``path``; equal models give equal bytes.

        Args:
            path: The directory to write.
            graph: Store the network as an ONNX graph, which can be loaded without its code and library.  A network that
                no name of :func:`psc_core.load_network` builds is always stored so.

        Raises:
            NetworkError: If no name builds the network and it cannot be exported to ONNX.
            BundleError: If a bundle cannot be written to ``path``.
            UsageError: If it is unknown how files become inputs, which a bundle has to store.
        """
        if not self.preprocess.is_known:
            raise UsageError(f"a bundle has to say how files become inputs; {MAKE_KNOWN}")
        return write_bundle(Path(path), *store(self, graph=graph))

    @own_state()
    def export(self, path: str | Path, images: Sequence[ImageLike] | Tensor = ()) -> None:
        """Write an ONNX file that answers as this model does, with a README, to the folder ``path``.

        The first 64 ``images``, in any form that :meth:`predict` takes, travel along with their answers, which every
        runtime that is installed then has to give too; noise takes their place where there are fewer.

        Raises:
            NetworkError: If the network cannot be exported to ONNX, or gives other answers there or in a runtime.
            UsageError: If the network computes in bfloat16.
        """
        from psc_core.export import folder  # imported here: services load no exporting code

        folder.export_model(self, Path(path), images)
        folder.check_equal(folder.check(Path(path)))

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        message: str = "Upload a bundle",
    ) -> str:
        """Upload the bundle and a model card to the repository ``"org/name"`` of the Hugging Face hub, in one commit.

        It replaces the bundle and the card that are there; other files stay.  A repository or branch (``revision``)
        that does not exist is created, a repository ``private`` if you say so; one that exists must be so already.
        The default ``token`` is the one that ``hf auth login`` saved.  Returns the address of the commit.

        Raises:
            UsageError: If the hub refuses or does not answer, its client is not installed, or the repository is
                public and not ``private``, or the reverse; as :meth:`save`.
            NetworkError: As :meth:`save`.
        """
        from psc_core.hub import upload  # imported here, so that services load no client of the hub

        return upload(self, name, private, token, revision, message)

    @classmethod
    def from_pretrained(
        cls: type[AnyModel],
        source: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        device: str | torch.device = "auto",
        allow_factories: Collection[str] = (),
    ) -> AnyModel:
        """Load a bundle from a repository ``"org/name"`` of the Hugging Face hub, or a folder, as :meth:`load` does.

        Only files of the bundle are downloaded, and kept in the hub's cache (``cache_dir``), where they are found
        without a network too.  A ``revision`` is a branch, a tag, or a commit, which is always the same bundle.

        Raises:
            UsageError: If there is no such repository, the hub does not answer, or its client is not installed.
            BundleError: If the repository holds no bundle; as :meth:`load`.
        """
        from psc_core.hub import download  # imported here, so that services load no client of the hub

        folder = download(source, revision, token, cache_dir)
        return cls.load(folder, device=device, allow_factories=allow_factories)

    @classmethod
    @own_state()
    def load(
        cls: type[AnyModel],
        path: str | Path,
        *,
        device: str | torch.device = "auto",
        allow_factories: Collection[str] = (),
    ) -> AnyModel:
        """Read, verify and build a bundle.

        Args:
            path: The bundle directory.
            device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
            allow_factories: The network factories (``package.module:factory``) that may be imported.

        Raises:
            BundleError: If the bundle is missing, altered, damaged, inconsistent, or its model is of another task.
        """
        model = cls.from_bundle(read_bundle(Path(path)), device=device, allow_factories=allow_factories)
        return model.probed()

    @classmethod
    @own_state()
    def from_bundle(
        cls: type[AnyModel],
        bundle: Bundle,
        *,
        device: str | torch.device = "auto",
        allow_factories: Collection[str] = (),
    ) -> AnyModel:
        """Build a verified bundle as :meth:`load` does, but compute nothing; call :meth:`probed` next."""
        target = resolve_device(device)
        manifest = bundle.manifest
        if not isinstance(manifest.task, cls.task_type):
            raise BundleError(
                f"expected the bundle of a {cls.task_type.noun}, {bundle.path} is of a {manifest.task.noun}; "
                "load_model loads any"
            )
        pipeline, backbone, calibration = restore(bundle, allow_factories, target)
        of_task = model_class_of(manifest.task)
        return (of_task if issubclass(of_task, cls) else cls)(
            pipeline=pipeline,
            backbone=backbone,
            classes=manifest.classes,
            calibration=calibration,
            policy=manifest.policy,
            layers=manifest.layers,
            name=manifest.name,
            report={"collapse": manifest.collapse, "metrics": manifest.metrics, "provenance": manifest.provenance},
            version=manifest.version,
            task=manifest.task,
        )

    @own_state()
    def probed(self: AnyModel) -> AnyModel:
        """Return this model, loaded from a bundle, once it has passed :meth:`probe`."""
        try:
            self.probe()
        except FitError as error:
            raise BundleError(str(error)) from error
        return self

    @own_state()
    def probe(self) -> None:
        """Run a black, a white and a noise image through the pipeline, and through the network among other images."""
        scorer = self.pipeline.scorer
        noise = self.preprocess.noise()
        images = torch.cat([torch.zeros_like(noise), torch.full_like(noise, 255), noise]).to(self.device)
        try:
            with torch.inference_mode():
                packed = self.pipeline(images)
                inputs = scorer.standardise(images)
                stored, _ = self.backbone(inputs)
                if self.pipeline.map is not None:
                    self.pipeline.map.check(stored[self.backbone.layers.index(self.pipeline.map.layer)])
                fused, _ = scorer.features(inputs)
                place = first_dependent(self._see_layers, trial_images(self.preprocess).to(self.device))
        except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
            raise  # not the bundle's fault
        except PSCError as error:
            raise FitError(f"the parts of {self.name!r} do not fit together: {error}") from error
        except (OSError, ImportError) as error:
            logger.warning("the first images of %r: %s", self.name, shorten(repr(error)))
            raise FitError(f"{self.name!r} cannot be run here: {of_this_machine(error)}") from error
        except Exception as error:  # A hostile file can make a network fail in any way.
            logger.warning("the first images of %r: %s", self.name, shorten(repr(error)))  # clients get no details
            raise FitError(
                f"the parts of {self.name!r} do not fit together: {type(error).__name__}, see the log; fit it again"
            ) from error
        # Check the features too, because a ReLU inside a convolution turns NaN into zeros.
        finite = all(bool(part.isfinite().all()) for part in (packed, *stored))
        others, expected = len(self.score_names) + len(self.checks), self.num_probabilities
        if packed.shape[1] != others + expected:
            raise FitError(
                f"expected {others + expected} columns of outputs from {self.name!r}, got {packed.shape[1]}; fit again"
            )
        if not finite:
            raise FitError(
                f"expected finite features and outputs from {self.name!r}, got some that are not; check the weights, "
                "fit again"
            )
        for exact, got in zip(stored, fused, strict=True):
            if (exact - got.float()).abs().max() > FUSION_TOLERANCE[scorer.precision] * exact.abs().max():
                raise FitError(
                    f"expected the same features from {self.name!r} in fewer operations, got others; a module of its "
                    "network does more than its type says, please report it"
                )
        if place is not None:
            raise FitError(f"the network of {self.name!r}: {dependence(place)}")

    def _see_layers(self, images: Inputs, see: See) -> None:
        """Show the features of each layer of the network, and its output if it is kept."""
        features, output = self.backbone(images)
        for name, value in zip(self.backbone.layers, features, strict=True):
            see(name, value)
        if output is not None:
            see("", output)


@dataclass(frozen=True, kw_only=True, eq=False)
class PSC(FittedModel):
    """A classifier that recognises ambiguous and out-of-distribution images in one forward pass.

    Examples:
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> psc = PSC.load(bundle)
        >>> prediction = psc.predict([f"{bundle}/examples/{name}.png" for name in ("clean", "shirt")])
        >>> prediction.decision
        ('accept', 'abstain_ood')
    """

    task_type = Classification

    task: Classification = field(default_factory=Classification)
    calibration: Calibration = field(repr=False)
    policy: ClassificationPolicy  # the default thresholds

    @classmethod
    def fit(  # noqa: PLR0913
        cls,
        net: nn.Module,
        train: Any,
        val: Any,
        *,
        preprocess: Any = None,
        mean: Statistic | None = None,
        std: Statistic | None = None,
        classes: Sequence[str] | Mapping[Any, Any] | None = None,
        name: str = "psc",
        **settings: Unpack[FitOptions],
    ) -> PSC:
        """Fit uncertainty to a trained network in memory: layer, projection, density, head and calibration.

        Each loader is read once into a scratch file, so its order, shuffling and workers do not matter; a warning
        (:class:`psc_core.errors.LoaderWarning`) reports augmented or dropped images.  The network is copied: yours
        keeps its mode and its device, and you may go on training it.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> labels = torch.arange(400) % 4
            >>> images = (torch.rand(400, 1, 8, 8) + labels[:, None, None, None]) / 4
            >>> train, val = TensorDataset(images[:200], labels[:200]), TensorDataset(images[200:], labels[200:])
            >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
            >>> loader = DataLoader(train, batch_size=64, shuffle=True)
            >>> psc = PSC.fit(net, loader, val, mean=0.0, std=1.0, layer="0", head="duq")
            >>> psc(images[:3]).probabilities.shape
            torch.Size([3, 4])

        Args:
            net: A trained network of any type whose output is logits (batch, classes), or a classifier of transformers.
            train: A DataLoader of training images, a data set of (image, label), any iterable of batches, or an
                :class:`psc_core.ImageDataset`.  Floats are the network's inputs; Pillow images, ``uint8`` arrays and
                tensors need a ``preprocess``.
            val: Validation images in the same form, none of them used for training: half of them select, half
                calibrate.
            preprocess: How files become inputs, if they are more than resized: a :class:`psc_core.Preprocess`, the
                transforms of torchvision's weights, ``pretrained_cfg`` of timm or an image processor of transformers.
            mean: The mean of each channel that the loaders' transform subtracts.  With ``mean`` and ``std`` the model
                can predict files and can be saved; without them only the range of the inputs is known.
            std: The standard deviation of each channel that the loaders' transform divides by.
            classes: Class names in the order of the labels, or a mapping between both, such as ``class_to_idx`` of
                torchvision or ``id2label`` of transformers; None takes those of the training data set, else those that
                the files of a network of transformers or timm have, else "0", "1", …, for the network's outputs.
                If the classes are not the network's, the head predicts, and a warning says so.
            name: The name of the model.
            settings: The settings of :func:`psc_core.fit_psc`; ``layer``, to name the chosen layer; and ``device``,
                by default the network's.

        Raises:
            UsageError: If ``train`` or ``val`` is not a loader or does not fit on the disk, a setting is invalid, the
                classes are no distinct names, or an :class:`psc_core.ImageDataset` comes with classes or a
                preprocessing, of which it has its own.
            DataError: If a batch cannot be used, or a class has too few images.
            FitError: If the features cannot be fitted; the message says why.
            NetworkError: If the network returns no logits, or cannot be copied or cut.
        """
        from psc_core.fit import fit  # imported here, so that services load no fitting code

        description = LoaderDescription.of(preprocess, mean, std, classes=classes)
        return cast(PSC, fit(cls.task_type.name, net, (train, val), description, name, settings))

    if TYPE_CHECKING:

        def predict(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> ClassificationPrediction:
            """Predict with uncertainty, under the bundle's policy, for files, Pillow images, arrays or a batch of them.

            With ``maps`` the prediction says where each image is unusual.
            """

        def __call__(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> ClassificationPrediction: ...

        def decide(self, outputs: Outputs[FloatArray]) -> Decisions: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class PSCRegressor(FittedModel):
    """A regression that predicts a number with its uncertainty and recognises unusual images in one forward pass.

    Its :attr:`classes` are the bins of the target, which density and checks use.  :func:`psc_core.fit_regressor` and
    ``psc-fit --task regression`` fit such a model.

    Examples:
        >>> PSCRegressor.load("artifacts/dirty-mnist-resnet18")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        psc_core.errors.BundleError: expected the bundle of a regression, ... is of a classifier; ...
    """

    task_type = Regression

    task: Regression
    calibration: RegressionCalibration = field(repr=False)
    policy: RegressionPolicy  # the default thresholds

    @property
    def target(self) -> Target:
        """The number that the model predicts."""
        return self.task.target

    @classmethod
    def fit(  # noqa: PLR0913
        cls,
        net: nn.Module,
        train: Any,
        val: Any,
        *,
        target: str = UNNAMED.name,
        unit: str = "",
        preprocess: Any = None,
        mean: Statistic | None = None,
        std: Statistic | None = None,
        name: str = "psc",
        **settings: Unpack[FitOptions],
    ) -> PSCRegressor:
        """Fit uncertainty to a trained network with one output in memory, from loaders of images and numbers.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import TensorDataset
            >>> numbers = torch.rand(400)
            >>> images = 0.9 * numbers[:, None, None, None] + 0.1 * torch.rand(400, 1, 8, 8)
            >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))
            >>> optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            >>> for _ in range(100):
            ...     optimizer.zero_grad()
            ...     (net(images[:200]).squeeze(1) - numbers[:200]).square().mean().backward()
            ...     optimizer.step()
            >>> pairs, others = TensorDataset(images[:200], numbers[:200]), TensorDataset(images[200:], numbers[200:])
            >>> settings = {"mean": 0.0, "std": 1.0, "layer": "0"}
            >>> model = PSCRegressor.fit(net, pairs, others, target="age", unit="years", **settings)
            >>> str(model.target), model(images[:3]).interval.shape
            ('age, years', torch.Size([3, 2]))

        Args:
            net: A trained network whose output is (batch, 1), in the unit of the numbers.
            train: A loader as in :meth:`psc_core.PSC.fit`, with numbers for labels.
            val: Validation images in the same form, none of them used for training.
            target: The name of the number.
            unit: The unit of the number.
            preprocess: See :meth:`psc_core.PSC.fit`, also for ``mean``, ``std`` and ``name``.
            mean: The mean of each channel.
            std: The standard deviation of each channel.
            name: The name of the model.
            settings: The settings of :func:`psc_core.fit_regressor`, ``layer`` and ``device``.

        Raises:
            UsageError: If ``train`` or ``val`` is not a loader or does not fit on the disk, a setting is invalid, or an
                :class:`psc_core.ImageDataset` comes with a target or a preprocessing, of which it has its own.
            DataError: If a batch cannot be used, or all numbers are equal.
            FitError: If the features cannot be fitted; the message says why.
            NetworkError: If the network cannot be copied or cut.
        """
        from psc_core.fit import fit  # imported here, so that services load no fitting code

        description = LoaderDescription.of(preprocess, mean, std, target=target, unit=unit)
        return cast(PSCRegressor, fit(cls.task_type.name, net, (train, val), description, name, settings))

    if TYPE_CHECKING:

        def predict(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> RegressionPrediction:
            """Predict with uncertainty, under the bundle's policy, for files, Pillow images, arrays or a batch of them.

            With ``maps`` the prediction says where each image is unusual.
            """

        def __call__(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> RegressionPrediction: ...

        def decide(self, outputs: Outputs[FloatArray]) -> RegressionDecisions: ...


MODEL_CLASSES: tuple[type[FittedModel], ...] = (PSC, PSCRegressor)  # of other tasks: FittedModel


@own_state()
def load_model(
    path: str | Path, *, device: str | torch.device = "auto", allow_factories: Collection[str] = ()
) -> FittedModel:
    """Read, verify, build and probe a bundle of any task; see :meth:`psc_core.PSC.load`.

    Examples:
        >>> load_model("artifacts/dirty-mnist-resnet18").task.noun
        'classifier'

    Raises:
        BundleError: If the bundle is missing, altered, damaged or inconsistent.
    """
    return build_model(path, device=device, allow_factories=allow_factories).probed()


@own_state()
def build_model(
    path: str | Path, *, device: str | torch.device = "auto", allow_factories: Collection[str] = ()
) -> FittedModel:
    """Read, verify and build a bundle of any task, but compute nothing; call :meth:`FittedModel.probed` next."""
    return FittedModel.from_bundle(read_bundle(Path(path)), device=device, allow_factories=allow_factories)


def model_class_of(task: object) -> type[FittedModel]:
    return next((each for each in MODEL_CLASSES if isinstance(task, each.task_type)), FittedModel)
