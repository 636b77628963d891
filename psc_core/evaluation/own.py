"""The network's own output, as it was before PSC, beside PSC."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.baselines import BaselineOutputs, max_softmax_score
from psc_core.images.preprocess import Preprocess
from psc_core.network.backbone import example_input


@dataclass(frozen=True)
class OwnNetwork:
    """A classifier as it was trained, logits out."""

    net: nn.Module
    preprocess: Preprocess

    @classmethod
    def of(cls, net: nn.Module, data: ImageDataset, compute: Compute) -> OwnNetwork | None:
        """The network on the device; None if it does not give one output for each class of ``data``."""
        net.to(compute.device)
        with torch.inference_mode():
            output = net(example_input(data.preprocess).to(compute.device))
        return cls(net, data.preprocess) if output.shape[1:] == (len(data.classes),) else None

    @torch.no_grad()
    def score(self, images: UInt8[Tensor, "batch channels height width"]) -> BaselineOutputs:
        """Its softmax, in float64."""
        logits = self.net(self.preprocess.standardise(images)).double()
        return BaselineOutputs({"max-softmax": max_softmax_score(logits)}, {"base": logits.softmax(1)})
