"""A head for each task: a softmax over squared distances to the class means, and a ridge regression."""

NAMES = {"classification": "centroid", "regression": "ridge"}

_CENTROID = {
    "psc_core/tasks/classification/heads/centroid.py": [
        (
            "",
            '''"""Class means: ``softmax(−‖φ − m_c‖² / 2t)``; epistemic: the squared distance to the nearest."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.classification.heads.base import ClassifierHead, HeadOutput


class CentroidHead(ClassifierHead):
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
        """Softmax over distances; the smallest distance; the energy."""
        squared = torch.cdist(self.standardise(z), self.centroids).square()
        logits = -squared / (2 * self.temperature)
        return HeadOutput(logits.softmax(dim=1), squared.amin(dim=1), -logits.logsumexp(dim=1))
''',
        )
    ],
    "psc_core/tasks/classification/heads/__init__.py": [
        (
            '.duq:DuqHead",\n',
            '.duq:DuqHead",\n        "centroid": "psc_core.tasks.classification.heads.centroid:CentroidHead",\n',
        ),
    ],
    "psc_core/tasks/classification/fit/centroid.py": [
        (
            "",
            '''"""Fit :class:`..heads.centroid.CentroidHead`: class means and a temperature."""

from __future__ import annotations

import torch

from psc_core.tasks.classification.fit.data import ClassifierData
from psc_core.tasks.classification.fit.posterior import nll
from psc_core.tasks.classification.heads.centroid import CentroidHead
from psc_core.tasks.fit.standardisation import in_memory

TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-8, 25))


def fit_centroid(data: ClassifierData) -> CentroidHead:
    """Class means, and the temperature with the smallest selection NLL."""
    train = in_memory(data.train)
    centroids = torch.stack([train[data.train_labels == k].mean(0) for k in range(data.num_classes)])
    squared = torch.cdist(data.selection, centroids).square()
    losses = {t: nll(-squared / (2 * t), data.selection_labels).mean().item() for t in TEMPERATURES}
    temperature = min(losses, key=losses.__getitem__)
    return CentroidHead(
        {**data.standardisation._asdict(), "centroids": centroids, "temperature": torch.tensor(temperature)},
        record={"temperature": temperature, "val_nll": losses[temperature]},
    )
''',
        )
    ],
    "psc_core/tasks/classification/fit/head.py": [
        (
            "from psc_core.tasks.classification.fit.data import",
            "from psc_core.tasks.classification.fit.centroid import fit_centroid\n"
            "from psc_core.tasks.classification.fit.data import",
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
    "tests/psc_core/tasks/classification/heads/test_centroid.py": [
        (
            "",
            """from __future__ import annotations

import torch

from tests.psc_core.tasks.classification.heads.support import fit_head, images
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
            """def _centroid(t: dict[str, Array], phi: Array) -> tuple[Array, Array, Array]:
    squared = ((phi[:, None] - t["centroids"]) ** 2).sum(2)
    logits = -squared / (2 * t["temperature"])
    return _softmax(logits), squared.min(1), -_log_sum_exp(logits)


def _log_sum_exp(""",
        ),
    ],
    "tests/psc_core/bundle/test_format.py": [
        (
            "CLASSIFICATION: dict[str, tuple[str, ...]] = {\n",
            """CLASSIFICATION: dict[str, tuple[str, ...]] = {
    "centroid": ("--head", "centroid"),
""",
        )
    ],
    "docs/bundle-format.md": [
        ("| `centroids` | (K, D) | duq |", "| `centroids` | (K, D) | duq, centroid |"),
        ("| `temperature` | () | own |", "| `temperature` | () | own, centroid |"),
        ("    own       f =", "    centroid  f = −‖ φ − centroids_c ‖² / 2t\n    own       f ="),
    ],
}

_RIDGE = {
    "psc_core/tasks/regression/heads/ridge.py": [
        (
            "",
            '''r"""Ridge regression: ``mean = b + wᵀφ``, a constant noise σ, and ``epistemic = σ √(φᵀ(ΦᵀΦ + I)⁻¹φ)``."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.regression.heads.base import RegressionHead, HeadOutput


class RidgeHead(RegressionHead):
    """The head of the module's text; ``root`` (D, D) is a square root of σ² (ΦᵀΦ + I)⁻¹."""

    kind = "ridge"
    layout: ClassVar = {
        "center": ("dim",),
        "inverse_scale": ("dim",),
        "weight": ("dim",),
        "bias": (),
        "root": ("dim", "dim"),
        "noise": (),
    }
    weight: Tensor
    bias: Tensor
    root: Tensor
    noise: Tensor

    def forward(self, z: Float[Tensor, "batch dim"]) -> HeadOutput:
        """Mean, the constant noise, and what the weights leave unknown."""
        phi = self.standardise(z)
        return HeadOutput(phi @ self.weight + self.bias, self.noise.expand(len(z)), (phi @ self.root).norm(dim=1))
''',
        )
    ],
    "psc_core/tasks/regression/heads/__init__.py": [
        (
            '.dve:DeepVecchiaHead",\n',
            '.dve:DeepVecchiaHead",\n        "ridge": "psc_core.tasks.regression.heads.ridge:RidgeHead",\n',
        ),
    ],
    "psc_core/tasks/regression/fit/ridge.py": [
        (
            "",
            '''"""Fit :class:`..heads.ridge.RidgeHead`: normal equations, and the noise of the selection split."""

from __future__ import annotations

import torch

from psc_core.tasks.regression.fit.blr import gaussian_nll
from psc_core.tasks.regression.fit.data import RegressionData
from psc_core.tasks.regression.heads.ridge import RidgeHead


def fit_ridge(data: RegressionData) -> RidgeHead:
    """Weights by the normal equations; the noise is the deviation of what is left of the selection split."""
    phi = data.train[:]
    gram = phi.T @ phi + torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device)
    weight = torch.linalg.solve(gram, phi.T @ data.train_values)
    mean = data.selection @ weight if data.selection_mean is None else data.selection_mean
    noise = (data.selection_values - mean).square().mean().sqrt()
    root = noise * torch.linalg.cholesky(torch.linalg.inv(gram))
    variance = noise.square() + (data.selection @ root).square().sum(1)
    return RidgeHead(
        {
            **data.standardisation._asdict(),
            "weight": data.scale * weight,
            "bias": data.center,
            "root": data.scale * root,
            "noise": data.scale * noise,
        },
        record={"val_nll": gaussian_nll(data.selection_values, mean, variance)},
    )
''',
        )
    ],
    "psc_core/tasks/regression/fit/head.py": [
        (
            "from psc_core.tasks.regression.heads.base import",
            "from psc_core.tasks.regression.fit.ridge import fit_ridge\n"
            "from psc_core.tasks.regression.heads.base import",
        ),
        ('"dve": fit_dve}', '"dve": fit_dve, "ridge": fit_ridge}'),
    ],
    "tests/reference/heads.py": [
        (
            "def standardise(",
            '''def ridge(phi: Tensor, values: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of new images, and the deviation that the weights leave, in units of the noise: by dense inverses."""
    posterior = torch.linalg.inv(phi.T @ phi + torch.eye(phi.shape[1], dtype=phi.dtype))
    means = [values.mean() + row @ posterior @ (phi.T @ (values - values.mean())) for row in new]
    return torch.stack(means), torch.stack([(row @ posterior @ row).sqrt() for row in new])


def standardise(''',
        )
    ],
    "tests/psc_core/tasks/regression/heads/test_ridge.py": [
        (
            "",
            """from __future__ import annotations

import torch

from tests.psc_core.tasks.regression.heads.support import fit_head, images
from tests.reference import heads as naive


def test_outputs_are_the_definition_in_float64() -> None:
    z, y = images(200, 4)
    head = fit_head(z, y, z, y, kind="ridge")
    phi = naive.standardise(z.double())
    mean, deviation = naive.ridge(phi, y, phi)
    got = head(z)
    torch.testing.assert_close(got.mean.double(), mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.epistemic.double(), deviation * float(head.noise), rtol=1e-4, atol=1e-5)
    assert float(got.aleatoric[0]) == float(head.noise)
""",
        )
    ],
    "docs/method.md": [
        ("| `dve` | the deep", "| `ridge` | ridge regression with a constant noise |\n| `dve` | the deep")
    ],
    "tests/second_reader.py": [
        ('"dve": _dve}', '"dve": _dve, "ridge": _ridge}'),
        (
            "def _log_sum_exp(",
            """def _ridge(t: dict[str, Array], phi: Array) -> tuple[Array, Array, Array]:
    aleatoric = np.full(len(phi), float(t["noise"]))
    return phi @ t["weight"] + t["bias"], aleatoric, np.sqrt(((phi @ t["root"]) ** 2).sum(1))


def _log_sum_exp(""",
        ),
    ],
    "tests/psc_core/bundle/test_format.py": [
        (
            "REGRESSION: dict[str, tuple[str, ...]] = {\n",
            """REGRESSION: dict[str, tuple[str, ...]] = {
    "ridge": ("--head", "ridge"),
""",
        )
    ],
    "docs/bundle-format.md": [
        (
            "| tensor of dve |",
            """| tensor of ridge | shape | meaning |
| --- | --- | --- |
| `center`, `inverse_scale` | (D) | as at [Head](#head) |
| `weight`, `bias` | (D), () | mean of the number |
| `root`, `noise` | (D, D), () | R, and the deviation of the noise |

| tensor of dve |""",
        ),
        (
            "    dve   of layer l:",
            "    ridge  mean = φ · weight + bias;   epistemic = ‖ φ · root ‖;   aleatoric = noise\n"
            "    dve   of layer l:",
        ),
    ],
}

EDITS = {"classification": _CENTROID, "regression": _RIDGE}

PROGRAM = """
import json, sys
import pytest

task, kind, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tests = [f"tests/psc_core/tasks/{task}/heads", "tests/psc_core/bundle/test_format.py"]
tests += ["-k", f"({kind} or tables_match) and not second_reader and not files and not documented"]
assert pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *tests]) == 0

from pathlib import Path
import numpy as np
import torch
from psc_core import load_model, open_dataset
from psc_core.cli.fit import main
from tests.second_reader import SecondReader

assert main([*arguments, "--head", kind, "--no-report", "--out", "bundle"]) == 0
model, reader = load_model("bundle", device="cpu", allow_factories=["tests.tiny:network"]), SecondReader(Path("bundle"))
head = model.pipeline.scorer.head
assert head.kind == kind and model.task.name == task
data = open_dataset(arguments[arguments.index("--val") + 1], split="val", preprocess=model.preprocess)
images = next(data.batches(20)).images
with torch.inference_mode():
    features, _ = model.pipeline.scorer.backbone(model.pipeline.scorer.standardise(images))
answer = {"classification": reader.answer, "regression": reader.answer_values}[task]([f.numpy() for f in features])
ours = model.predict(images)
names = {"classification": ("epistemic", "probabilities"), "regression": ("mean", "aleatoric", "epistemic")}[task]
for name in names:
    np.testing.assert_allclose(getattr(answer, name), getattr(ours, name).numpy(), rtol=1e-3, atol=1e-3)
"""
