"""Health, metrics (the table is what is exposed, and counts are exact), and who may reload."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import METRICS
from tests.app.fakes import CLASSES, POISON, FakeModel, png
from tests.app.http.support import check_predictions, check_problem
from tests.app.support import PNG, running, until

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("device_thread")
async def test_not_ready_is_503_until_warm() -> None:
    model = FakeModel()
    model.pipeline.check.clear()
    async with running({"m": model}, ready=False) as app:
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"status": "not ready", "reasons": {"m": "loading"}}
        check_problem(await app.client.post("/predict", content=png(1), headers=PNG), 503, "not-ready")
        assert (await app.client.get("/healthz")).json() == {"status": "ok"}
        assert (await app.client.head("/readyz")).status_code == 503
        assert (await app.client.head("/healthz")).status_code == 200
        model.pipeline.check.set()
        await until(lambda: not app.service.reasons())
        assert (await app.client.get("/readyz")).status_code == 200
        assert (await app.client.head("/readyz")).status_code == 200
        check_predictions(await app.client.post("/predict", content=png(1), headers=PNG), [1])


async def test_exactly_the_table_is_exposed() -> None:
    async with running() as app:
        text = (await app.client.get("/metrics")).text
        exposed = {family.name for family in text_string_to_metric_families(text)}
        table = {metric.name.removesuffix("_total") for metric in METRICS}
        assert {name for name in exposed if name.startswith("psc_") and not name.endswith("_created")} == table
        assert "process_cpu_seconds" in exposed


async def test_counts_are_what_the_client_saw() -> None:
    async with running() as app:
        for value in (0, 1, 128, 250):
            await app.client.post("/predict", content=png(value), headers=PNG)
        await app.client.post("/predict?alpha=0.99", content=png(64, first=255), headers=PNG)
        await app.client.post("/predict", content=png(1, first=POISON), headers=PNG)
        await app.client.post("/predict", content=b"x", headers=PNG)
        counts = [await app.metric(f'psc_predictions_total{{label="{name}",model="m"}}') for name in CLASSES]
        assert sum(counts) == 5
        assert await app.metric('psc_ood_total{model="m"}') == 0  # By the policy's alpha, not by the request's.
        assert await app.metric('psc_abstained_total{model="m",reason="ood"}') == 1
        assert await app.metric('psc_ood_p_value_count{model="m"}') == 5
        assert await app.metric('psc_predictive_entropy_nats_count{model="m"}') == 5
        assert await app.metric('psc_log_density_nats_count{model="m"}') == 5
        assert await app.metric('psc_decode_seconds_count{model="m"}') >= 6
        assert await app.metric('psc_inference_seconds_count{model="m"}') >= 5
        assert await app.metric('psc_queue_seconds_count{model="m"}') >= 5
        assert await app.metric('psc_batch_size_sum{model="m"}') >= 5
        assert await app.metric('psc_request_seconds_count{route="/predict",status="200"}') == 5
        assert await app.metric('psc_rejected_total{reason="unsupported-image"}') == 1
        assert await app.metric('psc_queue_depth{model="m"}') == 0
        assert await app.metric('psc_queue_limit_images{model="m"}') == app.service.settings.max_queue_images
        assert await app.metric('psc_alpha{model="m"}') == 0.2
        assert await app.metric("psc_inflight_requests") == 1
        assert await app.metric("psc_ready") == 1
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}') == 1


async def test_models_are_counted_apart() -> None:
    async with running({"m": FakeModel(), "n": FakeModel()}, max_queue_images=600) as app:
        for value, name in enumerate(("m", "n", "n")):
            await app.client.post(f"/models/{name}/predict", content=png(value), headers=PNG)
        for name, count in (("m", 1), ("n", 2)):
            assert await app.metric(f'psc_predictions_total{{label="dark",model="{name}"}}') == count
            assert await app.metric(f'psc_ood_p_value_count{{model="{name}"}}') == count
            assert await app.metric(f'psc_queue_limit_images{{model="{name}"}}') == 600


async def test_a_client_may_leave_its_images_out_of_what_is_monitored() -> None:
    """With any key that may predict: what a client hides are its own images, and how many they are is shown."""
    async with running(api_keys="alice") as app:
        headers = {**PNG, "X-API-Key": "alice"}
        for path in ("/predict?monitor=false", "/models/m/predict?monitor=0"):
            answer = await app.client.post(path, content=png(255), headers=headers)
            assert answer.json()["predictions"][0]["is_ood"] is not None
        tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 1, 8, 8], "data": [255] * 64}
        v2 = {"inputs": [tensor], "parameters": {"monitor": False}}
        assert (await app.client.post("/v2/models/m/infer", json=v2, headers=headers)).status_code == 200
        assert await app.metric('psc_unmonitored_images_total{model="m",reason="asked"}') == 3
        assert await app.metric('psc_ood_p_value_count{model="m"}') == 0
        assert (await app.client.get("/models/m/live", headers=headers)).json()["images"] == 0
        assert (await app.client.post("/predict?monitor=maybe", content=png(1), headers=headers)).status_code == 400
        assert (await app.client.post("/predict?monitor=false", content=png(1), headers=PNG)).status_code == 401


async def test_an_image_sent_again_is_monitored_once() -> None:
    async with running() as app:
        for _ in range(3):
            await app.client.post("/predict", content=png(255), headers=PNG)
        assert await app.metric('psc_unmonitored_images_total{model="m",reason="repeated"}') == 2
        assert await app.metric('psc_ood_p_value_count{model="m"}') == 1
        assert sum([await app.metric(f'psc_predictions_total{{label="{name}",model="m"}}') for name in CLASSES]) == 3


async def test_keys_guard_predictions_and_administration() -> None:
    async with running(api_keys="alice,bob", admin_keys="root") as app:
        check_problem(await app.client.post("/predict", content=png(1), headers=PNG), 401, "unauthorized")
        response = await app.client.post("/predict", content=png(1), headers={**PNG, "x-api-key": "mallory"})
        assert check_problem(response, 401, "unauthorized")
        assert response.headers["www-authenticate"].startswith("Bearer")
        for key in ("alice", "bob", "root"):
            headers = {**PNG, "authorization": f"Bearer {key}"}
            check_predictions(await app.client.post("/predict", content=png(1), headers=headers), [1])
        check_problem(await app.client.get("/model"), 401, "unauthorized")
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "alice"})).status_code in (401, 403)
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200
