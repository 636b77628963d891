"""KFAC factors against laplace-torch's own curvature."""

from __future__ import annotations

import pytest
import torch

from psc_core.heads.laplace import LaplaceHead, fit_kfac
from tests.psc_core.heads.classifiers import fit, fit_head, images, maximum, torch_laplace


def test_factors_match_laplace_torch() -> None:
    z, labels = images(130, 7, 4)
    head = fit(dim=7, classes=4)
    assert isinstance(head, LaplaceHead)
    posterior, phi = torch_laplace(head, z, labels)
    kfac = fit_kfac(*maximum(head), phi, torch.ones(len(phi)).double())
    for values, vectors, factor in (
        (kfac.input_values, kfac.input_vectors, posterior.H_facs.kfacs[0][1]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[0][0]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[1][0]),
    ):
        torch.testing.assert_close((vectors * values) @ vectors.T, factor)


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_image_with_several_labels_is_one_observation(kind: str) -> None:
    """Ten copies of every label leave the posterior as wide as it was; as ten images they make it narrower."""
    (z, labels), val = images(300, 6, 3), images(150, 6, 3, seed=1)
    shown = torch.arange(300).repeat(10)

    information = {}
    for images_of in (shown, None):
        head = fit_head(z[shown], labels[shown], *val, num_classes=3, kind=kind, images=images_of)
        if isinstance(head, LaplaceHead):
            precision = head.get_buffer("weight_spectrum").reciprocal()
        else:
            root = head.get_buffer("covariance_root").double()
            precision = torch.linalg.inv(root @ root.T).diagonal()
        information[images_of is None] = precision / head.record["temperature"] ** 2 - head.record["prior_precision"]
    torch.testing.assert_close(10 * information[False], information[True], rtol=1e-2, atol=1e-2)
