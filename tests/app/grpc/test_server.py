"""The port: limits, keys, metrics, errors and the end are those of HTTP; the numbers are those of REST."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="the gRPC extra is not installed")
pytest.importorskip("tritonclient.grpc")

import grpc
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from app.grpc import METHODS, PREFIX
from app.main import check, create_app
from app.settings import load_settings
from psc_core.errors import UsageError
from tests.app.fakes import FakeModel, pixels, png
from tests.app.grpc.support import calling, encoded, free_port, raw
from tests.app.support import Running, until
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import GUARD_SECONDS, serve, serve_fake

GREY = pixels(10)[None, ..., None]
EXAMPLES = sorted((ROOT / "artifacts" / "dirty-mnist-resnet18" / "examples").glob("*.png"))


def infer_message() -> bytes:
    tensor = {"name": "images", "datatype": "UINT8", "shape": GREY.shape}
    request = METHODS["ModelInfer"][0](model_name="m", inputs=[tensor], raw_input_contents=[GREY.tobytes()])
    return bytes(request.SerializeToString())


def channel_to(app: Running) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{app.service.settings.grpc_port}")


async def error_of(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def test_the_examples_and_a_batch_are_bit_equal_to_rest(shipped_bundle: Path) -> None:
    port = free_port()
    with serve(f"--bundle=m={shipped_bundle}", f"--grpc-port={port}") as server:
        rest = triton_http.InferenceServerClient(f"127.0.0.1:{server.port}")
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            files = [path.read_bytes() for path in EXAMPLES]
            assert len(files) == 4
            for batch in ([files[0]], [files[1]], [files[2]], files * 8):
                tensor = triton_http.InferInput("encoded_images", [len(batch)], "BYTES")
                tensor.set_data_from_numpy(np.array(batch, dtype=object))
                expected, found = rest.infer("m", [tensor]), client.infer("m", [encoded(*batch)])
                names = [each["name"] for each in expected.get_response()["outputs"]]
                assert [each.name for each in found.get_response().outputs] == names
                for name in names:
                    one, other = expected.as_numpy(name), found.as_numpy(name)
                    assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
        rest.close()


@pytest.mark.anyio
async def test_an_api_key_is_asked_for_before_the_message_is_read() -> None:
    async with calling(api_keys="secret") as (app, client):
        assert await client.is_server_ready()  # Probes need none.

        async with channel_to(app) as channel:
            error = await error_of(channel.stream_unary(PREFIX + "ModelInfer")(Silence()))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "X-API-Key" in error.details()
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            await client.infer("m", [raw(GREY)], headers=headers)
        assert await app.metric('psc_rejected_total{reason="unauthorized"}') == 1


class Silence:
    """The messages of a call that sends none; no generator, because asyncio would close one that still waits."""

    def __aiter__(self) -> Silence:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.Event().wait()
        raise StopAsyncIteration


@pytest.mark.anyio
async def test_keys_are_looked_at_before_any_message_of_the_repository() -> None:
    async with calling(api_keys="secret", admin_keys="root") as (app, _), channel_to(app) as channel:
        for method, key in (("RepositoryIndex", None), ("ModelMetadata", None), ("RepositoryModelLoad", "secret")):
            metadata = [("x-api-key", key)] if key else None
            error = await error_of(channel.stream_unary(PREFIX + method)(Silence(), metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.anyio
async def test_an_empty_message_is_not_waited_for() -> None:
    async with calling() as (app, _), channel_to(app) as channel:
        for method in ("ServerLive", "ServerReady", "ServerMetadata"):
            assert await channel.stream_unary(PREFIX + method)(Silence()) is not None


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_a_message_without_images_is_small() -> None:
    async with calling() as (app, _), channel_to(app) as channel:
        message = METHODS["ModelReady"][0](name="m" * 100_000).SerializeToString()
        error = await error_of(channel.unary_unary(PREFIX + "ModelReady")(message))
        assert (error.code(), "at most 65536 bytes" in error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


@pytest.mark.anyio
async def test_rejects_a_message_that_is_too_large() -> None:
    async with calling(max_body_bytes=10_000) as (_, client):
        with pytest.raises(triton.InferenceServerException) as caught:
            await client.infer("m", [encoded(bytes(10_000))])
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        await client.infer("m", [encoded(png(3))])


@pytest.mark.anyio
async def test_a_message_must_arrive_in_time() -> None:
    async with calling(upload_seconds=0.1) as (app, _), channel_to(app) as channel:
        error = await error_of(channel.stream_unary(PREFIX + "ModelInfer")(Silence()))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await app.metric('psc_rejected_total{reason="slow-upload"}') == 1


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_who_leaves_waits_for_no_place() -> None:
    async with calling(max_body_bytes=1000, max_buffered_bytes=1999) as (app, _), channel_to(app) as channel:
        silent = [channel.stream_unary(PREFIX + "ModelInfer")(Silence()) for _ in range(5)]
        await until(lambda: app.service.inflight == 5)
        for call in silent[1:]:
            call.cancel()
        await until(lambda: app.service.inflight == 1)
        assert not silent[0].done()
        silent[0].cancel()
        await until(lambda: app.service.inflight == 0)


@pytest.mark.usefixtures("device_thread")
@pytest.mark.anyio
async def test_overload_says_when_to_come_back() -> None:
    async with calling(max_queue_images=1, max_batch_size=1, max_images_per_request=1) as (app, client):
        app.model.pipeline.check.clear()
        running = len(app.model.pipeline.sizes)
        waiting = [asyncio.ensure_future(client.infer("m", [raw(GREY)]))]
        await until(lambda: len(app.model.pipeline.sizes) > running)
        waiting.append(asyncio.ensure_future(client.infer("m", [raw(GREY)])))
        await until(lambda: app.pending == 1)
        async with channel_to(app) as channel:
            error = await error_of(channel.unary_unary(PREFIX + "ModelInfer")(infer_message()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
        assert "traceresponse" in dict(error.trailing_metadata())
        app.model.pipeline.check.set()
        await asyncio.gather(*waiting)


@pytest.mark.usefixtures("device_thread")
@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_calls_are_counted_and_traced_as_requests() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with calling(allowed_hosts="example.org") as (app, _), channel_to(app) as channel:
        call = channel.unary_unary(PREFIX + "ModelInfer")(infer_message(), metadata=(("traceparent", trace),))
        await call
        assert trace[3:35] in dict(await call.trailing_metadata())["traceresponse"]
        metrics = (await app.client.get("/metrics", headers={"host": "example.org"})).text
        assert f'psc_request_seconds_count{{route="{PREFIX}ModelInfer",status="200"}} 1.0' in metrics
        assert 'psc_predictions_total{label="dark",model="m"} 1.0' in metrics
        error = await error_of(channel.unary_unary(PREFIX + "ModelStreamInfer")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.anyio
@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_fails_outside_the_routes_stays_inside(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    async with calling() as (_, client):

        async def fail(_app: Any, _scope: Any, _receive: Any, send: Any) -> None:
            if has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half a mes", "more_body": True})
            raise RuntimeError("a secret")

        monkeypatch.setattr("app.http.middleware.ProblemResponses.__call__", fail)
        with pytest.raises(triton.InferenceServerException) as caught:
            await client.infer("m", [raw(GREY)])
        assert caught.value.status() == "StatusCode.INTERNAL"
        assert "secret" not in caught.value.message()


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


def test_two_workers_share_the_port() -> None:
    port = free_port()
    with serve_fake("--workers=2", f"--grpc-port={port}") as server:
        server.wait_for_log('"model ready"', 2)
        server.wait_for_log("gRPC on", 2)
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.infer("m", [raw(GREY)]).get_response().model_name == "m"
        assert server.terminate() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    port = free_port()
    with (
        serve_fake(f"--tls-certificate={certificate}", f"--tls-key={key}", f"--grpc-port={port}"),
        triton.InferenceServerClient(f"127.0.0.1:{port}", ssl=True, root_certificates=str(certificate)) as client,
    ):
        assert client.infer("m", [raw(GREY)]).get_response().model_name == "m"


def test_a_taken_port_is_said_at_once() -> None:
    with serve_fake() as server:
        words = ["--bundle", str(SHIPPED_BUNDLE), "--port=0", f"--grpc-port={server.port}"]
        program = [sys.executable, "-m", "app.cli", *words]
        ended = subprocess.run(program, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"psc-serve: cannot listen on 127.0.0.1:{server.port}")


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"pip install 'psc\[grpc\]'"):
        check(load_settings({"grpc_port": 1}))
    with pytest.raises(UsageError, match=r"pip install 'psc\[grpc\]'"):
        create_app(load_settings({"grpc_port": 1}), {"m": FakeModel()})
