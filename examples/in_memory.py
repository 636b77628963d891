"""A network in memory, its DataLoaders, and nothing else: fitted, asked and calibrated again in a few lines.

    python examples/in_memory.py

Prints a table of predictions, how many digits and how many clothes are called out of distribution, and the same for
digits after calibrating on more images. The loaders give what the network was trained on; there are no folders.
"""

from __future__ import annotations

import torch
from digits import DATA, train
from own_model import SmallNet
from torch.utils.data import DataLoader, Subset, TensorDataset

from psc_core import PRESETS, PSC, open_dataset

MEAN, STD = (0.1307,), (0.3081,)  # Of the loaders' transform; PSC reads files by them.


def tensors(spec: str, split: str) -> TensorDataset:
    """Inputs and labels as a transform with ToTensor and Normalize gives them."""
    data = open_dataset(f"{spec}:{DATA}", split=split, preprocess=PRESETS["mnist"])
    inputs = [data.preprocess.standardise(batch.images) for batch in data.batches(64)]
    return TensorDataset(torch.cat(inputs), data.first_labels())


train_data, val_data, test_data = (tensors("mnist", split) for split in ("train", "val", "test"))
torch.manual_seed(0)
net = train(SmallNet(10), train_data)  # The network as you have it.
train_loader = DataLoader(train_data, batch_size=64, shuffle=True)
val_loader = DataLoader(val_data, batch_size=64)

# A copy of it is read at the layer that has not collapsed; the original network stays as it is.
psc = PSC.fit(net, train_loader, val_loader, mean=MEAN, std=STD)
print(f"reads {psc.layer}, {len(psc.calibration)} images calibrate")

digits, _ = next(iter(DataLoader(test_data, batch_size=200)))
clothes, _ = next(iter(DataLoader(tensors("fashion-mnist", "test"), batch_size=200)))
prediction = psc(digits)
print(prediction)
for name, each in (("digits", prediction), ("clothes", psc(clothes))):
    print(f"{name}: {each.is_ood.float().mean():.1%} are called out of distribution")
print("the most unusual digit:", prediction[prediction.ood_p_value.argmin()].to_dict()[0]["decision"])

# More images to calibrate on have turned up: the same model with other thresholds.
psc = psc.calibrate(DataLoader(Subset(test_data, range(200, 800)), batch_size=64))
print(f"calibrated on {len(psc.calibration)} images: {psc(digits).is_ood.float().mean():.1%} of the digits")
