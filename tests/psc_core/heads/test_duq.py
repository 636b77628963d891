"""DUQ's kernels, probabilities and loss against loops."""

import math

import pytest
import torch
from torch.nn import functional

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


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_exponent_is_the_smallest_of_the_best_selection_nll(spread: float) -> None:
    """Where every selection image is right, the least NLL would make every probability 1."""
    means = 2 * spread * torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(400) % 5
    z = means[labels] + torch.randn(400, 20, generator=torch.Generator().manual_seed(2))
    head = fit_head(z[:300], labels[:300], z[300:], labels[300:], num_classes=5, kind="duq")
    assert isinstance(head, duq.DuqHead)
    e = (head.standardise(z[300:]).double() @ head.embedding.double())[:, None]
    halves = (e - head.centroids.double()).square().sum(2) / (2 * 20 * float(head.length_scale) ** 2)
    losses = {
        gamma: float(functional.cross_entropy(-gamma * halves, labels[300:], reduction="sum"))
        for gamma in duq.EXPONENTS
    }
    allowed = [gamma for gamma, loss in losses.items() if loss <= min(losses.values()) + math.log(100) / 2]
    assert head.record["exponent"] == min(allowed)
    assert head(z[300:]).probabilities.amax(1).median() < 1 - 1e-5


def test_labels_of_one_image_are_one_observation() -> None:
    """Ten copies of every label leave the covariance, and how much it is shrunk, as they were."""
    z, labels = images(50, 6, 2)
    shown, shrinkage = torch.arange(50).repeat_interleave(10), []
    for rows in (torch.arange(50), shown):
        head = fit_head(z[rows], labels[rows], z, labels, num_classes=2, kind="duq", images=rows)
        shrinkage.append(head.record["shrinkage"])
    assert shrinkage[1] == pytest.approx(shrinkage[0]) and shrinkage[0] > 0


@pytest.mark.parametrize(("n", "shrunk"), [(62, False), (61, True)])
def test_shrinks_covariance_of_few_images(n: int, shrunk: bool) -> None:
    z, labels = images(n, 6, 2)
    head = fit_head(z, labels, z, labels, num_classes=2, kind="duq")
    assert (head.record["shrinkage"] > 0) == shrunk
