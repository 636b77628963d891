"""Metrics: the table is what is exposed, bulk booking equals one observation each, counts are exact."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.observability.metrics import METRICS, markdown_table, observe_many
from tests.app.fakes import POISON, png
from tests.app.support import PNG, running


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.lists(st.floats(-10, 10), min_size=1, max_size=5, unique=True))
def test_bulk_observation_equals_single_observations(values: list[float], bounds: list[float]) -> None:
    texts = []
    for bulk in (True, False):
        registry = CollectorRegistry()
        histogram = Histogram("h", "h", registry=registry, buckets=sorted(bounds))
        if bulk:
            observe_many(histogram, np.asarray(values))
        else:
            for value in values:
                histogram.observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line and "_sum" not in line])
        assert histogram._sum.get() == pytest.approx(sum(values))
    assert texts[0] == texts[1]


def test_the_table_has_a_row_for_each_metric() -> None:
    rows = markdown_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [metric.name for metric in METRICS]
    for metric in METRICS:
        assert metric.help
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert "_seconds" in metric.name or "time" not in metric.help.lower() or metric.kind == "gauge"


@pytest.mark.anyio
async def test_exactly_the_table_is_exposed() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        exposed = {family.name for family in text_string_to_metric_families(text)}
        table = {metric.name.removesuffix("_total") for metric in METRICS}
        assert {name for name in exposed if not name.endswith("_created")} == table


@pytest.mark.anyio
async def test_counts_are_what_the_client_saw() -> None:
    async with running() as app:
        for value in (0, 0, 128, 250):
            await app.client.post("/predict", content=png(value), headers=PNG)
        await app.client.post("/predict?alpha=0.99", content=png(64, first=255), headers=PNG)
        await app.client.post("/predict", content=png(1, first=POISON), headers=PNG)
        await app.client.post("/predict", content=b"x", headers=PNG)
        assert (
            await app.metric('psc_predictions_total{label="dark"}')
            + await app.metric('psc_predictions_total{label="middle"}')
            + await app.metric('psc_predictions_total{label="bright"}')
            == 5
        )
        assert await app.metric("psc_ood_total") == 1
        assert await app.metric('psc_abstained_total{reason="ood"}') == 1
        assert await app.metric("psc_ood_p_value_count") == 5
        assert await app.metric("psc_log_density_nats_count") == 5
        assert await app.metric("psc_decode_seconds_count") >= 6
        assert await app.metric('psc_request_seconds_count{route="/predict",status="200"}') == 5
        assert await app.metric('psc_rejected_total{reason="unsupported-image"}') == 1
        assert await app.metric("psc_queue_depth") == 0
        assert await app.metric("psc_queue_limit_images") == app.service.settings.max_queue_images
        assert await app.metric('psc_alpha{model="m"}') == 0.2
        assert await app.metric("psc_inflight_requests") == 1
        assert await app.metric("psc_ready") == 1
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}') == 1


@pytest.mark.anyio
async def test_drift_is_watched() -> None:
    async with running(drift_window=10) as app:
        for _ in range(40):
            served = app.service.registry.get()
            rows = np.tile(np.array([[0.0, -9.0, 0.01, 0.0, 1.0, 0.0, 0.0]], np.float32), (5, 1))
            served.record(rows)
            await asyncio.sleep(0)
            app.service.metrics.book()
        assert await app.metric('psc_drift_window_ood_rate{model="m"}') == 1
        assert await app.metric('psc_drift_alarms_total{model="m"}') >= 1
        assert await app.metric('psc_drift_window_tail_probability{model="m"}') < 1e-3


def test_the_table_is_printed() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "app.observability.metrics"], capture_output=True, text=True, check=True
    )
    assert output.stdout == markdown_table()
