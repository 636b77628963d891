"""A network that predicts a number: an interval for each image, and a warning where the image is unlike any seen.

    python examples/regression.py

Prints the first predictions in degrees, how many intervals contain the true angle, and what is said of clothes.
"""

from __future__ import annotations

import torch
from digits import DATA, train
from own_model import SmallNet
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from psc_core import PRESETS, PSCRegressor, open_dataset

MNIST = PRESETS["mnist"]


def tensors(split: str) -> TensorDataset:
    """Digits as the network gets them, and the angle by which each is turned, degrees."""
    data = open_dataset(f"rotated-mnist:{DATA}", split=split, preprocess=MNIST)
    inputs = torch.cat([MNIST.standardise(batch.images) for batch in data.batches(64)])
    return TensorDataset(inputs, data.values.float())


def loss(output: Tensor, angles: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[:, 0] / 60, angles / 60)


train_pairs, val_pairs, (inputs, angles) = tensors("train"), tensors("val"), tensors("test").tensors
torch.manual_seed(0)
net = train(SmallNet(1), train_pairs, epochs=12, loss=loss)  # Any module of one output, in the unit of the numbers.

model = PSCRegressor.fit(net, train_pairs, val_pairs, target="angle", unit="degrees", mean=MNIST.mean, std=MNIST.std)

prediction = model(inputs)
print(prediction[:3])
contained = (prediction.lower <= angles) & (angles <= prediction.upper)
print(f"{contained.float().mean():.0%} of the intervals contain the angle, nominal {model.policy.coverage:.0%}")

clothes = open_dataset(f"fashion-mnist:{DATA}", split="test", preprocess=MNIST)
rejected = model.predict(next(clothes.batches(100)).images).is_ood
print(f"{rejected.float().mean():.0%} of clothes are called out of distribution")
