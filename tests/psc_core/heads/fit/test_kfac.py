"""KFAC factors against laplace-torch's own curvature."""

from __future__ import annotations

import torch

from psc_core.heads import LaplaceHead
from psc_core.heads.fit.kfac import fit_kfac
from tests.psc_core.heads.support import fit, images, maximum, torch_laplace


def test_factors_match_laplace_torch() -> None:
    z, labels = images(130, 7, 4)
    head = fit(dim=7, classes=4)
    assert isinstance(head, LaplaceHead)
    posterior, phi = torch_laplace(head, z, labels)
    kfac = fit_kfac(*maximum(head), phi, labels)
    for values, vectors, factor in (
        (kfac.input_values, kfac.input_vectors, posterior.H_facs.kfacs[0][1]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[0][0]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[1][0]),
    ):
        torch.testing.assert_close((vectors * values) @ vectors.T, factor)
