"""pytorch-ood's detectors on features and logits of one network, with the settings of their papers.

Every detector is the library's own class (``pip install pytorch-ood``); none is tuned on out-of-distribution
images.  The layer they read is the penultimate one, averaged over positions, as OpenOOD does for these networks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.ood.detector import Detector, Score, Spaces, memory_bytes


def version() -> str | None:
    """Installed version of pytorch-ood, or None."""
    if importlib.util.find_spec("pytorch_ood") is None:
        return None
    return importlib.metadata.version("pytorch-ood")


def fit_peers(train: Spaces, output: nn.Linear) -> tuple[list[Detector], dict[str, str]]:
    """Fit every detector.

    Args:
        train: Training examples.
        output: The network's last linear layer.

    Returns:
        The fitted detectors, and the reason for each that failed.
    """
    fitted: list[Detector] = []
    failed: dict[str, str] = {}
    for name, build in _builders(train, output).items():
        try:
            model, score = build()
        except (ValueError, AssertionError, RuntimeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        fitted.append(Detector(name, "pytorch-ood", score, "penultimate", memory_bytes(model)))
    return fitted, failed


def _builders(train: Spaces, output: nn.Linear) -> Mapping[str, Callable[[], tuple[Any, Score]]]:
    from pytorch_ood import detector as peers  # type: ignore[import-untyped]

    weight, bias = output.weight.detach().cpu(), output.bias.detach().cpu()
    dim = weight.shape[1]

    def head(features: Tensor) -> Tensor:
        return nn.functional.linear(features.flatten(1), weight, bias)

    def on_logits(model: Any) -> Callable[[], tuple[Any, Score]]:
        return lambda: (model, lambda images: model.predict_logits(images.logits))

    def on_features(model: Any) -> Callable[[], tuple[Any, Score]]:
        def build() -> tuple[Any, Score]:
            model.fit_features(train.features, train.labels)
            return model, lambda images: model.predict_features(images.features)

        return build

    def on_maps(model: Any, *, fit: bool = False) -> Callable[[], tuple[Any, Score]]:
        def build() -> tuple[Any, Score]:
            if fit:
                model.fit_feature_maps(train.features[:, :, None, None], train.labels)
            return model, lambda images: model.predict_feature_maps(images.features[:, :, None, None])

        return build

    return {
        "MSP": on_logits(peers.MaxSoftmax(None)),
        "MaxLogit": on_logits(peers.MaxLogit(None)),
        "energy": on_logits(peers.EnergyBased(None)),
        "GEN": on_logits(peers.GEN(None)),
        "KNN": on_features(peers.KNN(None, k=min(50, len(train.labels)))),
        "ViM": on_features(peers.ViM(None, d=dim // 2, w=weight, b=bias)),
        "Mahalanobis": on_features(peers.Mahalanobis(None)),
        "RMD": on_features(peers.RMD(None)),
        "SHE": on_features(peers.SHE(None, head)),
        "DICE": on_features(peers.DICE(None, w=weight, b=bias, p=0.9)),
        "ReAct": on_maps(peers.ReAct(None, head), fit=True),
        "ASH-S": on_maps(peers.ASH(None, head, variant="ash-s", percentile=0.9)),
        "SCALE": on_maps(peers.SCALE(None, head, percentile=0.85)),
    }
