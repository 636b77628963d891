"""Run anomalib's PaDiM and PatchCore on given features, for :mod:`benchmarks.maps`, with a Python that has anomalib.

    PYTHON benchmarks/anomalib_peer.py given.pt found.pt

Both models are the package's own, including their smoothing (a Gaussian of 4 input pixels); instead of a network they
get a module that returns the features.  PatchCore chooses among as many patches as in :mod:`benchmarks.maps`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from anomalib.models.image.padim.torch_model import PadimModel
from anomalib.models.image.patchcore.torch_model import PatchcoreModel
from torch import Tensor, nn

CHANNELS = 100
BANK, CANDIDATES = 0.01, 10_000
BATCH = 25

Features = Mapping[str, Tensor]


class Given(nn.Module):
    """A module that returns given features by the name of their layer."""

    features: Features

    def forward(self, _: Tensor) -> Features:
        return self.features


def model_of(kind: type[nn.Module], train: Features, **more: object) -> Any:
    model: Any = kind(backbone="resnet18", layers=["layer1", "layer2", "layer3"], pre_trained=False, **more)
    model.layers, model.feature_extractor = list(train), Given()
    return model


def run(model: Any, features: Features, size: tuple[int, int]) -> list[Tensor]:
    """Return the model's output for each batch: maps, but nothing of use while it trains."""
    found = []
    for start in range(0, len(next(iter(features.values()))), BATCH):
        model.feature_extractor.features = {name: each[start : start + BATCH] for name, each in features.items()}
        images = torch.zeros(len(next(iter(model.feature_extractor.features.values()))), 3, *size)
        out = model(images)
        found.append(out if isinstance(out, Tensor) else out.anomaly_map[:, 0])
    return found


@torch.no_grad()
def main(given: str, found: str) -> None:
    data = torch.load(given, weights_only=True)
    train, size = data["train"], tuple(data["size"])
    torch.manual_seed(data["seed"])
    channels = sum(each.shape[1] for each in train.values())
    padim = model_of(PadimModel, train, n_features=CHANNELS).train()
    padim.idx = torch.randperm(channels)[:CHANNELS]
    run(padim, train, size)
    padim.fit()
    patchcore = model_of(PatchcoreModel, train).train()
    run(patchcore, train, size)
    patches = torch.cat(patchcore.embedding_store)
    some = torch.randperm(len(patches))[:CANDIDATES]
    patchcore.embedding_store = [patches[some]]
    patchcore.subsample_embedding(BANK * len(patches) / len(some))
    result = {
        name: {kind: torch.cat(run(model.eval(), features, size)) for kind, features in data["tests"].items()}
        for name, model in (("anomalib PaDiM", padim), ("anomalib PatchCore", patchcore))
    }
    torch.save(result, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
