"""Random damage: to a real bundle with valid digests, and to the seeds of the fuzzed parsers, without atheris."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from psc_core import PSC, load_model
from psc_core.bundle import PARTS
from psc_core.errors import PSCError
from tools import forge
from tools.fuzz import decode, grpc, multipart, onnx, v2

NO_DEADLINE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from([10**5, 10**9, 2**63, -(2**70)]),
    st.floats(allow_nan=False), st.text(max_size=8), st.sampled_from(["gda", "tied", "duq", "0", "2", "bf16", "psc"]),
    st.lists(st.integers(0, 60), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)  # fmt: skip


FIELDS = {
    "classification": ("probabilities", "predictive_entropy", "log_density", "ood_p_value", "epistemic"),
    "regression": ("mean", "aleatoric", "epistemic", "log_density", "ood_p_value", "lower", "upper"),
}
"""What has to be finite, by task."""


@pytest.fixture(scope="module", params=["tiny_bundle", "angle_bundle"])
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One copy of each task's, repaired before every example."""
    whole: Path = request.getfixturevalue(request.param)
    bundle = Path(shutil.copytree(whole, tmp_path_factory.mktemp("fuzz") / "bundle"))
    return bundle, forge.read(bundle)


def places(body: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(body, dict):
        items: list[tuple[Any, Any]] = list(body.items())
    else:
        items = list(enumerate(body)) if isinstance(body, list) else []
        items = items[:2] + items[-1:]
    return [place for key, value in items for place in [(*at, key), *places(value, (*at, key))]]


def rejected_or_finite(bundle: Path) -> None:
    try:
        model = load_model(bundle, device="cpu", allow_factories=forge.ALLOW)
    except PSCError as error:
        assert len(str(error)) < 4000
        return
    size = (4, *model.preprocess.shape)
    images = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    try:
        prediction = model.predict(images)
    except PSCError as error:
        assert len(str(error)) < 4000
        return
    for field in FIELDS[model.task.name]:
        assert getattr(prediction, field).isfinite().all(), field
    if isinstance(model, PSC):
        assert prediction.probabilities.shape == (4, len(model.classes))
        assert all(prediction.prediction_set)
    model.pipeline.explain(images)


@settings(NO_DEADLINE, max_examples=settings().max_examples * 3 // 2)
@given(data=st.data())
def test_edited_manifests(victim: tuple[Path, dict[str, Any]], data: st.DataObject) -> None:
    bundle, whole = victim
    body = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 2), "edits")):
        *steps, last = data.draw(st.sampled_from([place for place in places(body) if place[0] != "version"]), "place")
        parent = body
        for step in steps:
            parent = parent[step]
        action = data.draw(st.sampled_from(["set", "drop", "add"]), "action")
        if action == "set":
            parent[last] = data.draw(values, "value")
        elif action == "drop":
            del parent[last]
        elif isinstance(parent, dict):
            parent[data.draw(st.text(max_size=4), "key")] = data.draw(values, "value")
        else:
            parent.insert(0, data.draw(values, "value"))
    forge.write(bundle, body)
    rejected_or_finite(bundle)


@settings(NO_DEADLINE, max_examples=settings().max_examples * 4 // 5)
@given(
    data=st.data(),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=8),
)
def test_flipped_bits(victim: tuple[Path, dict[str, Any]], data: st.DataObject, flips: list[tuple[float, int]]) -> None:
    bundle, whole = victim
    forge.write(bundle, copy.deepcopy(whole))
    part = data.draw(st.sampled_from([part for part in PARTS if (bundle / f"{part}.safetensors").exists()]), "part")
    blob = bytearray((bundle / f"{part}.safetensors").read_bytes())
    original = bytes(blob)
    for where, bit in flips:
        blob[int(where * len(blob))] ^= 1 << bit
    try:
        forge.replace_part(bundle, part, bytes(blob))
        rejected_or_finite(bundle)
    finally:
        (bundle / f"{part}.safetensors").write_bytes(original)


@settings(NO_DEADLINE, max_examples=settings().max_examples * 3 // 5)
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@example(where=0.0, byte=0xEF)
def test_one_changed_byte_of_the_manifest(victim: tuple[Path, dict[str, Any]], where: float, byte: int) -> None:
    bundle, whole = victim
    text = bytearray(json.dumps(whole).encode())
    text[int(where * len(text))] = byte
    (bundle / "manifest.json").write_bytes(bytes(text))
    rejected_or_finite(bundle)


@pytest.mark.parametrize("target", [decode, grpc, multipart, onnx, v2], ids=lambda target: target.__name__)
def test_damaged_seeds_of_the_fuzzer(target: ModuleType) -> None:
    for seed in target.SEEDS:
        target.check(seed)

    @given(st.sampled_from(target.SEEDS), st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6))
    def damaged(seed: bytes, at: int, put: bytes, dropped: int) -> None:
        target.check(seed[:at] + put + seed[at + dropped :])

    damaged()
