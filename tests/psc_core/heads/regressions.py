"""Features, numbers and fitted heads for the tests of a regression's heads."""

import pytest
import torch
from torch import Tensor

from psc_core.features import as_matrix
from psc_core.heads import dve
from psc_core.heads.base import Features, RegressionHead
from psc_core.settings import FitSettings
from psc_core.tasks.regression import Regression

KINDS = sorted(Regression.heads)


def images(n: int, dim: int, *, seed: int = 0, scale: float = 1.0, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Features, and numbers that lie near a plane over them."""
    random = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=random)
    plane = z.double() @ torch.linspace(1, 0, dim).double()
    return scale * (3 + z), 50 + 10 * (plane + noise * torch.randn(n, generator=random).double())


def fit_head(
    z: Tensor,
    y: Tensor,
    z_val: Tensor,
    y_val: Tensor,
    *,
    kind: str = "blr",
    val_mean: Tensor | None = None,
    widths: tuple[int, ...] | None = None,
    images: Tensor | None = None,
) -> RegressionHead:
    """A head fitted to features and numbers that lie apart from any data set, one example an image."""
    shown = torch.arange(len(z)) if images is None else images
    widths = widths or (z.shape[1],)
    train = Features(z, z, {}, torch.zeros(len(z), dtype=torch.int64), shown, (), widths, y)
    val_labels = torch.zeros(len(z_val), dtype=torch.int64)
    own = None if val_mean is None else as_matrix(val_mean[:, None])
    selection = Features(z_val, z_val, {}, val_labels, torch.arange(len(z_val)), (), widths, y_val, own)
    return Regression.fit_head(train, selection, FitSettings(task="regression", head=kind), torch.device("cpu"))


def fit(kind: str, *, n: int = 300, dim: int = 6, scale: float = 1.0) -> RegressionHead:
    """A head of any kind; ``dve`` in few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dve, "STEPS", 20)
        return fit_head(*images(n, dim, scale=scale), *images(150, dim, seed=1, scale=scale), kind=kind)
