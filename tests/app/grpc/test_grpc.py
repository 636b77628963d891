"""The port of gRPC: each method, limits, keys, errors, places for messages, and the fields of a message."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("grpc", reason="the gRPC extra is not installed")
pytest.importorskip("tritonclient.grpc")

import grpc
import tritonclient.grpc as triton
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from app.errors import MalformedRequest, TooManyRequests
from app.grpc import (
    HIGHER,
    MAX_OCCURRENCES,
    MAX_UNPACKED,
    MAX_WAITING,
    MESSAGE_SECONDS,
    METHODS,
    PING_MS,
    PREFIX,
    Places,
    check_counts,
)
from app.main import create_app
from app.settings import load_settings
from psc_core.errors import UsageError
from tests.app.fakes import FakeModel, FakePipelineWithChecks, pixels, png
from tests.app.grpc.occurrences import occurrences
from tests.app.grpc.support import calling, encoded, free_port, raw
from tests.app.support import Running, clock, settled, until
from tests.conftest import ROOT
from tests.served import GUARD_SECONDS, make_certificate, serve_fake

pytestmark = pytest.mark.anyio

GREY = pixels(10)[None, ..., None]


def infer_message() -> bytes:
    tensor = {"name": "images", "datatype": "UINT8", "shape": GREY.shape}
    request = METHODS["ModelInfer"][0](model_name="m", inputs=[tensor], raw_input_contents=[GREY.tobytes()])
    return bytes(request.SerializeToString())


def channel_to(app: Running) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{app.service.settings.grpc_port}")


async def refused(call: Any, code: str) -> Any:
    """The error of a call, which has this code."""
    with pytest.raises((grpc.aio.AioRpcError, InferenceServerException)) as caught:
        await call
    error = caught.value
    found = error.status() if isinstance(error, InferenceServerException) else str(error.code())
    assert found == f"StatusCode.{code}", str(error)
    return error


async def test_an_api_key_is_asked_for_before_the_message_is_read() -> None:
    async with calling(api_keys="secret", admin_keys="root") as (app, client), channel_to(app) as channel:
        assert await client.is_server_ready()  # Probes need none.
        for method, key in (("ModelInfer", ""), ("ModelMetadata", ""), ("RepositoryModelLoad", "secret")):
            call = channel.stream_unary(PREFIX + method)(Silence(), metadata=[("x-api-key", key)])
            await refused(call, "UNAUTHENTICATED")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            await client.infer("m", [raw(GREY)], headers=headers)
        assert await app.metric('psc_rejected_total{reason="unauthorized"}') == 3


class Silence:
    """The messages of a call that sends none; no generator, because asyncio would close one that still waits."""

    def __aiter__(self) -> Silence:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.Event().wait()
        raise StopAsyncIteration


async def test_an_empty_message_is_not_waited_for() -> None:
    async with calling() as (app, _), channel_to(app) as channel:
        for method in ("ServerLive", "ServerReady", "ServerMetadata"):
            assert await channel.stream_unary(PREFIX + method)(Silence()) is not None


async def test_calls_that_send_nothing_stop_no_others() -> None:
    async with calling(max_body_bytes=1000, max_buffered_bytes=16_000) as (app, client), channel_to(app) as channel:
        silent = [
            channel.stream_unary(PREFIX + method)(Silence())
            for method in ("ServerLive", "ModelReady", "ModelMetadata", "ModelInfer")
            for _ in range(16)
        ]
        await until(lambda: app.service.inflight >= 48)
        async with asyncio.timeout(GUARD_SECONDS):
            await client.infer("m", [raw(GREY)])
            assert await client.is_model_ready("m")
        for call in silent:
            call.cancel()


async def test_rejects_a_message_that_is_too_large() -> None:
    async with calling(max_body_bytes=10_000) as (_, client):
        await refused(client.infer("m", [encoded(bytes(10_000))]), "RESOURCE_EXHAUSTED")
        await client.infer("m", [encoded(png(3))])
    async with calling() as (app, _), channel_to(app) as channel:
        message = METHODS["ModelReady"][0](name="m" * 100_000).SerializeToString()  # Of one without images.
        await refused(channel.unary_unary(PREFIX + "ModelReady")(message), "RESOURCE_EXHAUSTED")


async def test_a_message_must_arrive_in_time() -> None:
    async with calling(upload_seconds=0.1) as (app, _), channel_to(app) as channel:
        await refused(channel.stream_unary(PREFIX + "ModelInfer")(Silence()), "DEADLINE_EXCEEDED")
        assert await app.metric('psc_rejected_total{reason="slow-upload"}') == 1


async def test_no_more_messages_arrive_at_once_than_memory_is_allowed() -> None:
    async with calling(max_body_bytes=1000, max_buffered_bytes=1999) as (app, client), channel_to(app) as channel:
        go_on = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            await go_on.wait()
            yield infer_message()

        first = channel.stream_unary(PREFIX + "ModelInfer")(slowly())
        await until(lambda: app.service.inflight == 1)
        second = asyncio.ensure_future(client.infer("m", [raw(GREY)]))
        await until(lambda: app.service.inflight == 2)
        await asyncio.sleep(0.05)
        assert not second.done()
        go_on.set()
        await asyncio.gather(first, second)


@pytest.mark.usefixtures("device_thread")
async def test_overload_says_when_to_come_back() -> None:
    async with calling(max_queue_images=1, max_batch_size=1, max_images_per_request=1) as (app, client):
        app.model.pipeline.check.clear()
        running = len(app.model.pipeline.sizes)
        waiting = [asyncio.ensure_future(client.infer("m", [raw(GREY)]))]
        await until(lambda: len(app.model.pipeline.sizes) > running)
        waiting.append(asyncio.ensure_future(client.infer("m", [raw(GREY)])))
        await until(lambda: app.pending == 1)
        async with channel_to(app) as channel:
            error = await refused(channel.unary_unary(PREFIX + "ModelInfer")(infer_message()), "RESOURCE_EXHAUSTED")
        assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
        assert "traceresponse" in dict(error.trailing_metadata())
        app.model.pipeline.check.set()
        await asyncio.gather(*waiting)


@pytest.mark.usefixtures("device_thread")
async def test_work_of_a_client_that_left_is_dropped() -> None:
    async with calling(max_batch_size=1) as (app, client), channel_to(app) as channel:
        app.model.pipeline.check.clear()
        running = len(app.model.pipeline.sizes)
        held = asyncio.ensure_future(client.infer("m", [raw(GREY)]))
        await until(lambda: len(app.model.pipeline.sizes) > running)
        call = channel.unary_unary(PREFIX + "ModelInfer")(infer_message())
        await until(lambda: app.pending == 1)
        call.cancel()
        await until(lambda: app.pending == 0)
        async with asyncio.timeout(GUARD_SECONDS):
            while await app.metric('psc_rejected_total{reason="client-gone"}') < 1:
                await asyncio.sleep(0.01)
        app.model.pipeline.check.set()
        await held
        assert len(app.model.pipeline.sizes) == running + 1


async def test_calls_are_counted_and_traced_as_requests() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with calling(allowed_hosts="example.org") as (app, _), channel_to(app) as channel:
        call = channel.unary_unary(PREFIX + "ModelInfer")(infer_message(), metadata=(("traceparent", trace),))
        await call
        assert trace[3:35] in dict(await call.trailing_metadata())["traceresponse"]
        metrics = (await app.client.get("/metrics", headers={"host": "example.org"})).text
        assert f'psc_request_seconds_count{{route="{PREFIX}ModelInfer",status="200"}} 1.0' in metrics
        assert 'psc_predictions_total{label="dark",model="m"} 1.0' in metrics
        await refused(channel.unary_unary(PREFIX + "ModelStreamInfer")(b""), "UNIMPLEMENTED")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_fails_outside_the_routes_stays_inside(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    async with calling() as (_, client):

        async def fail(_app: Any, _scope: Any, _receive: Any, send: Any) -> None:
            if has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half a mes", "more_body": True})
            raise RuntimeError("a secret")

        monkeypatch.setattr("app.http.middleware.ProblemResponses.__call__", fail)
        error = await refused(client.infer("m", [raw(GREY)]), "INTERNAL")
        assert "secret" not in error.message()


@pytest.mark.thorough
def test_sigterm_answers_what_is_in_flight() -> None:
    port, calls = free_port(), 5
    with serve_fake(f"--grpc-port={port}", "--max-batch-size=1", "step=1", "linger=0.1") as server:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            ended: list[Any] = []
            for _ in range(calls):
                client.async_infer("m", [raw(GREY)], callback=lambda result, error: ended.append((result, error)))
            server.until(lambda: f"psc_inflight_requests {calls + 1}.0" in server.metrics())
            assert server.terminate() == 0
            server.until(lambda: len(ended) == calls)
        for result, error in ended:
            assert error is None
            assert result.get_response().model_name == "m"


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_the_engine_behind_two_fronts_answers_with_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    port = free_port()
    flags = (f"--tls-certificate={certificate}", f"--tls-key={key}", f"--grpc-port={port}", "--workers=2")
    with serve_fake(*flags) as server:
        options = {"ssl": True, "root_certificates": str(certificate)}
        with triton.InferenceServerClient(f"127.0.0.1:{port}", **options) as client:
            assert client.infer("m", [raw(GREY)]).get_response().model_name == "m"
        assert server.terminate() == 0


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"pip install 'psc\[grpc\]'"):
        create_app(load_settings({"grpc_port": 1}), {"m": FakeModel()})


GREYS = np.stack([pixels(value) for value in (0, 100, 200)])[..., None]


async def of_rest(app: Running, tensor: dict[str, Any], model: str = "m") -> dict[str, Any]:
    answer = await app.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    return {output["name"]: output for output in answer.json()["outputs"]}


def assert_same(result: Any, rest: dict[str, Any]) -> None:
    names = [output.name for output in result.get_response().outputs]
    assert names == list(rest)
    for name, output in rest.items():
        values = result.as_numpy(name)
        assert list(values.shape) == output["shape"]
        if output["datatype"] == "BYTES":
            assert [each.decode() for each in values] == output["data"]
        else:
            np.testing.assert_array_equal(values.ravel(), np.array(output["data"], values.dtype))


async def test_health_and_metadata() -> None:
    async with calling({"m": FakeModel(), "other": FakeModel("v7")}) as (app, client):
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("m")
        assert await client.is_model_ready("other", "v7")
        server = (await app.client.get("/v2")).json()
        assert await client.get_server_metadata(as_json=True) == server
        for name, version in (("m", ""), ("other", "v7")):
            rest = (await app.client.get(f"/v2/models/{name}")).json()
            found = await client.get_model_metadata(name, version)
            assert (found.name, found.platform, list(found.versions)) == (name, rest["platform"], rest["versions"])
            for kind in ("inputs", "outputs"):
                tensors = [(each.name, each.datatype, list(each.shape)) for each in getattr(found, kind)]
                assert tensors == [(each["name"], each["datatype"], each["shape"]) for each in rest[kind]]
        app.service.begin_drain()
        assert not await client.is_server_ready()
        assert not await client.is_model_ready("m")


async def test_inference_is_that_of_rest() -> None:
    models = {"m": FakeModel(), "checks": FakeModel(pipeline=FakePipelineWithChecks(), checks=("texture", "content"))}
    async with calling(models) as (app, client):
        entry = {"name": "images", "datatype": "UINT8", "shape": list(GREYS.shape), "data": GREYS.tolist()}
        for model in models:
            result = await client.infer(model, [raw(GREYS)], request_id="seven")
            assert_same(result, await of_rest(app, entry, model))
        assert result.get_response().id == "seven"
        assert result.get_response().model_version == "v1"
        files = [png(10), png(250)]
        texts = [base64.b64encode(each).decode() for each in files]
        entry = {"name": "encoded_images", "datatype": "BYTES", "shape": [2], "data": texts}
        assert_same(await client.infer("m", [encoded(*files)]), await of_rest(app, entry))


async def call(app: Running, method: str, **members: Any) -> Any:
    request, response = METHODS[method]
    async with channel_to(app) as channel:
        serialize, parse = request.SerializeToString, response.FromString
        return await channel.unary_unary(PREFIX + method, serialize, parse)(request(**members))


async def test_typed_contents_are_read_as_raw_ones() -> None:
    async with calling() as (app, client):
        of_raw = await client.infer("m", [raw(GREYS)])
        tensor = {"name": "images", "datatype": "UINT8", "shape": GREYS.shape}
        typed = {**tensor, "contents": {"uint_contents": GREYS.ravel().tolist()}}
        answer = await call(app, "ModelInfer", model_name="m", inputs=[typed])
        assert list(answer.raw_output_contents) == list(of_raw.get_response().raw_output_contents)

        files = [png(10), png(250)]
        of_raw = await client.infer("m", [encoded(*files)])
        typed = {"name": "encoded_images", "datatype": "BYTES", "shape": [2], "contents": {"bytes_contents": files}}
        answer = await call(app, "ModelInfer", model_name="m", inputs=[typed])
        assert list(answer.raw_output_contents) == list(of_raw.get_response().raw_output_contents)


async def test_parameters_and_wanted_outputs() -> None:
    async with calling() as (app, _):
        tensor = {"name": "images", "datatype": "UINT8", "shape": [3, 1, 8, 8]}
        answer = await call(
            app,
            "ModelInfer",
            model_name="m",
            parameters={"alpha": {"double_param": 0.6}, "priority": {"int64_param": 3}},
            inputs=[{**tensor, "parameters": {"layout": {"string_param": "NCHW"}}}],
            raw_input_contents=[GREYS.tobytes()],
            outputs=[{"name": "label"}, {"name": "is_ood"}],
        )
        assert [each.name for each in answer.outputs] == ["label", "is_ood"]
        assert answer.parameters["alpha"].double_param == 0.6


IMAGES = {"name": "images", "datatype": "UINT8", "shape": [1, 8, 8, 1]}
FILE = {"name": "encoded_images", "datatype": "BYTES", "shape": [1]}
GOOD = {"model_name": "m", "inputs": [IMAGES], "raw_input_contents": [bytes(64)]}


@pytest.mark.parametrize(
    ("members", "code"),
    [
        (GOOD | {"model_name": "nobody"}, "NOT_FOUND"),
        (GOOD | {"model_version": "v9"}, "NOT_FOUND"),
        (GOOD | {"inputs": []}, "INVALID_ARGUMENT"),
        (GOOD | {"inputs": [], "raw_input_contents": []}, "INVALID_ARGUMENT"),
        (GOOD | {"raw_input_contents": [bytes(63)]}, "INVALID_ARGUMENT"),
        (GOOD | {"raw_input_contents": [bytes(64)] * 2}, "INVALID_ARGUMENT"),
        (GOOD | {"raw_input_contents": []}, "INVALID_ARGUMENT"),
        (GOOD | {"inputs": [IMAGES | {"contents": {"uint_contents": [1]}}]}, "INVALID_ARGUMENT"),
        ({"model_name": "m", "inputs": [IMAGES | {"contents": {"uint_contents": [256] * 64}}]}, "INVALID_ARGUMENT"),
        (GOOD | {"inputs": [IMAGES | {"datatype": "FP32"}]}, "INVALID_ARGUMENT"),
        (GOOD | {"outputs": [{"name": "nothing"}]}, "INVALID_ARGUMENT"),
        (GOOD | {"outputs": [{"name": "label"}] * 2}, "INVALID_ARGUMENT"),
        (GOOD | {"outputs": [{}] * 300}, "INVALID_ARGUMENT"),
        (GOOD | {"inputs": [IMAGES] * 2, "raw_input_contents": [bytes(64)] * 2}, "INVALID_ARGUMENT"),
        (GOOD | {"inputs": [IMAGES | {"shape": [1] * 9}]}, "INVALID_ARGUMENT"),
        (GOOD | {"parameters": {"alpha": {"string_param": "x"}}}, "INVALID_ARGUMENT"),
        (GOOD | {"inputs": [FILE], "raw_input_contents": [b"\x08\0\0\0no image"]}, "INVALID_ARGUMENT"),
        (
            GOOD | {"inputs": [IMAGES | {"shape": [5, 8, 8, 1]}], "raw_input_contents": [bytes(320)]},
            "RESOURCE_EXHAUSTED",
        ),
    ],
)
async def test_rejects_what_rest_rejects(members: dict[str, Any], code: str) -> None:
    async with calling(max_images_per_request=4) as (app, _):
        await refused(call(app, "ModelInfer", **members), code)


async def test_the_access_log_has_the_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with calling(access_log=True) as (app, _):
        await call(app, "ServerLive")
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert vars(line)["client"] == "127.0.0.1"


@pytest.mark.slow
async def test_the_pings_of_a_client_end_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.grpc.PING_MS", PING_MS // 10)  # gRPC's clients ping every second at most.
    options = [(f"grpc.{name}", 1) for name in ("keepalive_time_ms", "keepalive_permit_without_calls")]
    options.append(("grpc.http2.max_pings_without_data", 0))
    async with calling() as (app, _):
        address = f"127.0.0.1:{app.service.settings.grpc_port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.stream_unary(PREFIX + "ModelInfer")(Silence())
            ended, _ = await asyncio.wait([asyncio.ensure_future(call.code())], timeout=8)
            assert not ended
            call.cancel()


async def test_a_long_detail_leaves_the_code() -> None:
    async with calling() as (app, _):
        for letter in "a\u00e9\U0001f600" * 10:  # gRPC drops now and then what is too long.
            error = await refused(call(app, "ModelReady", name=letter * 1500), "NOT_FOUND")
            assert error.details().startswith(f"no model '{letter}")


async def test_rejects_bytes_that_are_no_message() -> None:
    async with calling() as (app, _), channel_to(app) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(PREFIX + "ModelInfer")(b"\xff\xff")
        assert await app.metric('psc_rejected_total{reason="malformed"}') == 1


async def test_the_repository() -> None:
    async with calling({"m": FakeModel(), "other": FakeModel()}, admin_keys="root") as (app, client):
        await refused(client.unload_model("other"), "UNAUTHENTICATED")
        await client.unload_model("other", headers={"x-api-key": "root"})
        index = await client.get_model_repository_index()
        assert {each.name: (each.state, each.reason) for each in index.models} == {
            "m": ("READY", ""),
            "other": ("UNAVAILABLE", "unloaded"),
        }
        ready = await call(app, "RepositoryIndex", ready=True)
        assert [each.name for each in ready.models] == ["m"]
        await client.load_model("other", headers={"x-api-key": "root"})
        assert await client.is_model_ready("other")


async def test_a_load_takes_no_other_bundle() -> None:
    async with calling(admin_keys="root") as (app, client):
        root = {"x-api-key": "root"}
        for options in ({"config": "{}"}, {"config": "{}", "files": {"file:1/model.onnx": b"A"}}):
            error = await refused(client.load_model("m", headers=root, **options), "INVALID_ARGUMENT")
            assert "is not supported by this server" in str(error)
        for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"):
            message = METHODS[method][0](repository_name="other").SerializeToString()
            async with channel_to(app) as channel:
                loading = channel.unary_unary(PREFIX + method)(message, metadata=tuple(root.items()))
                assert "repository_name" in (await refused(loading, "INVALID_ARGUMENT")).details()
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == 0
        await client.load_model("m", headers=root)


class Calls:
    def __init__(self, places: Places) -> None:
        self.places = places
        self.holding: list[str] = []
        self.let_in: list[str] = []
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, client: str, count: int = 1) -> list[asyncio.Task[None]]:
        """Calls of a client, once each has its place or waits for one."""
        started = [asyncio.ensure_future(self._hold(client)) for _ in range(count)]
        self.tasks += started
        await settled()
        return started

    async def _hold(self, client: str) -> None:
        async with self.places.place(client):
            self.holding.append(client)
            self.let_in.append(client)
            try:
                await self.go.wait()
            finally:
                self.holding.remove(client)


@asynccontextmanager
async def calls(count: int, seconds: float = 1e6) -> AsyncIterator[Calls]:
    held = Calls(Places(count, seconds))
    yield held
    held.go.set()
    await asyncio.gather(*held.tasks, return_exceptions=True)
    assert not held.holding
    async with held.places.place("afterwards"):
        pass


async def test_a_client_leaves_places_to_others() -> None:
    async with calls(8) as held:
        await held.start("greedy", 8)
        assert held.holding == ["greedy"] * 6
        await held.start("modest", 2)
        assert sorted(held.holding) == ["greedy"] * 6 + ["modest"] * 2


async def test_who_waits_gets_the_place_of_one_who_leaves() -> None:
    async with calls(1) as held:
        (first,) = await held.start("a")
        await held.start("b")
        assert held.holding == ["a"]
        first.cancel()
        await settled()
        assert held.holding == ["b"]


async def test_the_silent_give_up_when_others_wait() -> None:
    async with calls(4) as held:
        with clock() as advance:
            greedy = await held.start("greedy", 3)
            (other,) = await held.start("other")
            advance(2 * MESSAGE_SECONDS)
            await settled()
            assert len(held.holding) == 4  # Nobody waits: they are left alone.
            await held.start("late")
            await until(lambda: "late" in held.holding)
            with pytest.raises(TooManyRequests):
                await greedy[0]
            assert not any(each.done() for each in (*greedy[1:], other))


async def test_a_waiting_one_that_leaves_spares_the_others() -> None:
    async with calls(1) as held:
        with clock() as advance:
            (first,) = await held.start("a")
            (late,) = await held.start("b")
            late.cancel()
            await settled()
            advance(2 * MESSAGE_SECONDS)
            await settled()
            assert not first.done()


async def test_who_could_have_no_place_takes_none_from_others() -> None:
    async with calls(4) as held:
        with clock() as advance:
            await held.start("greedy", 3)
            (other,) = await held.start("other")
            await held.start("greedy", 3)
            for _ in range(2):
                advance(2 * MESSAGE_SECONDS)
                await settled()
                assert sum(each.done() for each in held.tasks) == 3  # Its own give up, one for each that waited.
            assert not other.done()


async def test_who_waits_comes_before_those_of_clients_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.grpc.MESSAGE_SECONDS", 0.2)
    async with calls(8) as held:
        for greedy in ("a", "b"):
            await held.start(greedy, 50)
        await held.start("modest")
        assert len(held.holding) == 8 and "modest" not in held.holding
        await until(lambda: "modest" in held.let_in)
        assert held.let_in.index("modest") == 8  # The first of those that waited.


async def test_a_call_that_ends_while_others_are_let_in_ends_alone() -> None:
    async with calls(1) as held:
        (first,) = await held.start("a")
        late, last = await held.start("b", 2)
        late.cancel()  # And has not had its turn when the place becomes free.
        first.cancel()
        await settled()
        assert first.cancelled() and late.cancelled() and not last.done()
        assert held.holding == ["b"]


async def test_who_only_waits_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.grpc.MESSAGE_SECONDS", 3600)
    async with calls(1, 0.3) as held:
        held.places._grace = 3600.0
        (first,) = await held.start("a")
        (late,) = await held.start("b")
        with pytest.raises(TooManyRequests):
            await late
        assert not first.done()


async def test_too_many_that_wait_are_refused() -> None:
    async with calls(1) as held:
        for client, count in (("a", 1 + MAX_WAITING * 3 // 4), ("b", MAX_WAITING // 4)):
            await held.start(client, count)
            with pytest.raises(TooManyRequests):
                async with held.places.place("a" if client == "a" else "c"):
                    pytest.fail("was let in")


async def test_a_timeout_of_the_caller_is_the_callers() -> None:
    places = Places(1, 60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), places.place("a"):
            await asyncio.Event().wait()
    async with places.place("a"):
        pass


REQUEST = METHODS["ModelInfer"][0]
TENSOR = {"name": "images", "datatype": "UINT8", "shape": [1, 8, 8, 1]}


def check_message(body: bytes) -> None:
    check_counts(memoryview(body), REQUEST.DESCRIPTOR, Counter())


@pytest.mark.parametrize(
    "field",
    [
        *(b"\x32\0", b"\x2a\0", b"\x3a\0", b"\x22\x08\x0a\x02ab\x12\x02\x08\x01", b"\x0a\0"),
        *(b"\x7a\0", b"\x78\x01", b"\x79" + bytes(8), b"\x7d" + bytes(4)),  # unknown ones
    ],
)
def test_a_field_occurs_so_often_at_most(field: bytes) -> None:
    check_message(field * MAX_OCCURRENCES)
    with pytest.raises(MalformedRequest):
        check_message(field * (MAX_OCCURRENCES + 1))


@pytest.mark.parametrize(
    "members",
    [
        {"shape": [1] * (MAX_OCCURRENCES + 1)},
        {"parameters": {str(k): {} for k in range(MAX_OCCURRENCES + 1)}},
        {"contents": {"fp32_contents": [0.5] * MAX_OCCURRENCES}},
        {"contents": {"bytes_contents": [b""] * (HIGHER["inference.InferTensorContents.bytes_contents"] + 1)}},
    ],
)
def test_fields_of_an_input_are_counted(members: dict[str, Any]) -> None:
    with pytest.raises(MalformedRequest):
        check_message(REQUEST(inputs=[TENSOR | members]).SerializeToString())


def test_those_of_all_inputs_are_counted_together() -> None:
    half = TENSOR | {"shape": [1] * (MAX_OCCURRENCES // 2 + 1)}
    check_message(REQUEST(inputs=[half]).SerializeToString())
    with pytest.raises(MalformedRequest, match="shape"):
        check_message(REQUEST(inputs=[half, half]).SerializeToString())


def test_pixels_and_files_may_be_many() -> None:
    pixels = TENSOR | {"contents": {"uint_contents": [255] * 100_000}}
    files = TENSOR | {"contents": {"bytes_contents": [b"x"] * 2000}}
    check_message(REQUEST(inputs=[pixels, files]).SerializeToString())


def test_packed_pixels_are_counted_by_their_bytes() -> None:
    most = HIGHER["inference.InferTensorContents.uint_contents"]
    check_message(REQUEST(inputs=[TENSOR | {"contents": {"uint_contents": [1] * most}}]).SerializeToString())
    body = REQUEST(inputs=[TENSOR | {"contents": {"uint_contents": [255] * most}}]).SerializeToString()
    with pytest.raises(MalformedRequest):
        check_message(body)


def test_pixels_one_by_one_are_few() -> None:
    for count, refused in ((MAX_UNPACKED, False), (MAX_UNPACKED + 1, True)):
        contents = b"\x20\x01" * count
        tensor = b"\x2a" + varint(len(contents)) + contents
        body = b"\x2a" + varint(len(tensor)) + tensor
        assert len(REQUEST.FromString(body).inputs[0].contents.uint_contents) == count
        with pytest.raises(MalformedRequest) if refused else contextlib.nullcontext():
            check_message(body)


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def test_groups_are_refused() -> None:
    with pytest.raises(MalformedRequest):
        check_message(b"\x7b\x7c")


@given(
    st.binary(max_size=40)
    | st.lists(
        st.sampled_from([b"\x32\0", b"\x2a\x06\x1a\x04\1\2\3\4", b"\x2a\x02\x18\x05", b"\x3a\1x", b"\xff", b"\0"])
    ).map(b"".join)
)
def test_no_field_is_missed_that_the_parser_finds(body: bytes) -> None:
    """With the limit one below what the parser finds of the most frequent field, the body is refused."""
    try:
        found = occurrences(REQUEST.FromString(body))
    except DecodeError:
        assume(False)
    assume(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.grpc.MAX_OCCURRENCES", max(found.values()) - 1)
        with pytest.raises(MalformedRequest):
            check_message(body)


SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def messages_below(descriptor: Any) -> Iterator[Any]:
    """A message and all that it holds, those of maps included."""
    yield descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from messages_below(field.message_type)


@pytest.mark.parametrize("method", METHODS)
def test_messages_are_written_as_tritons(method: str) -> None:
    assert f"/{SERVICE.full_name}/" == PREFIX
    theirs = SERVICE.methods_by_name[method]
    for ours, other in zip(METHODS[method], (theirs.input_type, theirs.output_type), strict=True):
        written = {each.full_name: each.fields_by_name for each in messages_below(other)}
        for message in messages_below(ours.DESCRIPTOR):
            for field in message.fields:
                same = written[message.full_name][field.name]
                assert (field.number, field.type, field.is_repeated) == (same.number, same.type, same.is_repeated)


def test_what_is_compiled_is_the_text() -> None:
    text = (ROOT / "app" / "open_inference.proto").read_text(encoding="utf-8")
    file = next(iter(METHODS.values()))[0].DESCRIPTOR.file
    assert re.findall(r"rpc (\w+)\((\w+)\) returns \((\w+)\)", text) == [
        (name, request.DESCRIPTOR.name, response.DESCRIPTOR.name) for name, (request, response) in METHODS.items()
    ]
    nested = [each for message in file.message_types_by_name.values() for each in (message, *message.nested_types)]
    compiled = {each.name for each in nested if not each.GetOptions().map_entry}
    assert set(re.findall(r"message (\w+)", text)) == compiled
    written = [message for message in nested if message.name in compiled]
    fields = sorted((each.name, each.number) for message in written for each in message.fields)
    assert sorted((name, int(n)) for name, n in re.findall(r"(\w+) = (\d+);", text)) == fields
