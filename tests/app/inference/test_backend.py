"""The backend is chosen by measuring, and a backend that cannot be used is left out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from app.inference import steps as backend
from app.inference.steps import choose_backend, fastest, measure
from psc_core import PSC
from psc_core.errors import NetworkError
from psc_core.settings import BACKENDS


@pytest.fixture(scope="module")
def psc(shipped_bundle: Path) -> PSC:
    return PSC.load(shipped_bundle, device="cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for each test, or one would know what another chose."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_choice_is_kept_for_the_same_bundle_and_settings(
    psc: PSC, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(backend, "pipeline_on", lambda model, name: (made.append(name), model.pipeline)[1])
    monkeypatch.setattr(backend, "fastest", lambda seconds, baseline: "plain")
    for batch, expected in ((1, list(BACKENDS)), (1, ["plain"]), (2, list(BACKENDS))):
        assert choose_backend(psc, "auto", max_batch=batch, threads=1)[0] == "plain"
        assert made == expected
        made.clear()
    for file in (own_cache / "psc").iterdir():  # Nobody's choice: measured again.
        file.write_bytes(file.read_bytes() + b"!")
    assert choose_backend(psc, "auto", max_batch=1, threads=1)[0] == "plain"
    assert made == list(BACKENDS)


def test_choice_of_a_busy_machine_is_made_again(psc: PSC, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "pipeline_on", lambda model, name: model.pipeline)
    disturbed = {"folded": [[1.0, 1.0, 1.0]], "plain": [[1.5, 1.5, 1.5]], "onnx": [[0.5, 9.0, 9.0]]}
    monkeypatch.setattr(backend, "measure", lambda networks, batches: disturbed)
    assert choose_backend(psc, "auto", max_batch=1, threads=1)[0] == "folded"
    assert not (own_cache / "psc").exists()
    disturbed["onnx"] = [[0.5, 0.5, 9.0]]
    assert choose_backend(psc, "auto", max_batch=1, threads=1)[0] == "onnx"
    assert len(list((own_cache / "psc").iterdir())) == 1


def test_choice_that_no_longer_runs_gives_way(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "fastest", lambda seconds, baseline: "onnx")
    monkeypatch.setattr(backend, "pipeline_on", lambda model, name: model.pipeline)
    assert choose_backend(psc, "auto", max_batch=1, threads=1)[0] == "onnx"
    monkeypatch.setattr(backend, "pipeline_on", Mock(side_effect=NetworkError("no memory")))
    assert choose_backend(psc, "auto", max_batch=1, threads=1)[:2] == ("folded", psc.pipeline)


@pytest.mark.parametrize(
    ("plain", "folded", "onnx", "expected"),
    [
        ([[1.0], [10.0]], [[0.9], [9.0]], [[0.5], [10.2]], "onnx"),  # the least product of medians
        ([[1.0] * 2, [10.0] * 2], [[0.9] * 2, [9.0] * 2], [[0.5] * 2, [10.4, 10.5]], "folded"),  # slower in every round
        ([[1.0] * 2, [10.0] * 2], [[0.9] * 2, [9.0] * 2], [[0.5] * 2, [10.2, 10.5]], "onnx"),
        ([[1.0]], [[1.2]], [[1.1]], "plain"),
        ([[1.0], [10.0]], [[0.9], [9.0]], [[0.99], [9.9]], "onnx"),  # it wins unless it is a tenth slower
        ([[1.0], [10.0]], [[0.9], [9.0]], [[1.01], [10.0]], "folded"),
    ],
)
def test_the_fastest(
    plain: list[list[float]], folded: list[list[float]], onnx: list[list[float]], expected: str
) -> None:
    assert fastest({"plain": plain, "folded": folded, "onnx": onnx}, "plain") == expected


def test_measuring_stops_at_long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_ROUNDS", 2)
    networks = dict.fromkeys(("plain", "onnx"), lambda images: images)
    batches = [torch.zeros(size) for size in (1, 8)]
    assert [[*map(len, times)] for times in measure(networks, batches).values()] == [[2, 2]] * 2
    monkeypatch.setattr(backend, "_LONG_SECONDS", 0.0)
    assert [len(times) for times in measure(networks, batches).values()] == [1, 1]


def test_auto_takes_the_fastest(psc: PSC, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def pipeline_on(model: PSC, name: str) -> object:
        if name == "onnx":
            raise NetworkError("no counterpart")
        return model.pipeline if name == "plain" else object()

    monkeypatch.setattr(backend, "pipeline_on", pipeline_on)
    seconds = {"folded": [[0.02], [0.08]], "plain": [[0.01], [0.04]]}
    monkeypatch.setattr(backend, "measure", lambda pipelines, batches: {name: seconds[name] for name in pipelines})
    caplog.set_level(logging.INFO, "psc.backend")
    before = torch.get_num_threads()
    name, pipeline, _ = choose_backend(psc, "auto", max_batch=4, threads=1)
    assert (name, pipeline) == ("plain", psc.pipeline)
    assert torch.get_num_threads() == before
    assert "no counterpart" in [getattr(record, "reason", None) for record in caplog.records]


def test_a_backend_that_was_asked_for_must_work(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psc_core.pipeline.INSTALLED", False)
    with pytest.raises(NetworkError, match=r"pip install 'psc\[onnx\]'"):
        choose_backend(psc, "onnx", max_batch=4, threads=1)


def test_the_only_backend_is_not_measured(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psc.pipeline.scorer.backbone, "precision", "bf16")
    monkeypatch.setattr(backend, "measure", None)
    for wanted in ("auto", "onnx"):
        assert choose_backend(psc, wanted, max_batch=4, threads=1)[:2] == ("folded", psc.pipeline)


def test_a_graph_always_runs_in_onnx_runtime(psc: PSC, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    psc.save(tmp_path / "graph", graph=True)
    graph = PSC.load(tmp_path / "graph", device="cpu")
    wanted: Any
    for wanted in ("auto", "plain", "onnx"):
        caplog.clear()
        assert choose_backend(graph, wanted, max_batch=4, threads=1)[:2] == ("onnx", graph.pipeline), wanted
        skipped = [record for record in caplog.records if record.message == "backend not used"]
        assert len(skipped) == (wanted == "plain"), wanted


@pytest.mark.thorough
def test_onnx_runtime_gives_the_outputs_of_the_shipped_bundle(psc: PSC) -> None:
    name, pipeline, _ = choose_backend(psc, "onnx", max_batch=4, threads=1)
    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    with torch.inference_mode():
        torch.testing.assert_close(pipeline(images), psc.pipeline(images), rtol=1e-4, atol=1e-4)
    assert name == "onnx"
