"""A network of your own, fitted and asked in Python.

    python examples/own_model.py

Three things are needed: a network that gives logits, images that it was trained on, and some that it was not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from psc_core import PRESETS, PSC, fit_projection, fit_psc, load_network, measure_collapse, open_dataset
from psc_core.collapse.report import to_text

DATA = Path(__file__).parents[1] / "tests" / "data"


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
    train, val, test = (
        open_dataset(f"mnist:{DATA}", split=split, preprocess=PRESETS["mnist"]) for split in ("train", "val", "test")
    )

    # The network is built by its name, so that a bundle can build it again; here it is trained too.
    torch.manual_seed(0)
    net = load_network("own_model:SmallNet", num_classes=len(train.classes))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    net.train()
    for _ in range(12):
        for batch in train.batches(64, order=torch.randperm(len(train))):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(train.preprocess.standardise(batch.images)), batch.labels).backward()
            optimizer.step()
    net.eval()

    # Fit: where has the network not collapsed, what is kept of that layer, and what is fitted to it?
    report = measure_collapse(net, train, val)
    candidate = report.candidate()
    print(to_text(report, candidate))
    projection = fit_projection(net, candidate, train, val)
    psc = fit_psc(net, candidate, projection, train, val, name="digits")

    # Ask: digits, and clothes, which are none.
    clothes = open_dataset(f"fashion-mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
    for name, data in (("digit", test), ("piece of clothing", clothes)):
        batch = next(data.batches(5))
        prediction = psc.predict(batch.images)
        for label, confidence, p_value, decision in zip(
            prediction.labels,
            prediction.confidence.tolist(),
            prediction.ood_p_value.tolist(),
            prediction.decision,
            strict=True,
        ):
            print(f"{name}: {label} with {confidence:.0%}, p-value {p_value:.3f}, {decision}")

    # Save, and load where others wrote the bundle: whoever loads it says which code it may import.
    with tempfile.TemporaryDirectory() as folder:
        psc.save(Path(folder) / "digits")
        again = PSC.load(Path(folder) / "digits", allow_factories=["own_model:SmallNet"])
    same = again.predict(batch.images).decision == prediction.decision
    print(f"loaded again: {'the same decisions' if same else 'other decisions'}")


if __name__ == "__main__":
    main()
