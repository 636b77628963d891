"""A head: a softmax over squared distances to the class means."""

EDITS = {
    "psc_core/heads/centroid.py": [
        (
            "",
            '''"""Class means: ``softmax(−‖φ − m_c‖² / 2t)``; epistemic: the squared distance to the nearest."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.heads.base import Head, HeadOutput


class CentroidHead(Head):
    """The head of the module's text."""

    kind = "centroid"
    epistemic_unit = "squared distance to the nearest class mean"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "centroids": ("classes", "dim"),
        "temperature": (),
    }
    centroids: Tensor
    temperature: Tensor

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Softmax over distances; the smallest distance."""
        squared = torch.cdist(self.standardise(z), self.centroids).square()
        return HeadOutput((-squared / (2 * self.temperature)).softmax(dim=1), squared.amin(dim=1))
''',
        )
    ],
    "psc_core/heads/__init__.py": [
        (
            "from psc_core.heads.duq import DuqHead\n",
            "from psc_core.heads.centroid import CentroidHead\nfrom psc_core.heads.duq import DuqHead\n",
        ),
        ("(LaplaceHead, SngpHead, DuqHead)", "(LaplaceHead, SngpHead, DuqHead, CentroidHead)"),
    ],
    "psc_core/heads/fit/centroid.py": [
        (
            "",
            '''"""Fit :class:`psc_core.heads.centroid.CentroidHead`: class means and a temperature."""

from __future__ import annotations

import torch

from psc_core.heads.centroid import CentroidHead
from psc_core.heads.fit.data import HeadData, in_memory
from psc_core.heads.fit.posterior import nll

TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-8, 25))


def fit_centroid(data: HeadData) -> CentroidHead:
    """Class means, and the temperature with the smallest validation NLL."""
    train = in_memory(data.train)
    centroids = torch.stack([train[data.train_labels == k].mean(0) for k in range(data.num_classes)])
    squared = torch.cdist(data.val, centroids).square()
    losses = {t: nll(-squared / (2 * t), data.val_labels).mean().item() for t in TEMPERATURES}
    temperature = min(losses, key=losses.__getitem__)
    return CentroidHead(
        {**data.standardisation._asdict(), "centroids": centroids, "temperature": torch.tensor(temperature)},
        record={"temperature": temperature, "val_nll": losses[temperature]},
    )
''',
        )
    ],
    "psc_core/heads/fit/head.py": [
        (
            "from psc_core.heads.fit.data import",
            "from psc_core.heads.fit.centroid import fit_centroid\nfrom psc_core.heads.fit.data import",
        ),
        ('    "duq": fit_duq,\n', '    "duq": fit_duq,\n    "centroid": fit_centroid,\n'),
    ],
    "tests/reference/heads.py": [
        (
            "def standardise(",
            '''def centroid_probabilities(phi: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Softmax over the squared distances of each image to the class means."""
    means = [phi[labels == k].mean(0) for k in range(int(labels.max()) + 1)]
    logits = [[-((one - mean) ** 2).sum().item() / (2 * temperature) for mean in means] for one in phi]
    return torch.tensor(logits, dtype=torch.float64).softmax(1)


def standardise(''',
        )
    ],
    "tests/psc_core/heads/test_centroid.py": [
        (
            "",
            """from __future__ import annotations

import torch

from psc_core.heads.fit.head import fit_head
from tests.psc_core.heads.support import images
from tests.reference import heads as naive


def test_probabilities_are_the_definition_in_float64() -> None:
    z, labels = images(200, 4, 3)
    head = fit_head(z, labels, z, labels, num_classes=3, kind="centroid")
    expected = naive.centroid_probabilities(naive.standardise(z.double()), labels, head.record["temperature"])
    torch.testing.assert_close(head(z).probabilities.double(), expected, rtol=1e-4, atol=1e-5)
""",
        )
    ],
    "docs/method.md": [("| `duq` | RBF", "| `centroid` | a softmax over distances to class means |\n| `duq` | RBF")],
    "tests/second_reader.py": [
        ('"duq": _duq}', '"duq": _duq, "centroid": _centroid}'),
        (
            "def _log_sum_exp(",
            """def _centroid(t: dict[str, Array], phi: Array) -> tuple[Array, Array]:
    squared = ((phi[:, None] - t["centroids"]) ** 2).sum(2)
    return _softmax(-squared / (2 * t["temperature"])), squared.min(1)


def _log_sum_exp(""",
        ),
    ],
    "tests/psc_core/bundle/test_format.py": [
        (
            "JOBS: dict[str, tuple[str, ...]] = {\n",
            """JOBS: dict[str, tuple[str, ...]] = {
    "centroid": ("--head", "centroid"),
""",
        )
    ],
    "docs/bundle-format.md": [
        ("| `centroids` | (K, D) | duq |", "| `centroids` | (K, D) | duq, centroid |"),
        ("| `embedding` | (D, D)", "| `temperature` | () | centroid | t |\n| `embedding` | (D, D)"),
        ("    null      prob", "    centroid  probabilities = softmax(−‖ φ − centroids_c ‖² / 2t)\n    null      prob"),
    ],
}

PROGRAM = """
import json, sys
import pytest

tests = ["tests/psc_core/heads", "tests/psc_core/bundle/test_format.py"]
tests += ["-k", "(centroid or tables_match_layouts) and not second_reader"]
assert pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *tests]) == 0

from psc_core import PSC
from psc_core.cli.fit import main

assert main([*json.loads(sys.argv[1]), "--head", "centroid", "--out", "bundle"]) == 0
psc = PSC.load("bundle", device="cpu", allow_factories=["tests.tiny:network"])
assert type(psc.pipeline.scorer.head).__name__ == "CentroidHead"
from pathlib import Path
import numpy as np
import torch
from tests.second_reader import SecondReader

head = psc.pipeline.scorer.head
z = torch.randn(20, head.sizes["dim"])
for got, expected in zip(SecondReader(Path("bundle")).classify(z.double().numpy(), None), head(z), strict=True):
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-3, atol=1e-4)
"""
