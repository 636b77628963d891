"""A density: each class has the shape that all classes share, and a size of its own."""

EDITS = {
    "psc_core/density/gaussian.py": [
        (
            "class RelativeDensity(TiedDensity):",
            '''class SphericalDensity(TiedDensity):
    """:class:`TiedDensity` with one size for each class: ``‖w − m_k‖² / s_k²``; ``spreads`` (K,) are s_k."""

    kind = "spherical"
    layout: ClassVar = {**TiedDensity.layout, "spreads": ("classes",)}
    spreads: Tensor

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """``‖w − m_k‖ / s_k``."""
        return super().class_distances(w) / self.spreads

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        """``(w − m_k) / s_k``, k from ``classes``."""
        return super().deviation(w, classes) / self.spreads[classes, None]


class RelativeDensity(TiedDensity):''',
        )
    ],
    "psc_core/density/__init__.py": [
        (
            ':RelativeDensity",\n',
            ':RelativeDensity",\n        "spherical": "psc_core.density.gaussian:SphericalDensity",\n',
        )
    ],
    "psc_core/density/fit/density.py": [
        (
            "FITS: Final",
            '''def fit_spherical(pooled: Pooled, held_out: HeldOut | None) -> FamilyPart:
    """Return class means in w, and the size of each class there."""
    x, root = pooled.x, pooled.inverse.root
    parts = [(linalg.scatter_about(x.take(own), mean), n) for (own, n), mean in zip(pooled.classes, pooled.means)]
    variances = [(root.T @ scatter @ root).trace() / (n - 1) for scatter, n in parts]
    spreads = (torch.stack(variances) / x.shape[1]).sqrt().clamp(min=1e-3)
    constants = pooled.constants - x.shape[1] * spreads.log()
    return FamilyPart({**fit_tied(pooled, held_out).tensors, "spreads": spreads, "constants": constants}, {})


FITS: Final''',
        ),
        (
            "import ClasswiseDensity, RelativeDensity, TiedDensity\n",
            "import ClasswiseDensity, RelativeDensity, SphericalDensity, TiedDensity\n",
        ),
        (
            "    RelativeDensity: fit_relative,\n",
            "    RelativeDensity: fit_relative,\n    SphericalDensity: fit_spherical,\n",
        ),
    ],
    "tests/reference/density.py": [
        (
            "        covariances = [pooled] * classes\n",
            """        covariances = [pooled] * classes
    elif kind == "spherical":
        own = [scatter / (n - 1) for scatter, n in zip(scatters, counts, strict=True)]
        covariances = [(torch.linalg.inv(pooled) @ s).trace() / len(s) * pooled for s in own]
""",
        )
    ],
    "docs/method.md": [
        (
            "| `tied` | z, one covariance for all classes |\n",
            "| `tied` | z, one covariance for all classes |\n| `spherical` | z, one up to a factor |\n",
        )
    ],
    "tests/second_reader.py": [
        (
            '        elif kind in ("tied", "mahalanobis++", "rmd"):\n',
            """        elif kind == "spherical":
            difference = (w[:, None] - t["centres"]) / t["spreads"][:, None]
        elif kind in ("tied", "mahalanobis++", "rmd"):
""",
        )
    ],
    "tests/psc_core/bundle/test_format.py": [
        (
            "CLASSIFICATION: dict[str, tuple[str, ...]] = {\n",
            """CLASSIFICATION: dict[str, tuple[str, ...]] = {
    "spherical": ("--density", "spherical"),
""",
        )
    ],
    "docs/bundle-format.md": [
        ("| `background` | (P, P)", "| `spreads` | (K) | spherical | s_k |\n| `background` | (P, P)"),
        ("    joint_k = ", "    spherical    q_k = ‖ w − centres_k ‖² / spreads_k²\n    joint_k = "),
    ],
}

PROGRAM = """
import json, sys
import pytest

tests = ["tests/psc_core/density", "tests/psc_core/bundle/test_format.py"]
tests += ["-k", "(spherical or tables_match_layouts) and not second_reader"]
assert pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *tests]) == 0

from psc_core import load_model
from psc_core.cli.fit import main
from psc_core.data.open import open_dataset
from psc_core.density.fit.density import Examples, fit_density
from tests.psc_core.density.fit.test_density import assert_close_to_twin
from tests.psc_core.density.support import images

z, labels = images(240, 4, 3)
assert_close_to_twin(fit_density(Examples(z, labels, 3), kind="spherical"), z, labels, z, None)

from pathlib import Path
import numpy as np
import torch
from tests.second_reader import SecondReader

for task, arguments in json.loads(sys.argv[1]).items():
    assert main([*arguments, "--density", "spherical", "--no-report", "--out", task]) == 0
    model = load_model(task, device="cpu", allow_factories=["tests.tiny:network"])
    density = model.pipeline.scorer.density
    assert (type(density).__name__, model.task.name) == ("SphericalDensity", task)
    z = torch.randn(20, density.sizes["dim"])
    theirs = SecondReader(Path(task)).log_density(z.double().numpy(), [])
    np.testing.assert_allclose(theirs, density(z).log_density.numpy(), rtol=1e-4, atol=1e-3)
"""
