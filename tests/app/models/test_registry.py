"""Reload: beside and swap, no request lost, a bad bundle changes nothing."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from app.server import UvicornHost
from app.service import Host
from psc_core.errors import BundleError
from tests.app.fakes import FakeModel, pixels, png
from tests.app.support import PNG, running, serve_next, until

pytestmark = pytest.mark.anyio

ADMIN = {"x-api-key": "root"}


def encoded(image: Any) -> bytes:
    """A PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


async def test_reload_swaps() -> None:
    async with running(admin_keys="root") as app:
        serve_next(app, FakeModel("v2"))
        response = await app.client.post("/admin/reload", headers=ADMIN)
        assert response.json() == {"reloaded": [{"name": "m", "previous_version": "v1", "version": "v2"}]}
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert answer.json()["model"]["version"] == "v2"
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v2"}') == 1
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}') == 0
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == 1


async def test_reload_under_load_loses_nothing() -> None:
    async with running(admin_keys="root", max_images_per_request=100) as app:
        serve_next(app, *(FakeModel(f"v{k}") for k in range(2, 8)))
        stop = False
        versions: set[str] = set()

        async def client() -> int:
            count = 0
            while not stop:
                files = [("images", ("a.png", png(count % 200)))] * 3
                response = await app.client.post("/predict", files=files)
                assert response.status_code == 200, response.text
                versions.add(response.json()["model"]["version"])
                count += 1
            return count

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for _ in range(6):
            version = app.service.registry.get().model.version
            await until(lambda version=version: version in versions)
            assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 200
        stop = True
        assert sum(await asyncio.gather(*clients)) > 8
        assert versions <= {f"v{k}" for k in range(1, 8)}
        assert len(versions) > 1


async def test_bad_bundle_changes_nothing() -> None:
    async with running(admin_keys="root") as app:
        serve_next(app, BundleError("expected digest a, got b; copy it again"))
        response = await app.client.post("/admin/reload", headers=ADMIN)
        assert response.status_code == 422
        assert "expected digest a" in response.json()["detail"]
        assert (await app.client.get("/readyz")).status_code == 200
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert answer.json()["model"]["version"] == "v1"
        assert await app.metric('psc_reloads_total{model="m",result="failed"}') == 1


async def test_failed_warm_up_changes_nothing() -> None:
    async with running(admin_keys="root") as app:
        broken = FakeModel("v2")
        broken.pipeline.dead = True
        serve_next(app, broken)
        response = await app.client.post("/admin/reload", headers=ADMIN)
        assert response.status_code == 503
        assert app.service.exit_code == 0
        answer = await app.client.post("/predict", content=png(1), headers=PNG)
        assert answer.json()["model"]["version"] == "v1"


async def test_all_bundles_or_none_are_swapped() -> None:
    async with running({"a": FakeModel("a1"), "b": FakeModel("b1")}, admin_keys="root") as app:
        serve_next(app, FakeModel("a2"), BundleError("bad"))
        assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 422
        assert [served.model.version for served in app.service.registry.served] == ["a1", "b1"]
        serve_next(app, FakeModel("b2"))
        response = await app.client.post("/admin/reload?model=b", headers=ADMIN)
        assert [each["name"] for each in response.json()["reloaded"]] == ["b"]
        assert [served.model.version for served in app.service.registry.served] == ["a1", "b2"]
        assert (await app.client.post("/admin/reload?model=c", headers=ADMIN)).status_code == 404


async def test_other_failures_of_a_reload() -> None:
    async with running(admin_keys="root") as app:

        def threads() -> int:
            return sum(not each.name.startswith("asyncio") for each in threading.enumerate())

        before = threads()
        for _ in range(3):
            serve_next(app, MemoryError("no room"))
            response = await app.client.post("/admin/reload", headers=ADMIN)
            assert response.status_code == 500  # Nothing is known of the device, and nothing internal is told.
            assert response.json()["type"] == "urn:psc:problem:internal" and "Error" not in response.json()["detail"]
        serve_next(app, MemoryError("no room"))
        await app.service.reload_quietly()
        assert threads() <= before
        assert await app.metric('psc_reloads_total{model="m",result="failed"}') == 4
        assert (await app.client.post("/predict", content=png(1), headers=PNG)).status_code == 200


async def test_models_of_a_failed_reload_are_closed() -> None:
    async with running({"a": FakeModel("a1"), "b": FakeModel("b1")}, admin_keys="root") as app:
        before = set(threading.enumerate())

        def devices() -> list[str]:
            new = (each.name for each in threading.enumerate() if each not in before)
            return [name for name in new if name.startswith("psc-device")]

        serve_next(app, FakeModel("a2"), BundleError("bad"))
        assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 422
        await until(lambda: not devices(), 5)


async def test_too_few_calibration_images_for_the_settings() -> None:
    async with running(admin_keys="root", alpha=0.02) as app:
        few = FakeModel("v2")
        part = slice(0, 9)
        few.calibration = replace(
            few.calibration,
            ood_scores=few.calibration.ood_scores[part],
            entropies=few.calibration.entropies[part],
            error_bounds=few.calibration.error_bounds[part],
            label_probabilities=few.calibration.label_probabilities[part],
            labels=few.calibration.labels[part],
        )
        serve_next(app, few)
        response = await app.client.post("/admin/reload", headers=ADMIN)
        assert response.status_code == 422
        assert "alpha" in response.json()["detail"]


