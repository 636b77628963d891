"""PSC: a fitted probabilistic skip connection, ready to predict, save and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from psc_core.images.loader_description import LoaderDescription
from psc_core.model.base import FittedModel
from psc_core.tasks.classification.calibration import Calibration
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.classification.task import Classification

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from psc_core.images.inputs import ImageLike
    from psc_core.images.loader_preprocessing import Statistic
    from psc_core.tasks.classification.decide import Decisions
    from psc_core.tasks.classification.prediction import ClassificationPrediction
    from psc_core.tasks.outputs import FloatArray, Outputs


@dataclass(frozen=True, kw_only=True, eq=False)
class PSC(FittedModel):
    """A classifier that recognises ambiguous and out-of-distribution images in one forward pass.

    Example:
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
        **settings: Any,
    ) -> PSC:
        """Fit uncertainty to a trained network in memory: layer, projection, density, head and calibration.

        Each loader is read once into a scratch file, so its order, shuffling and workers do not matter; a warning
        (:class:`psc_core.errors.LoaderWarning`) reports augmented or dropped images.  The network is copied: yours
        keeps its mode and its device, and you may go on training it.

        Example:
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
                a network of transformers has in its configuration, else "0", "1", …, for the network's outputs.
                If the classes are not the network's, the head predicts, and a warning says so.
            name: The name of the model.
            settings: The settings of :func:`psc_core.fit_psc`; ``layer``, to name the candidate layer; and ``device``,
                by default the network's.

        Raises:
            UsageError: If ``train`` or ``val`` is not a loader or does not fit on the disk, a setting is invalid, the
                classes are no distinct names, or an :class:`psc_core.ImageDataset` comes with classes or a
                preprocessing, of which it has its own.
            DataError: If a batch cannot be used, or a class has too few images.
            FitError: If the features cannot be fitted; the message says why.
            NetworkError: If the network returns no logits, or cannot be copied or cut.
        """
        from psc_core.fitting.in_memory import fit  # imported here, so that services load no fitting code

        description = LoaderDescription.of(preprocess, mean, std, classes=classes)
        return cast(PSC, fit(cls.task_type.name, net, (train, val), description, name, settings))

    if TYPE_CHECKING:

        def predict(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> ClassificationPrediction: ...

        def __call__(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> ClassificationPrediction: ...

        def decide(self, outputs: Outputs[FloatArray]) -> Decisions: ...
