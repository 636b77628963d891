from __future__ import annotations

from pathlib import Path

import torch

from psc_core.data.spec import open_dataset
from psc_core.data.splits import split_validation
from psc_core.images.preprocess import PRESETS


def test_halves_are_disjoint_and_reproducible(data_root: Path) -> None:
    val = open_dataset(f"dirty-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    choose, calibrate = split_validation(val, seed=3)
    assert sorted(choose.indices.tolist() + calibrate.indices.tolist()) == sorted(val.indices.tolist())
    assert torch.equal(split_validation(val, seed=3)[1].indices, calibrate.indices)
    assert sum(len(group) for group in choose.groups.values()) == len(choose)


def test_groups_of_a_half_hold_its_own_images(data_root: Path) -> None:
    val = open_dataset(f"dirty-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    choose, _ = split_validation(val, seed=3)
    assert choose.groups.keys() == val.groups.keys()
    for name, group in choose.groups.items():
        assert len(group)
        assert set(choose.indices[group].tolist()) <= set(val.indices[val.groups[name]].tolist())


def test_other_seed_gives_other_halves(data_root: Path) -> None:
    val = open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    one, other = (split_validation(val, seed=seed)[0] for seed in (3, 4))
    assert not torch.equal(one.indices, other.indices)
