"""Metrics: what is recorded of predictions and their repeats, of processes, descriptors and a GPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from app.metrics import (
    MAX_LABELS,
    OTHER,
    PROCESS_FILES,
    Metrics,
    ModelRecorder,
    RepeatFilter,
    record_gpu,
    shared_registry,
)
from psc_core.answers import CLASSIFICATION_SCORES, ClassificationPolicy, RegressionPolicy
from psc_core.tasks.base import FloatArray, Outputs
from tests.app.fakes import FakeModel, FakeValueModel
from tests.app.observability.test_drift import monitor_of, served_p_values
from tests.conftest import SHIPPED_BUNDLE
from tests.decisions import Decider
from tests.served import GUARD_SECONDS, serve

POLICY = ClassificationPolicy(alpha=0.2, ambiguity_threshold=0.5, coverage=0.9)
DECIDER = Decider(POLICY, 1.0)
CLASSES = ("a", "b")


def recorder(metrics: Metrics, name: str = "m", classes: tuple[str, ...] = CLASSES, window: int = 10) -> ModelRecorder:
    model: Any = FakeModel(classes=classes)
    drift = monitor_of(99, POLICY.alpha, window=window)
    return ModelRecorder(name, model, policy=POLICY, queue_limit=64, metrics=metrics, drift=drift)


def outputs_of(*images: tuple[float, float, float, int]) -> Outputs[FloatArray]:
    probabilities = np.eye(2, dtype=np.float32)
    packed = [[entropy, density, 0.0, p_value, 0.0, *probabilities[k]] for entropy, density, p_value, k in images]
    return Outputs(np.array(packed, np.float32), CLASSIFICATION_SCORES, ())


NUMBERS = count()


def record(
    target: ModelRecorder,
    outputs: Outputs[FloatArray],
    *,
    images: Sequence[int] | None = (),
    decider: Decider = DECIDER,
) -> None:
    """Have images recorded, which are new unless they are numbered; ``None``: not to be monitored."""
    fingerprints = images if images or images is None else list(islice(NUMBERS, len(outputs)))
    target.predicted(outputs, decider.decide(outputs), fingerprints)


def exposed(metrics: Metrics) -> dict[str, float]:
    lines = metrics.exposition()[0].decode().splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if line.startswith("psc_") and "_created" not in line)
    return {series: float(value) for series, value in rows}


IMAGES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.4, 0.7]), st.floats(-500, 500, width=32), st.sampled_from([0.01, 0.2, 0.5, 1.0]),
              st.integers(0, 1)),
    min_size=1,
    max_size=8,
)  # fmt: skip


def test_gauges_of_processes_that_have_ended_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_FILES, str(tmp_path))
    code = """
