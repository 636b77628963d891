"""How many principal components are kept."""

from __future__ import annotations

import pytest
import torch

from psc_core.density import Examples, fit_density, fit_pca
from psc_core.errors import FitError


def test_number_of_components() -> None:
    random = torch.Generator().manual_seed(0)
    deviations = torch.tensor([10.0, 5.0, 1.0, 0.1, 0.01])
    z = torch.randn(4000, 5, generator=random) * deviations
    assert len(fit_pca(z, kept=None, limit=9).variances) == 2  # 100 + 25 of 126.01 is 99.2 %
    assert len(fit_pca(z, kept=None, limit=1).variances) == 1
    full = fit_pca(z, kept=5, limit=1)
    torch.testing.assert_close(full.variances.sqrt(), deviations.double(), rtol=0.05, atol=0)
    assert full.explained == pytest.approx(1.0)
    z[:, 4] *= 1e-5  # 10⁻⁸ of the largest deviation: rounding
    with pytest.raises(FitError, match="≤ 4"):
        fit_pca(z, kept=5, limit=9)


def test_rounding_is_no_component() -> None:
    z = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(500) % 2
    fit_density(Examples(z * torch.tensor([1.0, 3e-5]), labels, 2), kind="tied", pca=2)
    with pytest.raises(FitError, match="≤ 1"):
        fit_density(Examples(z * torch.tensor([1.0, 3e-6]), labels, 2), kind="tied", pca=2)


@pytest.mark.parametrize("kind", ["gda", "mahalanobis++"])
def test_features_that_differ_by_rounding_have_no_density(kind: str) -> None:
    """As they are, and of unit length."""
    random = torch.Generator().manual_seed(0)
    z = 0.5 * torch.randn(1, 64, generator=random).expand(200, 64)
    z = z + torch.randint(-4, 5, (200, 64), generator=random) * torch.finfo(torch.float32).eps * z.abs()
    with pytest.raises(FitError, match="equal"):
        fit_density(Examples(z, torch.arange(200) % 2, 2), kind=kind)
