"""Models in service: which are started, the policy of a request, and reloads, which lose nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from app import models
from app.channel import Board
from app.errors import UnattainableAlpha
from app.inference.engine import Phase
from app.inference.steps import Chosen
from app.main import create_app
from app.models import ALIVE, check_affordable, cost_of_an_image
from app.processes import EngineHost
from app.server import UvicornHost
from app.service import ApiKeys, Host
from app.settings import load_settings
from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import BundleError, NetworkError
from psc_core.model import PSC
from psc_core.network.onnx import Cost, OnnxBody
from psc_core.tasks.base import Outputs
from tests.app.fakes import FakeModel, FakeValueModel, pixels, png
from tests.app.support import PNG, Running, running, serve_next, until
from tests.encoded import encode

pytestmark = pytest.mark.anyio


ADMIN = {"x-api-key": "root"}


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ({"v": FakeValueModel()}, "no served model has ambiguity_threshold,"),
        ({"m": FakeModel()}, "no served model has max_width,"),
        ({"m": FakeModel(), "v": FakeValueModel(version="w1")}, None),
    ],
)
async def test_a_threshold_that_no_model_reads_is_said(
    served: dict[str, FakeModel], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(served, ambiguity_threshold=0.5, max_width=9.0):
        found = [each.message for each in caplog.records if "no served model" in each.message]
    assert len(found) == bool(said) and all(said in each for each in found)


async def reload(app: Running, query: str = "") -> httpx.Response:
    return await app.client.post(f"/admin/reload{query}", headers=ADMIN)


async def version(app: Running) -> str:
    answer = await app.client.post("/predict", content=png(1), headers=PNG)
    return str(answer.json()["model"]["version"])


async def test_reload_swaps() -> None:
    async with running(admin_keys="root") as app:
        serve_next(app, FakeModel("v2"))
        response = await reload(app)
        assert response.json() == {"reloaded": [{"name": "m", "previous_version": "v1", "version": "v2"}]}
        assert await version(app) == "v2"
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v2"}') == 1
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}') == 0
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == 1


@pytest.mark.parametrize("second", ["plain", "folded", None])
async def test_answers_before_backends_are_measured_and_goes_on_with_the_fastest(
    second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = threading.Event()

    def choose(model: Any, wanted: str, *, max_batch: int, threads: int, may_measure: bool) -> Chosen:
        if not may_measure:
            return Chosen("folded", model.pipeline, is_final=False)
        assert measured.wait(10)
        if second is None:
            raise NetworkError("no memory for another network")
        return Chosen(second, model.pipeline)

    monkeypatch.setattr(models, "choose_backend", choose)
    async with running() as app:
        first = app.service.registry.get("m")
        assert (await app.client.post("/predict", content=png(1), headers=PNG)).status_code == 200
        answers = [asyncio.ensure_future(app.client.post("/predict", content=png(k), headers=PNG)) for k in range(40)]
        measured.set()
        if second == "plain":
            await until(lambda: app.service.registry.get("m").backend == "plain")
            await until(lambda: first.engine.phase is Phase.CLOSED)
        else:
            await app.service.registry.settle()
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
        assert await version(app) == "v1"
        assert (app.service.registry.get("m") is first) == (second != "plain")
        assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}') == 1
        assert await app.metric('psc_batch_size_sum{model="m"}') == 42


async def test_the_end_of_the_process_does_not_wait_for_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def choose(model: Any, wanted: str, *, may_measure: bool, **_: int) -> Chosen:
        if may_measure:
            began.set()
            go_on.wait()
        return Chosen("folded", model.pipeline, is_final=may_measure)

    monkeypatch.setattr(models, "choose_backend", choose)
    try:
        async with running():
            await until(began.is_set)
        (measuring,) = (each for each in threading.enumerate() if each.name == "psc-prepare")
        assert measuring.daemon and measuring.is_alive()  # :func:`app.main.end_threads` ends the process without it.
    finally:
        go_on.set()


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
            assert (await reload(app)).status_code == 200
        stop = True
        assert sum(await asyncio.gather(*clients)) > 8
        assert versions <= {f"v{k}" for k in range(1, 8)}
        assert len(versions) > 1


async def test_bad_bundle_or_warm_up_changes_nothing() -> None:
    async with running(admin_keys="root") as app:
        broken = FakeModel("v2")
        broken.pipeline.dead = True
        for upcoming, status in ((BundleError("expected digest a"), 422), (broken, 503)):
            serve_next(app, upcoming)
            assert (await reload(app)).status_code == status
            assert (await app.client.get("/readyz")).status_code == 200
            assert await version(app) == "v1"
        assert await app.metric('psc_reloads_total{model="m",result="failed"}') == 2
        assert app.service.exit_code == 0


async def test_all_bundles_or_none_are_swapped() -> None:
    async with running({"a": FakeModel("a1"), "b": FakeModel("b1")}, admin_keys="root") as app:
        before = set(threading.enumerate())

        def devices() -> list[str]:
            new = (each.name for each in threading.enumerate() if each not in before)
            return [name for name in new if name.startswith("psc-device")]

        serve_next(app, FakeModel("a2"), BundleError("bad"))
        assert (await reload(app)).status_code == 422
        assert [served.model.version for served in app.service.registry.served] == ["a1", "b1"]
        await until(lambda: not devices(), 5)
        assert await app.metric('psc_reloads_total{model="a",result="failed"}') == 0
        assert await app.metric('psc_reloads_total{model="b",result="failed"}') == 1
        serve_next(app, FakeModel("b2"))
        response = await reload(app, "?model=b")
        assert [each["name"] for each in response.json()["reloaded"]] == ["b"]
        assert [served.model.version for served in app.service.registry.served] == ["a1", "b2"]
        assert (await reload(app, "?model=c")).status_code == 404


async def test_other_failures_of_a_reload() -> None:
    async with running(admin_keys="root") as app:

        def threads() -> int:
            return sum(not each.name.startswith("asyncio") for each in threading.enumerate())

        before = threads()
        for _ in range(3):
            serve_next(app, MemoryError("no room"))
            response = await reload(app)
            assert response.status_code == 500  # Nothing is known of the device, and nothing internal is told.
            assert response.json()["type"] == "urn:psc:problem:internal" and "Error" not in response.json()["detail"]
        serve_next(app, MemoryError("no room"))
        await app.service.reload_quietly()
        assert threads() <= before
        assert await app.metric('psc_reloads_total{model="m",result="failed"}') == 4
        assert (await app.client.post("/predict", content=png(1), headers=PNG)).status_code == 200


async def test_too_few_calibration_images_for_the_settings() -> None:
    async with running(admin_keys="root", alpha=0.02) as app:
        few = FakeModel("v2")
        names = ("ood_scores", "entropies", "error_bounds", "label_probabilities", "labels")
        few.calibration = replace(few.calibration, **{name: getattr(few.calibration, name)[:9] for name in names})
        serve_next(app, few)
        response = await reload(app)
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
            assert (await reload(app)).status_code == 200
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
        assert (await reload(app)).status_code == 200
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
        assert (await reload(app)).status_code == 200
        async with asyncio.timeout(20):
            await app.service.close()
        assert (await request).status_code == 503


@pytest.mark.usefixtures("device_thread")
async def test_one_reload_at_a_time() -> None:
    async with running(admin_keys="root") as app:
        slow = FakeModel("v2")
        slow.pipeline.check.clear()
        serve_next(app, slow)
        first = asyncio.create_task(reload(app))
        await until(lambda: slow.pipeline.sizes)
        assert (await reload(app)).status_code == 409
        slow.pipeline.check.set()
        assert (await first).status_code == 200


@pytest.mark.usefixtures("device_thread")
async def test_reloads_asked_for_meanwhile_are_made_once_afterwards() -> None:
    async with running(admin_keys="root") as app:
        slow = FakeModel("v2")
        slow.pipeline.check.clear()
        serve_next(app, slow, FakeModel("v3"))  # A third load would find none.
        first = asyncio.create_task(reload(app))
        await until(lambda: slow.pipeline.sizes)
        hung_up = [asyncio.create_task(app.service.reload_quietly()) for _ in range(3)]
        await asyncio.sleep(0)  # Each runs until it waits for the first.
        slow.pipeline.check.set()
        assert (await first).json()["reloaded"][0]["version"] == "v2"
        await asyncio.gather(*hung_up)
        assert app.service.registry.get("m").model.version == "v3"
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == 2
        assert await app.metric('psc_reloads_total{model="m",result="failed"}') == 0


@pytest.mark.usefixtures("device_thread")
async def test_a_reload_asked_for_while_models_start_is_made_afterwards() -> None:
    slow = FakeModel("v1")
    slow.pipeline.check.clear()
    async with running({"m": slow}, ready=False) as app:
        await until(lambda: slow.pipeline.sizes)
        serve_next(app, FakeModel("v2"))
        hung_up = asyncio.create_task(app.service.reload_quietly())
        await asyncio.sleep(0)
        slow.pipeline.check.set()
        await hung_up
        assert app.service.registry.get("m").model.version == "v2"


async def test_the_end_does_not_wait_for_a_bundle_that_is_read() -> None:
    go_on = threading.Event()

    class Slow(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            go_on.wait()
            return super().__getitem__(name)

    app = create_app(load_settings({}), Slow(m=FakeModel()))
    try:
        async with asyncio.timeout(20), app.router.lifespan_context(app):
            await until(lambda: any(each.name == "psc-prepare" for each in threading.enumerate()))
    finally:
        go_on.set()


async def test_a_model_that_was_unloaded_stays_so_in_the_engine_that_takes_over() -> None:
    board = Board(1, 2)

    class Engine(Host):
        def board(self, models: int) -> Any:
            return EngineHost("", 0.0, ApiKeys.of(load_settings()), -1, board).board(models)

    for before in (["a", "b"], ["a"]):
        async with running({"a": FakeModel(), "b": FakeModel()}, host=Engine()) as app:
            assert [each.name for each in app.service.registry.served] == before
            if "b" in before:
                app.service.registry.unload("b")
    assert board.unloaded.tolist() == [0, 1]


async def test_new_model_begins_without_the_drift_of_the_old() -> None:
    async with running(admin_keys="root", drift_window=10) as app:
        image = pixels(0)
        image[:, ::2] = 255  # p-value 0.1
        await app.client.post("/predict", content=encode(image), headers=PNG)
        assert await app.metric('psc_drift_window_ood_rate{model="m"}') == 1
        serve_next(app, FakeModel("v2"))
        await reload(app)
        assert await app.metric('psc_drift_window_ood_rate{model="m"}') == 0


async def test_bad_bundle_at_start_ends_the_process_with_2() -> None:
    async with running(ready=False) as app:
        serve_next(app, BundleError("bad digest"))
        await until(lambda: app.service.exit_code)
        assert (app.service.exit_code, app.service.exit_message) == (2, "bad digest")


async def test_unattainable_alpha_at_start() -> None:
    async with running(ready=False, alpha=0.001) as app:
        await until(lambda: app.service.exit_code)
        assert app.service.exit_code == 2


async def test_a_request_has_the_policy_or_its_own() -> None:
    outputs = Outputs(np.array([[0.0, -1.0, 1.0, 0.1, 0.0, 0.7, 0.2, 0.1]], np.float32), CLASSIFICATION_SCORES, ())
    async with running(coverage=0.8) as app:
        served, decide = app.service.registry.get(), app.model.calibration.decide
        assert served.policy.coverage == 0.8
        assert decide(outputs, served.policy).is_ood.tolist() == [True]
        assert decide(outputs, served.policy_with(alpha=0.05)).is_ood.tolist() == [False]
        changed = served.policy_with(ambiguity_threshold=0.0)
        assert (changed.alpha, changed.ambiguity_threshold) == (served.policy.alpha, 0.0)
        with pytest.raises(UnattainableAlpha):
            served.policy_with(alpha=0.001)


async def test_monitors_share_the_bound_on_false_alarms() -> None:
    outputs = Outputs(np.array([[0.0, -1.0, 1.0, 0.01, 0.0, 0.7, 0.2, 0.1]] * 5, np.float32), CLASSIFICATION_SCORES, ())
    for monitors, alarms in ((1, 1.0), (1_000_000, 0.0)):
        async with running(drift_false_alarm=0.2, drift_monitors=monitors) as app:
            served = app.service.registry.get()
            served.recorder.predicted(outputs, app.model.calibration.decide(outputs, served.policy), range(5))
            assert await app.metric('psc_drift_alarms_total{model="m"}') == alarms


@pytest.fixture(scope="module")
def model(shipped_bundle: Path) -> PSC:
    return PSC.load(shipped_bundle, device="cpu")


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

    with model.backbone.register_forward_pre_hook(serve):
        assert cost_of_an_image(model) == alone
    assert hooks == [False]


def test_a_batch_without_room_is_refused(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(BundleError):
        check_affordable(model, max_batch=64, seconds=600.0)
    check_affordable(model, max_batch=1, seconds=600.0)


def test_two_batches_at_once_need_room(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_bytes", lambda _: 100)
    monkeypatch.setattr(models, "cost_of_an_image", lambda _: (10, 1))
    for threads, fitting in ((1, 10), (2, 5)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        check_affordable(model, max_batch=fitting, seconds=600.0)
        with pytest.raises(BundleError):
            check_affordable(model, max_batch=fitting + 1, seconds=600.0)


def test_a_batch_has_scratch_memory(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_bytes", lambda _: 100)
    monkeypatch.setattr(models, "cost_of_an_image", lambda _: (10, 1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    body = OnnxBody(b"", cost=Cost(alive=10, operations=1, scratch=50))
    given = {"device": model.device, "preprocess": model.preprocess, "name": "m"}
    taking: Any = SimpleNamespace(**given, backbone=SimpleNamespace(body=body))
    check_affordable(taking, max_batch=5, seconds=600.0)
    with pytest.raises(BundleError, match="lower --max-batch-size"):
        check_affordable(taking, max_batch=6, seconds=600.0)


def test_a_warm_up_without_end_is_refused(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "cost_of_an_image", lambda _: (1, 5_000))
    monkeypatch.setattr(models, "operations_per_second", lambda _: 1_000.0)
    with pytest.raises(BundleError, match="raise --warmup-seconds"):
        check_affordable(model, max_batch=64, seconds=600.0)
    check_affordable(model, max_batch=60, seconds=600.0)


def test_a_network_without_an_estimate_is_tried(model: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "cost_of_an_image", Mock(side_effect=NotImplementedError))
    check_affordable(model, max_batch=64, seconds=600.0)