import os
from app.metrics import Metrics
Metrics().psc_drift_active.labels(model="m").set(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    # Of a process that has ended, and one whose number belongs to another user's process now.
    for ended in [*tmp_path.glob("gauge_live*_*.db")]:
        shutil.copy(ended, tmp_path / f"{ended.name.rpartition('_')[0]}_1.db")
    monkeypatch.setattr(os, "kill", refuse)
    assert list(tmp_path.glob("gauge_live*_1.db"))
    assert b"psc_drift_active{" not in generate_latest(shared_registry())


def refuse(pid: int, _signal: int) -> None:
    raise PermissionError if pid == 1 else ProcessLookupError


@settings(deadline=None)
@given(IMAGES)
def test_bulk_recording_equals_single_recording(images: list[tuple[float, float, float, int]]) -> None:
    at_once, one_by_one = Metrics(), Metrics()
    together, single = recorder(at_once), recorder(one_by_one)
    together.show()
    single.show()
    record(together, outputs_of(*images))
    together.flush()
    for image in images:
        record(single, outputs_of(image))
        single.flush()
    assert exposed(at_once) == pytest.approx(exposed(one_by_one), abs=1e-9)


def test_counts() -> None:
    metrics = Metrics()
    target = recorder(metrics)
    target.show()
    record(target, outputs_of((0.0, -3.0, 0.01, 0), (0.7, -2.0, 0.9, 1), (0.7, -2.0, 0.01, 1), (0.0, 1.0, 0.9, 1)))
    assert exposed(metrics)['psc_ood_total{model="m"}'] == 0
    target.flush()
    target.flush()
    assert (
        exposed(metrics).items()
        >= {
            'psc_predictions_total{label="a",model="m"}': 1,
            'psc_predictions_total{label="b",model="m"}': 3,
            'psc_ood_total{model="m"}': 2,
            'psc_abstained_total{model="m",reason="ood"}': 2,
            'psc_abstained_total{model="m",reason="ambiguous"}': 1,
            'psc_ood_p_value_bucket{le="0.05",model="m"}': 2,
            'psc_predictive_entropy_nats_bucket{le="0.6931",model="m"}': 2,
            'psc_log_density_nats_bucket{le="0.0",model="m"}': 3,
        }.items()
    )


def test_the_last_hour_forgets_what_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    target, clock = recorder(Metrics()), [3e5]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    unusual, clear = (0.0, -3.0, 0.01, 0), (0.0, 1.0, 0.9, 1)
    record(target, outputs_of(unusual, clear))
    assert target.last_hour()["abstain_ood"] == target.last_hour()["accept"] == [0] * 11 + [1]
    for minutes in (40, 10):
        clock[0] += 60 * minutes
        record(target, outputs_of(clear))
        record(target, outputs_of(clear), images=None)  # It is not monitored.
        assert sum(target.last_hour()["abstain_ood"]) == 1
    assert target.last_hour()["accept"] == [0, 1, *[0] * 7, 1, 0, 1]
    clock[0] += 600
    assert sum(map(sum, target.last_hour().values())) == 2


@pytest.mark.parametrize("alpha", [0.001, 0.9])
def test_ood_images_are_counted_by_the_policy_s_alpha(alpha: float) -> None:
    metrics = Metrics()
    target = recorder(metrics)
    n = len(FakeModel().calibration.ood_scores)
    boundary = [k / (n + 1) for k in range(1, n + 2)]
    asked = Decider(POLICY.model_copy(update={"alpha": alpha}), 1.0)
    record(target, outputs_of(*[(0.0, -3.0, p_value, 0) for p_value in boundary]), decider=asked)
    target.flush()
    assert exposed(metrics)['psc_ood_total{model="m"}'] == math.floor(POLICY.alpha * (n + 1) + 1e-9)


def test_a_regression_is_counted_by_its_target() -> None:
    metrics, model = Metrics(), FakeValueModel()
    of_values: Any = model
    drift = monitor_of(99, POLICY.alpha, window=10)
    target = ModelRecorder("m", of_values, policy=of_values.policy, queue_limit=64, metrics=metrics, drift=drift)
    target.show()
    packed = model.pipeline(torch.tensor([0, 64, 255], dtype=torch.uint8)[:, None, None, None].expand(3, 1, 8, 8))
    outputs = model.outputs(packed.numpy())
    target.predicted(outputs, model.calibration.decide(outputs, model.policy), [1, 2, 3])
    target.flush()
    values = exposed(metrics)
    assert values['psc_predictions_total{label="brightness",model="m"}'] == 3
    assert values['psc_abstained_total{model="m",reason="uncertain"}'] == 1
    assert values['psc_ood_p_value_bucket{le="1.0",model="m"}'] == 3
    assert not any("ambiguous" in series or "entropy" in series for series in values)


def test_counters_start_at_zero() -> None:
    metrics = Metrics()
    classes = tuple(str(k) for k in range(MAX_LABELS + 2))
    recorder(metrics, classes=classes).show()
    values = exposed(metrics)
    assert sum(series.startswith("psc_predictions_total") for series in values) == MAX_LABELS + 1
    assert f'psc_predictions_total{{label="{OTHER}",model="m"}}' in values
    zero = (
        "psc_ood_total", "psc_abstained_total", "psc_unmonitored_images_total", "psc_predictions_total",
        "psc_drift_alarms_total", "psc_drift_active",
    )  # fmt: skip
    assert all(value == 0 for series, value in values.items() if series.startswith(zero))
    assert values['psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}'] == 1
    assert values['psc_alpha{model="m"}'] == 0.2
    assert values['psc_queue_limit_images{model="m"}'] == 64


def test_drift_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    metrics, untouched = Metrics(), Metrics()
    target = recorder(metrics)
    target.show()
    recorder(untouched).show()
    for _ in range(40):
        record(target, outputs_of(*[(0.0, -9.0, 0.01, 0)] * 5))
        target.flush()
    values = exposed(metrics)
    assert values['psc_drift_window_ood_rate{model="m"}'] == 1
    assert values['psc_drift_alarms_total{model="m"}'] == values['psc_drift_active{model="m"}'] == 1
    assert values['psc_drift_window_tail_probability{model="m"}'] < 1e-3
    assert [vars(line)["model"] for line in caplog.records] == ["m"]
    target.hide()  # Or the alarm of a model that is unloaded would never end.
    drift = {series: value for series, value in exposed(metrics).items() if "psc_drift" in series}
    assert drift == {series: value for series, value in exposed(untouched).items() if series in drift} | {
        'psc_drift_alarms_total{model="m"}': 1
    }


def test_what_is_not_to_be_monitored_is_only_counted() -> None:
    metrics = Metrics()
    target = recorder(metrics)
    target.show()
    before = exposed(metrics)
    strange = outputs_of(*[(0.7, -9.0, 0.01, 0)] * 5)
    for _ in range(9):
        record(target, strange, images=None)
    target.flush()
    changed = {series: value for series, value in exposed(metrics).items() if value != before[series]}
    assert changed == {
        'psc_predictions_total{label="a",model="m"}': 45,
        'psc_unmonitored_images_total{model="m",reason="asked"}': 45,
    }
    record(target, strange, images=[1, 2, 3, 4, 5])
    target.flush()
    assert exposed(metrics)['psc_ood_total{model="m"}'] == 5  # Nobody hides an image by sending it unmonitored.


def test_repeats_are_only_counted() -> None:
    metrics = Metrics()
    target = recorder(metrics)
    target.show()
    for _ in range(9):
        record(target, outputs_of((0.0, -9.0, 0.01, 0), (0.7, -9.0, 0.9, 1)), images=[1, 2])
        target.flush()
    values = exposed(metrics)
    assert values['psc_predictions_total{label="a",model="m"}'] == 9
    assert values['psc_unmonitored_images_total{model="m",reason="repeated"}'] == 16
    assert values['psc_ood_p_value_count{model="m"}'] == 2
    assert values['psc_ood_total{model="m"}'] == 1
    assert values['psc_abstained_total{model="m",reason="ambiguous"}'] == 1
    assert values['psc_drift_window_ood_rate{model="m"}'] == 0.5
    assert values['psc_drift_alarms_total{model="m"}'] == 0


def test_hidden_model_shows_no_drift_but_counts() -> None:
    metrics = Metrics()
    old, new = recorder(metrics), recorder(metrics)
    old.show()
    old.hide()
    new.show()
    record(old, outputs_of(*[(0.0, -9.0, 0.01, 0)] * 5))
    old.flush()
    values = exposed(metrics)
    assert values['psc_ood_total{model="m"}'] == 5
    assert values['psc_drift_window_ood_rate{model="m"}'] == 0


def test_the_risk_of_a_model_goes_with_it() -> None:
    metrics = Metrics()
    model: Any = FakeModel(classes=CLASSES)
    policies = POLICY.model_copy(update={"risk": 0.01}), RegressionPolicy(alpha=0.05, max_width=1.0, coverage=0.9)
    for policy, has_risk in zip(policies, (True, False), strict=True):
        drift = monitor_of(99, POLICY.alpha, window=10)
        served = ModelRecorder("m", model, policy=policy, queue_limit=64, metrics=metrics, drift=drift)
        served.show()
        assert ('psc_risk{model="m"}' in exposed(metrics)) == has_risk
        served.hide()
        assert 'psc_risk{model="m"}' not in exposed(metrics)


N = 2000
DISTINCT = np.arange(N, dtype=np.float32)


def p_values_of(calibration: npt.NDArray[np.floating], scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """p-values as the service gives them: a high score is far away."""
    return np.array(served_p_values(-calibration, -scores), np.float32)


def counted(repeats: RepeatFilter, fingerprints: list[int], p_value: float = 0.5) -> list[bool]:
    return repeats.counts(np.full(len(fingerprints), p_value, np.float32), fingerprints).tolist()


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(1, 10))
def test_an_image_counts_again_when_as_many_others_came_since(images: list[int], remembered: int) -> None:
    expected, order = [], list[int]()
    for image in images:
        expected.append(image not in order[-remembered:])
        order = [other for other in order if other != image] + [image]
    assert counted(RepeatFilter(DISTINCT, remembered=remembered), images) == expected


def test_repeats_count_where_calibration_images_are_equal() -> None:
    """Blank pages, say: seven in ten of the calibration images."""
    calibration = np.concatenate([np.arange(3.0), np.full(7, 5.0), [8.0, 9.0]])
    repeats = RepeatFilter(calibration)
    near = ((5.0, True), (np.nextafter(5.0, 0), True), (np.nextafter(5.0, 9), True))
    for score, counts in (*near, (9.0, False), (1.5, False)):
        p_value = float(p_values_of(calibration, np.array([score]))[0])
        assert counted(repeats, [hash(score)] * 2, p_value) == [True, counts], score


def test_images_equal_to_no_other_are_all_left_in() -> None:
    """What the bound on false alarms needs: a stream without repeats passes as it is."""
    assert all(counted(RepeatFilter(DISTINCT), list(range(30_000))))


def test_data_with_many_identical_images_raise_no_alarm() -> None:
    """Four in ten of all images are one blank page, whose score is typical."""
    alarms = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)

        def scores(count: int, generator: np.random.Generator = generator) -> npt.NDArray[np.float64]:
            return np.where(generator.random(count) < 0.4, -1.0, generator.normal(size=count))

        calibration, stream = scores(1000), scores(5000)
        p_values = p_values_of(calibration, stream)
        monitor, repeats = monitor_of(1000, 0.05), RepeatFilter(calibration)
        alarms += monitor.update(p_values[repeats.counts(p_values, stream.view(np.int64).tolist())])
    assert alarms == 0


