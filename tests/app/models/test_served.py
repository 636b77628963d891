"""A model in service: the policy of a request, and what cannot be served."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from app.errors import UnattainableAlpha
from app.models import ModelStarter
from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.tasks.base import Outputs
from tests.app.support import running

pytestmark = pytest.mark.anyio


async def test_thresholds_of_a_request() -> None:
    async with running() as app:
        served = app.service.registry.get()
        assert served.thresholds_with() is served.thresholds
        assert served.thresholds_with(alpha=0.05).policy.alpha == 0.05
        changed = served.thresholds_with(ambiguity_threshold=0.0).policy
        assert (changed.alpha, changed.ambiguity_threshold) == (served.thresholds.policy.alpha, 0.0)
        with pytest.raises(UnattainableAlpha, match=r"1/\(n \+ 1\)"):
            served.thresholds_with(alpha=0.001)


async def test_thresholds_are_those_of_the_policy() -> None:
    outputs = Outputs(np.array([[0.0, -1.0, 1.0, 0.1, 0.0, 0.7, 0.2, 0.1]], np.float32), CLASSIFICATION_SCORES, ())
    async with running(coverage=0.8) as app:
        served = app.service.registry.get()
        assert served.thresholds.quantile == app.model.calibration.quantile(0.8)
        assert served.thresholds.policy.coverage == 0.8
        assert served.thresholds.decide(outputs).is_ood.tolist() == [True]
        assert served.thresholds_with(alpha=0.05).decide(outputs).is_ood.tolist() == [False]


async def test_monitors_share_the_bound_on_false_alarms() -> None:
    outputs = Outputs(np.array([[0.0, -1.0, 1.0, 0.01, 0.0, 0.7, 0.2, 0.1]] * 5, np.float32), CLASSIFICATION_SCORES, ())
    for monitors, alarms in ((1, 1.0), (1_000_000, 0.0)):
        async with running(drift_false_alarm=0.2, drift_monitors=monitors) as app:
            served = app.service.registry.get()
            served.recorder.predicted(outputs, served.thresholds.decide(outputs), range(5))
            assert await app.metric('psc_drift_alarms_total{model="m"}') == alarms


async def test_a_start_that_is_cancelled_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    warming, go_on = threading.Event(), threading.Event()
    async with running() as app:
        served = app.service.registry.get()
        starter = app.service.registry._starter

        def step_of(self: ModelStarter, model: object) -> object:
            backend, step = real(self, model)

            def warm_up(is_wanted: object) -> bool:
                warming.set()
                return go_on.wait(60) and False

            monkeypatch.setattr(step, "warm_up", warm_up)
            return backend, step

        real = ModelStarter._step
        monkeypatch.setattr(ModelStarter, "_step", step_of)
        starting = asyncio.create_task(starter.start("other", served.model))
        await asyncio.to_thread(warming.wait, 60)
        starting.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        threads = [thread for thread in threading.enumerate() if thread.name == "psc-device-other"]
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)
        assert not any(thread.is_alive() for thread in threads)
