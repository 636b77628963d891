"""Predictions, clients that leave, overload, reloads, draining and restarts in any order, beside a simple model.

The application is the real one over ASGI; only the network is a fake, whose steps and whose loading can be held up.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.main import create_app
from app.service import Service
from app.settings import load_settings
from psc_core.errors import BundleError
from tests.app.fakes import CLASSES, FakeModel, png

BATCH, QUEUE = 2, 6
ON_DEVICE = 2 * BATCH  # images that have left the queue and wait in a step, or are about to, at most

KEY = "a-key-of-thirty-two-characters-or"
VALUES = (0, 128, 255)  # of each class one


class Check(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait()


@dataclass(eq=False)
class Sent:
    """A request and what came of it: of a reload without labels; ``must`` are the statuses that it may have.

    ``since`` counts the versions that had been served; if it ``was_held``, the device has computed none of its images.
    """

    labels: tuple[str, ...]
    since: int
    left: asyncio.Event
    must: set[int]
    was_held: bool = False
    status: int = 0
    body: bytes = b""
    task: asyncio.Task[None] | None = None


def images_of(requests: list[Sent]) -> int:
    return sum(len(each.labels) for each in requests)


class Models(dict[str, Any]):
    """One model; each load gives a new version, or fails, once loading is not held up."""

    def __init__(self) -> None:
        super().__init__(m=None)
        self.versions: list[FakeModel] = []
        self.loading = Check()
        self.loading.set()
        self.is_next_bad = False

    def __getitem__(self, name: str) -> Any:
        self.loading.wait()
        if self.is_next_bad:
            raise BundleError("the bundle is bad")
        model = FakeModel(version=f"v{len(self.versions)}")
        model.pipeline.check = Check()
        model.pipeline.check.set()
        self.versions.append(model)
        return model

    def release(self) -> None:
        for model in self.versions:
            model.pipeline.check.set()


class AnyOrder(RuleBasedStateMachine):
    """Every request is answered once, with its own images and a version that was served, or refused for a reason."""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.models = Models()
        self.waiting: list[Sent] = []
        self.reloading: Sent | None = None
        self.runner.run(self._start())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            try:
                self.runner.run(self._stop())
            finally:
                self.runner.close()

    @rule(values=st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
    def predict(self, values: list[int]) -> None:
        outstanding = [each for each in self.unanswered(self.waiting) if each.since == len(self.models.versions)]
        must = {200} if images_of(outstanding) + len(values) <= QUEUE else {200, 429}
        held = [each for each in outstanding if each.was_held]  # Earlier ones may be computed and not handed out yet.
        if self.is_held and images_of(held) + len(values) > QUEUE + ON_DEVICE:
            must = {429}
        images = [{"b64": base64.b64encode(png(value)).decode()} for value in values]
        labels = tuple(CLASSES[VALUES.index(value)] for value in values)
        body = json.dumps({"images": images}).encode()
        sent = self.runner.run(self._send("/predict", labels, must, body))
        sent.was_held = self.is_held
        self.waiting.append(sent)

    @rule()
    def overload(self) -> None:
        for _ in range(1 + (QUEUE + ON_DEVICE) // 4):
            self.predict([0, 128, 255, 0])

    @rule(which=st.integers(0, 59))
    def cancel(self, which: int) -> None:
        """A client leaves, if one waits; its request ends though the device is held up."""
        if not self.waiting:  # Not a precondition: which requests wait depends on the device's thread.
            return
        sent = self.waiting.pop(which % len(self.waiting))
        sent.left.set()
        sent.must |= {499}
        self.runner.run(self._answered([sent]))

    @rule()
    def hold_device(self) -> None:
        self.models.versions[-1].pipeline.check.clear()

    @rule()
    def release_device(self) -> None:
        self.models.release()
        self.runner.run(self._answered(self.waiting))
        self.waiting = []

    @precondition(lambda self: self.reloading is None)
    @rule(is_bad=st.booleans(), is_held=st.booleans())
    def reload(self, is_bad: bool, is_held: bool) -> None:
        self.models.is_next_bad = is_bad
        if is_held:
            self.models.loading.clear()
        self.reloading = self.runner.run(self._send("/admin/reload", (), {422 if is_bad else 200}))
        if not is_held:
            self.finish_reload()

    @precondition(lambda self: self.reloading)
    @rule()
    def reload_beside_another(self) -> None:
        self.runner.run(self._answered([self.runner.run(self._send("/admin/reload", (), {409}))]))

    @precondition(lambda self: self.reloading)
    @rule()
    def finish_reload(self) -> None:
        assert self.reloading is not None
        self.models.loading.set()
        self.runner.run(self._answered([self.reloading]))
        self.reloading = None

    @rule()
    def drain(self) -> None:
        self.runner.run(self._on_loop(self.service.begin_drain))

    @rule()
    def restart(self) -> None:
        """What was admitted is answered before the end, whatever it waits for."""
        if self.reloading is not None:
            self.finish_reload()
        self.runner.run(self._stop())
        self.waiting = []
        self.runner.run(self._start())

    @invariant()
    def is_alive_and_bounded(self) -> None:
        if not hasattr(self, "runner"):
            return
        health = self.runner.run(self._send("/healthz", (), {200}, method="GET"))
        ready = self.runner.run(self._send("/readyz", (), {503 if self.service.draining else 200}, method="GET"))
        self.runner.run(self._answered([health, ready]))
        assert all(served.engine.pending <= QUEUE for served in self.service.registry.served)
        unanswered = self.unanswered([*self.waiting, *([self.reloading] if self.reloading else [])])
        assert self.service.inflight == len(unanswered)
        for sent in self.waiting:
            if sent not in unanswered:
                self._check(sent)
        self.waiting = [each for each in self.waiting if each in unanswered]

    @staticmethod
    def unanswered(requests: list[Sent]) -> list[Sent]:
        return [each for each in requests if each.task is not None and not each.task.done()]

    @property
    def is_held(self) -> bool:
        return not self.models.versions[-1].pipeline.check.is_set()

    async def _start(self) -> None:
        self.models.is_next_bad = False
        options = {"max_batch_size": BATCH, "max_queue_images": QUEUE, "max_images_per_request": 4, "admin_keys": KEY}
        self.app = create_app(load_settings({"deadline_seconds": 1000, "drain_seconds": 1000, **options}), self.models)
        self.service: Service = self.app.state.service
        self.ended = asyncio.Event()
        self.server = asyncio.create_task(self._serve())
        while self.service.reasons():
            await asyncio.sleep(0.001)

    async def _serve(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            await self.ended.wait()

    async def _stop(self) -> None:
        self.models.loading.set()
        if self.reloading is not None:
            await self._answered([self.reloading])
            self.reloading = None
        self.ended.set()
        self.models.release()
        await self.server
        await self._answered(self.waiting)
        while any(thread.name.startswith("psc-device") for thread in threading.enumerate()):
            await asyncio.sleep(0.001)

    async def _on_loop(self, action: Any) -> None:
        action()

    async def _send(
        self, path: str, labels: tuple[str, ...], must: set[int], body: bytes = b"", method: str = "POST"
    ) -> Sent:
        """Send; returns when the service has taken the request, or answered it."""
        sent = Sent(labels, len(self.models.versions), asyncio.Event(), must)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not messages:
                await sent.left.wait()
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.status = message.get("status", sent.status)
            sent.body += message.get("body", b"")

        headers = [(b"content-type", b"application/json"), (b"x-api-key", KEY.encode())]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
        sent.task = asyncio.create_task(self.app(scope, receive, send))
        for _ in range(50):  # Turns of the loop, which are many more than it needs.
            await asyncio.sleep(0)
        return sent

    async def _answered(self, requests: list[Sent]) -> None:
        for sent in requests:
            assert sent.task is not None
            await sent.task
            self._check(sent)

    def _check(self, sent: Sent) -> None:
        assert sent.status in sent.must, sent.body
        if sent.labels and sent.status == 200:
            answer = json.loads(sent.body)
            assert tuple(each["label"] for each in answer["predictions"]) == sent.labels
            assert answer["model"]["version"] == f"v{sent.since - 1}"


AnyOrder.TestCase.settings = settings(
    settings.get_profile("ci"),
    max_examples=20,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = pytest.mark.usefixtures("device_thread")(AnyOrder.TestCase)