def test_nobody_hides_an_image_by_sending_it_first() -> None:
    """Strange images that a client sent before others do are found as if these had been the first."""
    monitor, repeats = monitor_of(N, 0.05), RepeatFilter(DISTINCT)
    strange = p_values_of(DISTINCT, np.full(10, 1e9))
    images = list(range(10))
    alarms = sum(monitor.update(strange[repeats.counts(strange, images)]) for _ in range(2))
    assert alarms == 1


def test_a_stream_that_loops_over_more_images_than_are_remembered_raises_no_alarm() -> None:
    """A load test with a folder of ordinary images."""
    alarms = 0
    for seed in range(10):
        generator = np.random.default_rng(seed)
        calibration, folder = generator.normal(size=N), generator.normal(size=300)
        monitor = monitor_of(N, 0.05, false_alarm_probability=1e-4)
        repeats = RepeatFilter(calibration, remembered=200)
        p_values = p_values_of(calibration, folder)
        for _ in range(30):
            alarms += monitor.update(p_values[repeats.counts(p_values, folder.view(np.int64).tolist())])
    assert alarms == 0


LIMIT = 64


@pytest.mark.parametrize("workers", [0, 1])
def test_connections_without_end_leave_one_line(workers: int) -> None:
    words = (f"--bundle=m={SHIPPED_BUNDLE}", "--max-batch-size=8", f"--workers={workers}")
    program = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$0" -m tests.app.serve_fake "$@"', sys.executable)
    with serve(*words, program=program) as server, ExitStack() as clients:
        assert not server.count_in_log("file descriptors are in use")
        for _ in range(2 * LIMIT):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port), GUARD_SECONDS))
        server.wait_for_log("file descriptors are in use")
        clients.close()
        server.wait_ready()
        assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log]
    (line,) = [line for line in lines if "file descriptors" in line["message"]]
    assert not [line for line in lines if "sweep failed" in line["message"]]
    assert line["level"] == "error"
    assert f"of {LIMIT} file descriptors" in line["message"]


@pytest.mark.parametrize("error", [ModuleNotFoundError(), RuntimeError(), type("NVMLError", (Exception,), {})()])
def test_without_nvml_there_is_no_utilisation(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3, 10))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "utilization", Mock(side_effect=error))
    record_gpu(metrics := Metrics(), torch.device("cuda"))
    for kind, size in {"used": 7, "total": 10, "allocated": 5}.items():
        assert metrics.registry.get_sample_value("psc_gpu_memory_bytes", {"device": "cuda", "kind": kind}) == size
    assert metrics.registry.get_sample_value("psc_gpu_utilisation_ratio", {"device": "cuda"}) is None
