"""A network of your own, fitted and asked in Python.

    python examples/own_model.py

Prints NC1 and NC4 of each layer, five digits and five pieces of clothing with their decisions, and whether the loaded
bundle decides alike. Three things are needed: a network that gives logits, images that it was trained on, and others.
"""

from __future__ import annotations

import torch
from digits import DATA, scratch, train
from torch import nn
from torch.utils.data import TensorDataset

from psc_core import PRESETS, PSC, fit_projection, fit_psc, load_network, measure_collapse, open_dataset
from psc_core.collapse import to_text


class SmallNet(nn.Module):
    """Your network: images in, logits out.  A bundle names this class, so it lives in a module, not in a notebook."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(block(1, 16), block(16, 32), block(32, 64))
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.hidden(self.features(images)))
        return logits


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def main() -> None:
    # Images as the network gets them.  The validation images were not trained on: they select and calibrate.
    train_images, val_images, test_images = (
        open_dataset(f"mnist:{DATA}", split=split, preprocess=PRESETS["mnist"]) for split in ("train", "val", "test")
    )

    # The network is built by its name, so that a bundle can build it again; here it is trained too.
    torch.manual_seed(0)
    net = load_network("own_model:SmallNet", num_classes=len(train_images.classes))
    batch = next(train_images.batches(len(train_images)))
    train(net, TensorDataset(train_images.preprocess.standardise(batch.images), batch.labels))

    # Fit: where has the network not collapsed, what is kept of that layer, and what is fitted to it?
    report = measure_collapse(net, train_images, val_images)
    chosen = report.choose()
    print(to_text(report, chosen))
    projection = fit_projection(net, chosen, train_images, val_images)
    psc = fit_psc(net, chosen, projection, train_images, val_images, name="digits")

    # Ask: digits, and clothes, which are none.
    clothes = open_dataset(f"fashion-mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
    for name, data in (("digit", test_images), ("piece of clothing", clothes)):
        batch = next(data.batches(5))
        prediction = psc.predict(batch.images)
        for row in prediction.to_dict():
            print(f"{name}: {row['label']} with {row['confidence']:.0%}, p={row['ood_p_value']:.3f}, {row['decision']}")

    # Save, and load where others wrote the bundle: whoever loads it says which code it may import.
    psc.save(bundle := scratch() / "bundle")
    again = PSC.load(bundle, allow_factories=["own_model:SmallNet"])
    same = again.predict(batch.images).decision == prediction.decision
    print(f"loaded again: {'the same decisions' if same else 'other decisions'}")


if __name__ == "__main__":
    main()