async def test_old_model_is_freed_after_a_reload_even_from_a_frozen_heap() -> None:
    class Watching(Host):
        def models_changed(self) -> None:
            UvicornHost.models_changed(self)  # type: ignore[arg-type]

    try:
        async with running(host=Watching(), admin_keys="root") as app:
            old = weakref.ref(app.service.registry.get("m").engine)
            gc.freeze()
            serve_next(app, FakeModel("v2"))
            assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 200
            await until(lambda: old() is None, 5)
    finally:
        gc.unfreeze()


async def test_prediction_recorded_after_its_model_has_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, go_on = asyncio.Event(), asyncio.Event()

    async def late(images: Any) -> list[int]:
        answered.set()
        await go_on.wait()
        return list(range(len(images)))

    monkeypatch.setattr("app.models.fingerprints", late)
    async with running(admin_keys="root") as app:
        request = asyncio.create_task(app.client.post("/predict", content=png(1), headers=PNG))
        await answered.wait()
        serve_next(app, FakeModel("v2"))
        assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 200
        await until(lambda: not app.service.registry._retiring)
        go_on.set()
        label = (await request).json()["predictions"][0]["label"]
        assert await app.metric(f'psc_predictions_total{{label="{label}",model="m"}}') == 1


@pytest.mark.usefixtures("device_thread")
async def test_replaced_model_that_hangs_ends_with_the_service() -> None:
    async with running(admin_keys="root", deadline_seconds=1000, drain_seconds=0.2) as app:
        pipeline = app.model.pipeline
        pipeline.check.clear()
        pipeline.sizes.clear()
        request = asyncio.create_task(app.client.post("/predict", content=png(1), headers=PNG))
        await until(lambda: pipeline.sizes)
        serve_next(app, FakeModel("v2"))
        assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 200
        async with asyncio.timeout(20):
            await app.service.close()
        assert (await request).status_code == 503


@pytest.mark.usefixtures("device_thread")
async def test_one_reload_at_a_time() -> None:
    async with running(admin_keys="root") as app:
        slow = FakeModel("v2")
        slow.pipeline.check.clear()
        serve_next(app, slow)
        first = asyncio.create_task(app.client.post("/admin/reload", headers=ADMIN))
        await until(lambda: slow.pipeline.sizes)
        assert (await app.client.post("/admin/reload", headers=ADMIN)).status_code == 409
        slow.pipeline.check.set()
        assert (await first).status_code == 200


@pytest.mark.usefixtures("device_thread")
async def test_reloads_asked_for_meanwhile_are_made_once_afterwards() -> None:
    async with running(admin_keys="root") as app:
        slow = FakeModel("v2")
        slow.pipeline.check.clear()
        serve_next(app, slow, FakeModel("v3"))  # A third load would find none.
        first = asyncio.create_task(app.client.post("/admin/reload", headers=ADMIN))
        await until(lambda: slow.pipeline.sizes)
        hung_up = [asyncio.create_task(app.service.reload_quietly()) for _ in range(3)]
        await asyncio.sleep(0)  # Each runs until it waits for the first.
        slow.pipeline.check.set()
        assert (await first).json()["reloaded"][0]["version"] == "v2"
        await asyncio.gather(*hung_up)
        assert app.service.registry.get("m").model.version == "v3"
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == 2
        assert await app.metric('psc_reloads_total{model="m",result="failed"}') == 0


async def test_new_model_begins_without_the_drift_of_the_old() -> None:
    async with running(admin_keys="root", drift_window=10) as app:
        image = pixels(0)
        image[:, ::2] = 255  # p-value 0.1
        for _ in range(10):
            await app.client.post("/predict", content=encoded(image), headers=PNG)
        assert await app.metric('psc_drift_window_ood_rate{model="m"}') == 1
        serve_next(app, FakeModel("v2"))
        await app.client.post("/admin/reload", headers=ADMIN)
        assert await app.metric('psc_drift_window_ood_rate{model="m"}') == 0
        assert await app.metric('psc_drift_window_tail_probability{model="m"}') == 1
        assert await app.metric('psc_drift_log_martingale{model="m"}') == 0


async def test_quiet_reload_logs_errors(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as app:
        serve_next(app, BundleError("bad digest"))
        await app.service.reload_quietly()
        assert "bad digest" in caplog.text


async def test_bad_bundle_at_start_ends_the_process_with_2() -> None:
    async with running(ready=False) as app:
        serve_next(app, BundleError("bad digest"))
        await until(lambda: app.service.exit_code)
        assert (app.service.exit_code, app.service.exit_message) == (2, "bad digest")


async def test_unattainable_alpha_at_start() -> None:
    async with running(ready=False, alpha=0.001) as app:
        await until(lambda: app.service.exit_code)
        assert app.service.exit_code == 2
        assert "1/(n + 1)" in app.service.exit_message
