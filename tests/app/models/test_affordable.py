"""A model that no machine could warm up is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from app import models
from app.models import ALIVE, check_affordable, cost_of_an_image
from psc_core.errors import BundleError
from psc_core.model import PSC


@pytest.fixture
def model(shipped_bundle: Path) -> PSC:
    return PSC.load(shipped_bundle, device="cpu")


def test_a_model_that_fits_is_taken(model: PSC) -> None:
    check_affordable(model, max_batch=8, seconds=600.0)


def test_the_largest_feature_map_is_found(model: PSC) -> None:
    alive, operations = cost_of_an_image(model)
    assert alive == ALIVE * 64 * 28 * 28 * 4  # The stem's and the first blocks' outputs.
    stem = 2 * 64 * 9 * 28 * 28
    blocks = 4 * 2 * 64 * 64 * 9 * 28 * 28
    assert stem + blocks < operations < 4 * blocks


def test_models_that_serve_meanwhile_do_not_count(model: PSC) -> None:
    alone, serving, hooks = cost_of_an_image(model), nn.Identity(), list[bool]()

    def serve(*_: object) -> None:
        hooks.append(bool(_has_any_global_hook()))
        thread = Thread(target=serving, args=(torch.zeros(1 << 20),))
        thread.start()
        thread.join()

    model.backbone.register_forward_pre_hook(serve)
    assert cost_of_an_image(model) == alone
    assert hooks == [False]


def test_a_batch_without_room_is_refused(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(BundleError, match=re.escape("a batch of 64 images of 28 × 28 pixels needs about 0.0 GiB")):
        check_affordable(model, max_batch=64, seconds=600.0)
    check_affordable(model, max_batch=1, seconds=600.0)


def test_a_warm_up_without_end_is_refused(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "cost_of_an_image", lambda _: (1, 5_000))
    monkeypatch.setattr(models, "operations_per_second", lambda _: 1_000.0)
    with pytest.raises(BundleError, match=r"take about 640 s, longer than 600 s; .* raise --warmup-seconds"):
        check_affordable(model, max_batch=64, seconds=600.0)
    check_affordable(model, max_batch=60, seconds=600.0)


def test_a_network_without_an_estimate_is_tried(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: PSC) -> None:
        raise NotImplementedError

    monkeypatch.setattr(models, "cost_of_an_image", unknown)
    check_affordable(model, max_batch=64, seconds=600.0)


def test_the_speed_of_the_device_is_measured() -> None:
    assert models.operations_per_second(torch.device("cpu")) > 1e6


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["version 2", "version 1"],
)
def test_a_control_group_bounds_the_free_memory(
    limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.memory.CGROUPS", tmp_path)
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    assert models.free_bytes(torch.device("cpu")) > 1 << 20
    (tmp_path / limit).write_text("5000\n")
    (tmp_path / used).write_text("2000\n")
    assert models.free_bytes(torch.device("cpu")) == 3000
    for unlimited in ("max", str((1 << 63) - 4096)):
        (tmp_path / limit).write_text(f"{unlimited}\n")
        assert models.free_bytes(torch.device("cpu")) > 1 << 20
