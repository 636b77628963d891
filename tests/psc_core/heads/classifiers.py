"""Features and fitted heads for the tests of heads."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from psc_core.heads.base import ClassifierHead, Features
from psc_core.heads.laplace import LaplaceHead
from psc_core.tasks import classification
from psc_core.tasks.classification import Classification

KINDS = sorted(Classification.heads)
SEEDS = st.integers(0, 2**16)


def images(n: int, dim: int, classes: int, *, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Features and labels of overlapping classes of unit covariance."""
    random = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(n) % classes
    return scale * (means[labels] + torch.randn(n, dim, generator=random)), labels


def fit_head(
    z: Any,
    labels: Tensor,
    z_val: Tensor,
    val_labels: Tensor,
    *,
    num_classes: int,
    kind: str = "laplace",
    seed: int = 0,
    images: Tensor | None = None,
) -> ClassifierHead:
    """A head fitted to features that lie apart from any data set; by default every example is another image."""
    shown = torch.arange(len(labels)) if images is None else images
    classes, widths = tuple(str(label) for label in range(num_classes)), (z.shape[1],)
    train = Features(z, z, {}, labels, shown, classes, widths)
    selection = Features(z_val, z_val, {}, val_labels, torch.arange(len(val_labels)), classes, widths)
    return classification.fit_head(train, selection, Classification.heads[kind], seed, torch.device("cpu"))


def fit(kind: str = "laplace", *, n: int = 300, dim: int = 6, classes: int = 3, scale: float = 1.0) -> ClassifierHead:
    train, val = images(n, dim, classes, scale=scale), images(150, dim, classes, seed=1, scale=scale)
    return fit_head(*train, *val, num_classes=classes, kind=kind)


def maximum(head: Any) -> tuple[Tensor, Tensor]:
    """The maximum a posteriori W and b, at which the posterior was taken: the stored ones times the temperature."""
    temperature = head.record["temperature"]
    return head.weight.double() * temperature, head.bias.double() * temperature


def torch_laplace(head: LaplaceHead, z: Tensor, labels: Tensor) -> tuple[Any, Tensor]:
    """laplace-torch's posterior with its own curvature, at the head's maximum, prior and temperature; and φ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace
    layer = nn.Linear(z.shape[1], len(head.bias)).double()
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), maximum(head), strict=True):
            parameter.copy_(value)
    phi = head.standardise(z).double()
    posterior = Laplace(layer, "classification", subset_of_weights="all", hessian_structure="kron")
    data = torch.utils.data.TensorDataset(phi, labels)
    posterior.fit(torch.utils.data.DataLoader(data, batch_size=64))
    squared = head.record["temperature"] ** 2  # logits / T: the mean / T, T² times the precision
    posterior.temperature = 1 / squared
    posterior.prior_precision = head.record["prior_precision"] * squared
    posterior.mean /= head.record["temperature"]
    nn.utils.vector_to_parameters(posterior.mean, layer.parameters())
    return posterior, phi


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor) and not part._is_view():
                self.elements = max(self.elements, part.untyped_storage().nbytes() // part.element_size())
        return out
