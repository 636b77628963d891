"""DUQ's kernels, probabilities and loss against loops."""

import pytest
import torch

from psc_core.heads import duq
from tests.psc_core.heads.classifiers import fit, fit_head, images
from tests.reference import heads as naive


def test_kernels_match_loops() -> None:
    z, labels = images(200, 4, 3)
    head = fit("duq", n=200, dim=4)
    assert isinstance(head, duq.DuqHead)
    output = head(z[:20])
    for i, e in enumerate(head.standardise(z[:20]) @ head.embedding):
        k = naive.kernels(e, head.centroids, head.length_scale.item())
        powers = k.double() ** head.exponent.item()
        assert output.epistemic[i].item() == pytest.approx(1 - k.max().item(), abs=1e-4)
        expected = (powers / powers.sum()).float()
        torch.testing.assert_close(output.probabilities[i], expected, rtol=1e-3, atol=1e-4)
    chances = torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected_loss = naive.kernel_loss(chances, labels[:20])
    assert duq.kernel_loss(chances.log(), labels[:20]) == pytest.approx(expected_loss)
    embedded = head.standardise(z) @ head.embedding
    within = torch.stack([torch.cov(embedded[labels == k].T) for k in range(3)]).mean(0)
    torch.testing.assert_close(within, torch.eye(4), rtol=0, atol=0.05)


@pytest.mark.parametrize(("n", "shrunk"), [(62, False), (61, True)])
def test_shrinks_covariance_of_few_images(n: int, shrunk: bool) -> None:
    z, labels = images(n, 6, 2)
    head = fit_head(z, labels, z, labels, num_classes=2, kind="duq")
    assert (head.record["shrinkage"] > 0) == shrunk
