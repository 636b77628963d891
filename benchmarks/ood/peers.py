"""pytorch-ood's detectors on penultimate features and logits, with the settings of OpenOOD.

Every detector is the library's own class.  Its parameters are the defaults of OpenOOD's configuration files; OpenOOD
tunes them further on out-of-distribution images, we tune nothing.  The penultimate layer is averaged over positions, as
OpenOOD does for these networks.

Three differ.  ViM's 256 dimensions are at most half of the features.  NNGuide compares with :data:`NNGUIDE_BANK` random
images, as many as OpenOOD's 1 % of ImageNet or CIFAR would be at least; 1 % of our few images are no more than its
neighbours.  The library's VRA has thresholds for each unit, OpenOOD's two for all.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fitting import Penultimate
from benchmarks.ood.detectors import Detector, Score

NNGUIDE_BANK = 500  # The number of the training images that NNGuide compares with.

NNGUIDE_NEIGHBOURS = 100


def version() -> str | None:
    """Return the library's version; None if it is not installed (``pip install '.[bench]'``)."""
    try:
        return importlib.metadata.version("pytorch-ood")
    except importlib.metadata.PackageNotFoundError:
        return None


def fit_peers(train: Penultimate, output: nn.Linear, seed: int) -> tuple[list[Detector], dict[str, str]]:
    fitted: list[Detector] = []
    failed: dict[str, str] = {}
    if version() is None:
        print("pytorch-ood is not installed, so its detectors are left out: pip install '.[bench]'")
        return fitted, {"pytorch-ood": "not installed"}
    for name, build in _builders(train, output, seed).items():
        try:
            fitted.append(Detector(name, "pytorch-ood", build()))
        except (ValueError, AssertionError, RuntimeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return fitted, failed


def _builders(train: Penultimate, output: nn.Linear, seed: int) -> Mapping[str, Callable[[], Score]]:
    from pytorch_ood import detector as peers

    head = nn.Linear(output.in_features, output.out_features)
    head.load_state_dict({name: value.cpu() for name, value in output.state_dict().items()})
    weight, bias = head.weight.detach(), head.bias.detach()
    features, labels = train.features, train.labels
    bank = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    bank = bank[:NNGUIDE_BANK]

    @torch.no_grad()
    def logits_of(maps: Tensor) -> Tensor:
        return head(maps.flatten(1))

    def on_logits(model: Any) -> Callable[[], Score]:
        return lambda: lambda images: model.predict_logits(images.logits)

    def on_features(model: Any, chosen: Tensor | slice = slice(None)) -> Callable[[], Score]:
        def build() -> Score:
            model.fit_features(features[chosen], labels[chosen])
            return lambda images: model.predict_features(images.features)

        return build

    def on_maps(model: Any) -> Callable[[], Score]:
        def build() -> Score:
            if model.requires_fit:
                model.fit_feature_maps(features[:, :, None, None], labels)
            return lambda images: model.predict_feature_maps(images.features[:, :, None, None])

        return build

    return {
        "MSP": on_logits(peers.MaxSoftmax(None)),
        "entropy": on_logits(peers.Entropy(None)),
        "MaxLogit": on_logits(peers.MaxLogit(None)),
        "energy": on_logits(peers.EnergyBased(None)),
        "GEN": on_logits(peers.GEN(None, gamma=0.1, M=min(100, head.out_features))),
        "KNN": on_features(peers.KNN(None, k=min(50, len(labels)))),
        "ViM": on_features(peers.ViM(None, d=min(256, weight.shape[1] // 2), w=weight, b=bias)),
        "Mahalanobis": on_features(peers.Mahalanobis(None)),
        "RMD": on_features(peers.RMD(None)),
        "SHE": on_features(peers.SHE(None, head)),
        "NNGuide": on_features(peers.NNGuide(None, head, k=min(NNGUIDE_NEIGHBOURS, len(bank))), bank),
        "NCI": on_features(peers.NCI(None, head, alpha=0.0001)),
        "DICE": on_features(peers.DICE(None, w=weight, b=bias, p=0.9)),
        "ReAct": on_maps(peers.ReAct(None, logits_of, percentile=0.9)),
        "VRA": on_maps(peers.VRA(None, logits_of, lower_percentile=0.1, upper_percentile=0.9)),
        "ASH-B": on_maps(peers.ASH(None, logits_of, variant="ash-b", percentile=0.9)),
        "SCALE": on_maps(peers.SCALE(None, logits_of, percentile=0.85)),
    }
