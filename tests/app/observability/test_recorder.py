"""The recorder: predictions recorded in bulk equal those recorded one by one, and drift is watched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.metrics import MAX_LABELS, OTHER, Metrics, ModelRecorder
from psc_core.answers import CLASSIFICATION_SCORES, ClassificationPolicy
from psc_core.tasks.base import FloatArray, Outputs
from psc_core.tasks.classification import Thresholds
from tests.app.fakes import FakeModel, FakeValueModel
from tests.app.observability.support import monitor_of

POLICY = ClassificationPolicy(alpha=0.2, ambiguity_threshold=0.5, coverage=0.9)
THRESHOLDS = Thresholds(POLICY, POLICY.alpha, 1.0)
CLASSES = ("a", "b")


def recorder(metrics: Metrics, name: str = "m", classes: tuple[str, ...] = CLASSES, window: int = 10) -> ModelRecorder:
    model: Any = FakeModel(classes=classes)
    drift = monitor_of(99, POLICY.alpha, window=window)
    return ModelRecorder(name, model, policy=POLICY, queue_limit=64, metrics=metrics, drift=drift)


def outputs_of(*images: tuple[float, float, float, int]) -> Outputs[FloatArray]:
    """Images by entropy, log density, p-value and class."""
    probabilities = np.eye(2, dtype=np.float32)
    packed = [[entropy, density, 0.0, p_value, 0.0, *probabilities[k]] for entropy, density, p_value, k in images]
    return Outputs(np.array(packed, np.float32), CLASSIFICATION_SCORES, ())


NUMBERS = count()


def record(
    target: ModelRecorder,
    outputs: Outputs[FloatArray],
    *,
    images: Sequence[int] | None = (),
    thresholds: Thresholds = THRESHOLDS,
) -> None:
    """Have images recorded, which are new unless they are numbered; ``None``: not to be monitored."""
    fingerprints = images if images or images is None else list(islice(NUMBERS, len(outputs)))
    target.predicted(outputs, thresholds.decide(outputs), fingerprints)


def exposed(metrics: Metrics) -> dict[str, float]:
    """Series to values."""
    lines = metrics.exposition()[0].decode().splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if line.startswith("psc_") and "_created" not in line)
    return {series: float(value) for series, value in rows}


IMAGES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.4, 0.7]), st.floats(-500, 500, width=32), st.sampled_from([0.01, 0.2, 0.5, 1.0]),
              st.integers(0, 1)),
    min_size=1,
    max_size=8,
)  # fmt: skip


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
    values = exposed(metrics)
    assert values['psc_predictions_total{label="a",model="m"}'] == 1
    assert values['psc_predictions_total{label="b",model="m"}'] == 3
    assert values['psc_ood_total{model="m"}'] == 2
    assert values['psc_abstained_total{model="m",reason="ood"}'] == 2
    assert values['psc_abstained_total{model="m",reason="ambiguous"}'] == 1
    assert values['psc_ood_p_value_bucket{le="0.05",model="m"}'] == 2
    assert values['psc_predictive_entropy_nats_bucket{le="0.6931",model="m"}'] == 2
    assert values['psc_log_density_nats_bucket{le="0.0",model="m"}'] == 3


@pytest.mark.parametrize("alpha", [0.001, 0.9])
def test_ood_images_are_counted_by_the_policy_s_alpha(alpha: float) -> None:
    metrics = Metrics()
    target = recorder(metrics)
    n = len(FakeModel().calibration.ood_scores)
    boundary = [k / (n + 1) for k in range(1, n + 2)]
    asked = Thresholds(POLICY.model_copy(update={"alpha": alpha}), alpha, 1.0)
    record(target, outputs_of(*[(0.0, -3.0, p_value, 0) for p_value in boundary]), thresholds=asked)
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
    target.predicted(outputs, model.calibration.thresholds(model.policy).decide(outputs), [1, 2, 3])
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


def test_batches_and_decodes() -> None:
    metrics = Metrics()
    target = recorder(metrics)
    target.batch(3, 0.02, [0.001, 0.002])
    target.decoded(0.003)
    values = exposed(metrics)
    assert values['psc_batch_size_sum{model="m"}'] == 3
    assert values['psc_inference_seconds_sum{model="m"}'] == pytest.approx(0.02)
    assert values['psc_queue_seconds_count{model="m"}'] == 2
    assert values['psc_decode_seconds_sum{model="m"}'] == pytest.approx(0.003)


def test_drift_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    target = recorder(metrics)
    target.show()
    for _ in range(40):
        record(target, outputs_of(*[(0.0, -9.0, 0.01, 0)] * 5))
        target.flush()
    values = exposed(metrics)
    assert values['psc_drift_window_ood_rate{model="m"}'] == 1
    assert values['psc_drift_alarms_total{model="m"}'] == values['psc_drift_active{model="m"}'] == 1
    assert values['psc_drift_window_tail_probability{model="m"}'] < 1e-3
    assert [vars(line)["model"] for line in caplog.records] == ["m"]


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


def test_many_predictions_are_recorded_without_a_flush() -> None:
    metrics = Metrics()
    target = recorder(metrics)
    outputs = outputs_of((0.0, -9.0, 0.9, 0))
    decisions = THRESHOLDS.decide(outputs)
    for _ in range(5000):
        target.predicted(outputs, decisions, [next(NUMBERS)])
    assert exposed(metrics)['psc_predictions_total{label="a",model="m"}'] >= 4096
