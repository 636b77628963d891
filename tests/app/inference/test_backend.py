"""The backend is chosen by measuring, and a backend that cannot be used is left out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from app.inference import steps as backend
from app.inference.steps import choose_backend, fastest, measure
from app.settings import Settings
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


def test_choice_is_kept_for_the_same_bundle_settings_and_machine(
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

    def fail(model: PSC, name: str) -> None:
        raise NetworkError("no memory")

    monkeypatch.setattr(backend, "pipeline_on", fail)
    assert choose_backend(psc, "auto", max_batch=1, threads=1) == ("folded", psc.pipeline)


def test_settings_name_every_backend() -> None:
    assert get_args(Settings.model_fields["backend"].annotation) == ("auto", *BACKENDS)


def test_fastest_has_the_least_product_of_medians() -> None:
    seconds = {"plain": [[1.0], [10.0]], "folded": [[0.9], [9.0]], "onnx": [[0.5], [10.2]]}
    assert fastest(seconds, "plain") == "onnx"


def test_slower_in_every_round_at_one_size_is_out() -> None:
    seconds = {
        "plain": [[1.0, 1.0], [10.0, 10.0]],
        "folded": [[0.9, 0.9], [9.0, 9.0]],
        "onnx": [[0.5, 0.5], [10.4, 10.5]],
    }
    assert fastest(seconds, "plain") == "folded"
    seconds["onnx"][1][0] = 10.2
    assert fastest(seconds, "plain") == "onnx"
    assert fastest({"plain": [[1.0]], "onnx": [[1.1]]}, "plain") == "plain"


def test_onnx_runtime_wins_unless_it_is_a_tenth_slower() -> None:
    seconds = {"plain": [[1.0], [10.0]], "folded": [[0.9], [9.0]], "onnx": [[0.99], [9.9]]}
    assert fastest(seconds, "plain") == "onnx"
    seconds["onnx"] = [[1.01], [10.0]]
    assert fastest(seconds, "plain") == "folded"


def test_measures_in_turn_and_stops_at_long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(backend, "_ROUNDS", 2)
    networks = {
        name: lambda images, name=name: (calls.append((name, len(images))), images)[1] for name in ("plain", "onnx")
    }
    batches = [torch.zeros(size) for size in (1, 8)]
    seconds = measure(networks, batches)
    assert calls == [(name, size) for size in (1, 8) for _ in range(3) for name in ("plain", "onnx")]
    assert {name: [len(rounds) for rounds in times] for name, times in seconds.items()} == {
        "plain": [2, 2],
        "onnx": [2, 2],
    }
    monkeypatch.setattr(backend, "_LONG_SECONDS", 0.0)
    assert [len(times) for times in measure(networks, batches).values()] == [1, 1]


def test_auto_takes_the_fastest_that_works(
    psc: PSC, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pipeline_on(model: PSC, name: str) -> object:
        if name == "onnx":
            raise NetworkError("no counterpart")
        return model.pipeline if name == "plain" else object()

    monkeypatch.setattr(backend, "pipeline_on", pipeline_on)
    seconds = {"folded": [[0.02], [0.08]], "plain": [[0.01], [0.04]]}
    monkeypatch.setattr(backend, "measure", lambda pipelines, batches: {name: seconds[name] for name in pipelines})
    caplog.set_level(logging.INFO, "psc.backend")
    before = torch.get_num_threads()
    name, pipeline = choose_backend(psc, "auto", max_batch=4, threads=1)
    assert (name, pipeline) == ("plain", psc.pipeline)
    assert torch.get_num_threads() == before
    skipped, chosen = caplog.records
    assert (skipped.message, skipped.reason) == ("backend not used", "no counterpart")  # type: ignore[attr-defined]
    assert {name: len(times) for name, times in chosen.milliseconds.items()} == {"folded": 2, "plain": 2}  # type: ignore[attr-defined]


def test_a_backend_that_was_asked_for_must_work(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psc_core.pipeline.INSTALLED", False)
    with pytest.raises(NetworkError, match=r"pip install 'psc\[onnx\]'"):
        choose_backend(psc, "onnx", max_batch=4, threads=1)


def test_the_only_backend_is_not_measured(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psc.pipeline.scorer.backbone, "precision", "bf16")
    monkeypatch.setattr(backend, "measure", None)
    for wanted in ("auto", "onnx"):
        assert choose_backend(psc, wanted, max_batch=4, threads=1) == ("folded", psc.pipeline)


@pytest.mark.parametrize("wanted", ["auto", "folded", "plain", "onnx"])
def test_a_graph_runs_in_onnx_runtime_whatever_is_asked_for(
    psc: PSC, wanted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    psc.save(tmp_path / "graph", graph=True)
    graph = PSC.load(tmp_path / "graph", device="cpu")
    assert choose_backend(graph, wanted, max_batch=4, threads=1) == ("onnx", graph.pipeline)
    reasons = [record.reason for record in caplog.records if record.message == "backend not used"]  # type: ignore[attr-defined]
    assert len(reasons) == (wanted in ("folded", "plain"))
    assert all("runs only in ONNX Runtime" in reason for reason in reasons)


def test_onnx_runtime_gives_the_outputs_of_the_shipped_bundle(psc: PSC) -> None:
    name, pipeline = choose_backend(psc, "onnx", max_batch=4, threads=1)
    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    with torch.inference_mode():
        torch.testing.assert_close(pipeline(images), psc.pipeline(images), rtol=1e-4, atol=1e-4)
    assert name == "onnx"
