"""The detectors of the OOD comparison that are our own, and its tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.fitting import Penultimate
from benchmarks.ood import peers, tables
from benchmarks.ood.detectors import Images, fdbd, fit_penultimate, scored
from benchmarks.ood.settings import SHIFTS
from psc_core.evaluation.baselines import full_density


def features(count: int, classes: int, seed: int) -> Penultimate:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    values = torch.randn(count, 6, generator=generator) + 3 * torch.eye(6)[labels]
    return Penultimate(values.float(), values[:, :classes].double(), labels)


def test_fdbd_equals_loops() -> None:
    found = features(8, 3, 0)
    weight, mean = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)), found.features.mean(0)
    scores = fdbd(found.features, found.logits, weight, mean)
    for i, (h, f) in enumerate(zip(found.features.double().numpy(), found.logits.numpy(), strict=True)):
        c = int(f.argmax())
        terms = [(f[c] - f[k]) / np.linalg.norm(weight[c] - weight[k]) for k in range(3) if k != c]
        assert scores[i].item() == pytest.approx(-np.mean(terms) / np.linalg.norm(h - mean.double().numpy()), rel=1e-5)


def test_sum_is_in_upper_spreads_of_validation_images() -> None:
    train, val, new = (features(n, 3, seed) for seed, n in enumerate((120, 50, 9)))
    fitted = {each.name: each for each in fit_penultimate(train, val, 3, torch.nn.Linear(6, 3))}
    density = full_density(train.features, train.labels, num_classes=3, kind="gda++")

    def both(of: Penultimate) -> np.ndarray:
        p = of.logits.softmax(1)
        return np.stack([-density(of.features).log_density.double().numpy(), -(p * p.log()).sum(1).numpy()])

    middle, high = np.quantile(both(val), [0.5, 0.95], axis=1)
    expected = (both(new) / (high - middle)[:, None]).sum(0)
    images = Images(new.features, new.logits, new.labels)
    np.testing.assert_allclose(scored(fitted["penultimate gda++ + entropy"], images).numpy(), expected, rtol=1e-5)


def test_every_peer_fits_and_tells_far_features_apart() -> None:
    pytest.importorskip("pytorch_ood")
    train, inside = features(300, 3, 0), features(60, 3, 1)
    output = torch.nn.Linear(6, 3)
    with torch.no_grad():
        output.weight.copy_(torch.eye(3, 6))
        output.bias.zero_()
    fitted, failed = peers.fit_peers(train, output, seed=0)
    assert failed == {} and len(fitted) == 17
    near, far = (Images(size * inside.features, size * inside.logits, inside.labels) for size in (1.0, 0.01))
    for detector in fitted:
        values = scored(detector, near)
        assert values.shape == (60,) and bool(values.isfinite().all()), detector.name
        if detector.name in ("MSP", "entropy", "MaxLogit", "energy", "GEN"):
            assert scored(detector, far).median() > values.median(), detector.name


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("channels", [1, 3])
def test_shifts_keep_shape_and_change_pixels(name: str, channels: int) -> None:
    images = torch.randint(0, 256, (3, channels, 28, 28), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    found = SHIFTS[name](images)
    assert found.shape == images.shape and found.dtype == torch.uint8
    assert not torch.equal(found, images) and torch.equal(found, SHIFTS[name](images))


def part(setting: str, seed: int, **auroc: float) -> dict[str, object]:
    detectors = {name: {"auroc": value, "fpr95": 1 - value} for name, value in auroc.items()}
    families = dict.fromkeys(auroc, "psc")
    return {"setting": setting, "seed": seed, "families": families, "outside": {"other": detectors}}


def test_worst_gap_is_to_the_best_of_each_setting() -> None:
    parts = [
        part("cifar10", 0, PSC=0.8, KNN=0.9, MSP=0.5),
        part("cifar10", 1, PSC=0.9, KNN=0.92, MSP=0.5),
        part("dirty-mnist", 0, PSC=0.99, KNN=0.7, MSP=0.5),
    ]
    gaps = tables.worst_gaps(tables.means(parts))
    assert gaps == pytest.approx({"PSC": 0.06, "KNN": 0.29, "MSP": 0.49})


@pytest.mark.parametrize(
    ("psc", "knn", "verdict"), [((0.80, 0.90), (0.84, 0.88), "tie"), ((0.80, 0.84), (0.84, 0.88), "behind")]
)
def test_a_tie_is_a_paired_difference_within_its_standard_error(
    psc: tuple[float, float], knn: tuple[float, float], verdict: str
) -> None:
    parts = [part("cifar10", seed, PSC=a, KNN=b) for seed, (a, b) in enumerate(zip(psc, knn, strict=True))]
    assert tables.default_table(parts).splitlines()[-1].split("|")[-2].strip() == verdict


def test_skip_is_compared_by_pairs_and_collapsed_networks_come_first() -> None:
    names = [name for pair in tables.SKIPS for name in pair]
    parts = []
    for setting, seed, nc1, aurocs in (
        ("dirty-mnist", 0, 0.4, (0.9, 0.8, 0.7, 0.75)),
        ("mnist-held-out-0", 0, 0.1, (0.6, 0.7, 0.9, 0.9)),
        ("mnist-held-out-0", 1, 0.2, (0.8, 0.7, 0.9, 0.8)),
    ):
        layers = {"penultimate": {"nc1": [nc1]}, "candidate": {"nc1": [0.5]}}
        parts.append(part(setting, seed, **dict(zip(names, aurocs, strict=True))) | layers)
    first, second = tables.skip_table(parts).splitlines()[-2:]
    assert first.split(" | ")[:6] == [
        "| mnist-held-out-0 → other",
        "0.150",
        "0.500",
        "0.7000",
        "0.7000",
        "0.0000 ± 0.1000",
    ]
    assert second.split(" | ")[1:5] == ["0.400", "0.500", "0.9000", "0.8000"]
