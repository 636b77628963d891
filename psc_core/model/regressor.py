"""PSCRegressor: a fitted regression, ready to predict, save and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from psc_core.images.loader_description import LoaderDescription
from psc_core.model.base import FittedModel
from psc_core.target import UNNAMED, Target
from psc_core.tasks.regression.calibration import Calibration
from psc_core.tasks.regression.policy import RegressionPolicy
from psc_core.tasks.regression.task import Regression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from psc_core.images.inputs import ImageLike
    from psc_core.images.loader_preprocessing import Statistic
    from psc_core.tasks.outputs import FloatArray, Outputs
    from psc_core.tasks.regression.decide import Decisions
    from psc_core.tasks.regression.prediction import RegressionPrediction


@dataclass(frozen=True, kw_only=True, eq=False)
class PSCRegressor(FittedModel):
    """A regression that predicts a number with its uncertainty and recognises unusual images in one forward pass.

    Its :attr:`classes` are the bins of the target, which the density and the gates use.  :func:`psc_core.fit_regressor`
    and ``psc-fit --task regression`` fit such a model.

    Example:
        >>> PSCRegressor.load("artifacts/dirty-mnist-resnet18")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        psc_core.errors.BundleError: expected the bundle of a regression, ... is of a classifier; ...
    """

    task_type = Regression

    task: Regression
    calibration: Calibration = field(repr=False)
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
        **settings: Any,
    ) -> PSCRegressor:
        """Fit uncertainty to a trained network with one output in memory, from loaders of images and numbers.

        Example:
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
        from psc_core.fitting.in_memory import fit  # imported here, so that services load no fitting code

        description = LoaderDescription.of(preprocess, mean, std, target=target, unit=unit)
        return cast(PSCRegressor, fit(cls.task_type.name, net, (train, val), description, name, settings))

    if TYPE_CHECKING:

        def predict(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> RegressionPrediction: ...

        def __call__(self, images: Sequence[ImageLike] | Tensor, *, maps: bool = False) -> RegressionPrediction: ...

        def decide(self, outputs: Outputs[FloatArray]) -> Decisions: ...
