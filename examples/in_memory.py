"""A network in memory, its DataLoaders, and nothing else: fitted, asked and calibrated again in a few lines.

    python examples/in_memory.py

The loaders give what the network was trained on; no folders, no names of networks.
"""

from __future__ import annotations

import torch
from own_model import DATA, SmallNet
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from psc_core import PRESETS, PSC, open_dataset

MEAN, STD = (0.1307,), (0.3081,)  # Of the loaders' transform; PSC reads files by them.


def tensors(spec: str, split: str) -> TensorDataset:
    """Inputs and labels as a transform with ToTensor and Normalize gives them."""
    data = open_dataset(f"{spec}:{DATA}", split=split, preprocess=PRESETS["mnist"])
    return TensorDataset(
        torch.cat([data.preprocess.standardise(batch.images) for batch in data.batches(64)]), data.first_labels()
    )


def main() -> None:
    train, val, test = (tensors("mnist", split) for split in ("train", "val", "test"))
    clothes = tensors("fashion-mnist", "test")
    train_loader = DataLoader(train, batch_size=64, shuffle=True)
    val_loader = DataLoader(val, batch_size=64)

    # The network as you have it.
    torch.manual_seed(0)
    net = SmallNet(10)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(12):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()

    # A copy of it is read at the layer that has not collapsed; the network itself stays as it is.
    psc = PSC.fit(net, train_loader, val_loader, mean=MEAN, std=STD)
    print(f"read at {psc.layer}, {len(psc.calibration)} images calibrate")

    digits, _ = next(iter(DataLoader(test, batch_size=200)))
    garments, _ = next(iter(DataLoader(clothes, batch_size=200)))
    prediction = psc(digits)
    print(prediction)
    for name, each in (("digits", prediction), ("clothes", psc(garments))):
        print(f"{name}: {each.is_ood.float().mean():.1%} are called out of distribution")
    print("the most unusual digit:", prediction[prediction.ood_p_value.argmin()].to_dict()[0]["decision"])

    # More images to calibrate on have turned up: the same model with other thresholds.
    psc = psc.calibrate(DataLoader(Subset(test, range(200, 800)), batch_size=64))
    print(f"calibrated on {len(psc.calibration)} images: {psc(digits).is_ood.float().mean():.1%} of the digits")


if __name__ == "__main__":
    main()
