"""Version-1 densities answer to the bit as they did, and a version-1 bundle stays one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from psc_core import PSC
from psc_core.density import Density, restore_density
from psc_core.density.fit.density import fit_density
from psc_core.density.version1 import DENSITIES_OF_VERSION_1
from tests.psc_core.density.support import images


def version_1(model: Density) -> tuple[Density, dict[str, Tensor]]:
    """The same fit as version 1 stores it, and its tensors."""
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    if "whiteners" in state:
        state["offsets"] = -torch.einsum("kpq,kq->kp", state["whiteners"], state.pop("centres"))
    single = {name: tensor.float() for name, tensor in state.items()}
    return restore_density(model.config(), single, schema=1), single


@pytest.mark.parametrize("kind", sorted(DENSITIES_OF_VERSION_1))
def test_answers_to_the_bit(kind: str) -> None:
    """The formulas of version 1, in the order and the type that it had."""
    z, labels = images(300, 4, 3)
    model = fit_density(z, labels, num_classes=3, kind=kind)
    old, t = version_1(model)
    assert old.schema == 1 and model.schema == 2
    w = ((functional.normalize(z) if model.unit_length else z) - t["mean"]) @ t["basis"]
    if "offsets" in t:
        stacked = functional.linear(w, t["whiteners"].flatten(0, 1), t["offsets"].flatten())
        distances = torch.linalg.vector_norm(stacked.view(-1, *t["offsets"].shape), dim=2)
    else:
        distances = torch.cdist(w, t["centres"], compute_mode="donot_use_mm_for_euclid_dist")
    joint = torch.addcmul(t["constants"], distances, distances, value=-0.5)
    if kind == "rmd":
        wide, centres = w.double(), t["centres"].double()
        background = t["background_constant"] - 0.5 * (wide @ t["background"].double()).square().sum(dim=1)
        squared = torch.cdist(wide, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
        joint = (t["constants"] - 0.5 * squared - background[:, None]).float()
    assert torch.equal(old(z).class_log_joint, joint)
    assert torch.equal(old(z).log_density, joint.logsumexp(1))
    explained = old.explain(z)
    assert torch.equal(explained.class_distances, distances)
    torch.testing.assert_close(explained.component_deviation.norm(dim=1), distances.amin(1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(old(z).log_density, model(z).log_density, rtol=1e-4, atol=1e-3)


def test_bundle_stays_at_version_1(version_1_bundle: Path, tmp_path: Path) -> None:
    assert json.loads((version_1_bundle / "manifest.json").read_text())["schema_version"] == 1
    psc = PSC.load(version_1_bundle, device="cpu")
    assert psc.pipeline.scorer.density.schema == 1
    assert psc.save(tmp_path / "again").version == psc.version
