"""Each method with Triton's client: its answers are those of REST."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="the gRPC extra is not installed")
pytest.importorskip("tritonclient.grpc")

import grpc
from tritonclient.utils import InferenceServerException

from app.grpc import METHODS, PREFIX
from tests.app.fakes import FakeModel, FakePipelineWithChecks, pixels, png
from tests.app.grpc.support import calling, encoded, raw
from tests.app.support import Running

pytestmark = pytest.mark.anyio

GREY = np.stack([pixels(value) for value in (0, 100, 200)])[..., None]


def binary(files: list[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in files)


async def of_rest(app: Running, tensor: dict[str, Any], model: str = "m") -> dict[str, Any]:
    answer = await app.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    return {output["name"]: output for output in answer.json()["outputs"]}


def assert_same(result: Any, rest: dict[str, Any]) -> None:
    """All outputs of REST, and the very numbers."""
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
        entry = {"name": "images", "datatype": "UINT8", "shape": list(GREY.shape), "data": GREY.tolist()}
        for model in models:
            result = await client.infer(model, [raw(GREY)], request_id="seven")
            assert_same(result, await of_rest(app, entry, model))
        assert result.get_response().id == "seven"
        assert result.get_response().model_version == "v1"
        files = [png(10), png(250)]
        texts = [base64.b64encode(each).decode() for each in files]
        entry = {"name": "encoded_images", "datatype": "BYTES", "shape": [2], "data": texts}
        assert_same(await client.infer("m", [encoded(*files)]), await of_rest(app, entry))


async def call(app: Running, method: str, **members: Any) -> Any:
    """One call without a client's help."""
    request, response = METHODS[method]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.service.settings.grpc_port}") as channel:
        serialize, parse = request.SerializeToString, response.FromString
        return await channel.unary_unary(PREFIX + method, serialize, parse)(request(**members))


async def test_typed_contents_are_read_as_raw_ones() -> None:
    async with calling() as (app, client):
        of_raw = await client.infer("m", [raw(GREY)])
        tensor = {"name": "images", "datatype": "UINT8", "shape": GREY.shape}
        typed = {**tensor, "contents": {"uint_contents": GREY.ravel().tolist()}}
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
            raw_input_contents=[GREY.tobytes()],
            outputs=[{"name": "label"}, {"name": "is_ood"}],
        )
        assert [each.name for each in answer.outputs] == ["label", "is_ood"]
        assert answer.parameters["alpha"].double_param == 0.6


IMAGES = {"name": "images", "datatype": "UINT8", "shape": [1, 8, 8, 1]}
GOOD = {"model_name": "m", "inputs": [IMAGES], "raw_input_contents": [bytes(64)]}


@pytest.mark.parametrize(
    ("members", "code", "words"),
    [
        (GOOD | {"model_name": "nobody"}, "NOT_FOUND", "no model 'nobody'"),
        (GOOD | {"model_version": "v9"}, "NOT_FOUND", "not 'v9'"),
        (GOOD | {"inputs": []}, "INVALID_ARGUMENT", "raw_input_contents for each input"),
        (GOOD | {"inputs": [], "raw_input_contents": []}, "INVALID_ARGUMENT", "inputs"),
        (GOOD | {"raw_input_contents": [bytes(63)]}, "INVALID_ARGUMENT", "expected 64 bytes"),
        (GOOD | {"raw_input_contents": [bytes(64)] * 2}, "INVALID_ARGUMENT", "raw_input_contents for each input"),
        (GOOD | {"raw_input_contents": []}, "INVALID_ARGUMENT", "expected 64 bytes"),
        (GOOD | {"inputs": [IMAGES | {"contents": {"uint_contents": [1]}}]}, "INVALID_ARGUMENT", "no contents"),
        (
            {"model_name": "m", "inputs": [IMAGES | {"contents": {"uint_contents": [256] * 64}}]},
            "INVALID_ARGUMENT",
            "whole numbers from 0 to 255",
        ),
        (GOOD | {"inputs": [IMAGES | {"datatype": "FP32"}]}, "INVALID_ARGUMENT", "inputs"),
        (GOOD | {"outputs": [{"name": "nothing"}]}, "INVALID_ARGUMENT", "outputs"),
        (GOOD | {"outputs": [{"name": "label"}] * 2}, "INVALID_ARGUMENT", "name each output once"),
        (GOOD | {"outputs": [{}] * 300}, "INVALID_ARGUMENT", "at most 256 outputs"),
        (GOOD | {"inputs": [IMAGES] * 2, "raw_input_contents": [bytes(64)] * 2}, "INVALID_ARGUMENT", "inputs"),
        (GOOD | {"inputs": [IMAGES | {"shape": [1] * 9}]}, "INVALID_ARGUMENT", "shape"),
        (GOOD | {"parameters": {"alpha": {"string_param": "x"}}}, "INVALID_ARGUMENT", "alpha"),
        (
            {
                "model_name": "m",
                "inputs": [{"name": "encoded_images", "datatype": "BYTES", "shape": [1]}],
                "raw_input_contents": [binary([b"no image"])],
            },
            "INVALID_ARGUMENT",
            "image 0",
        ),
        (
            GOOD | {"inputs": [IMAGES | {"shape": [5, 8, 8, 1]}], "raw_input_contents": [bytes(320)]},
            "RESOURCE_EXHAUSTED",
            "at most 4 images",
        ),
    ],
)
async def test_rejects_what_rest_rejects(members: dict[str, Any], code: str, words: str) -> None:
    async with calling(max_images_per_request=4) as (app, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(app, "ModelInfer", **members)
        assert (caught.value.code().name, words in caught.value.details()) == (code, True), caught.value.details()


async def test_rejects_bytes_that_are_no_message() -> None:
    async with calling() as (app, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.service.settings.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="not a ModelInferRequest"):
                await channel.unary_unary(PREFIX + "ModelInfer")(b"\xff\xff")
        assert await app.metric('psc_rejected_total{reason="malformed"}') == 1


async def test_the_repository() -> None:
    async with calling({"m": FakeModel(), "other": FakeModel()}, admin_keys="root") as (app, client):
        with pytest.raises(InferenceServerException) as caught:
            await client.unload_model("other")
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
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
