"""What every form of the protocol shares."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.errors import UnknownModel
from app.http import v2
from app.http.v2 import find_model, infer_tensors, request_of
from psc_core.images.preprocess import Preprocess
from tests.app.fakes import FakeModel, pixels, png
from tests.app.support import running, serve_next

pytestmark = pytest.mark.anyio


async def never() -> Any:
    await asyncio.Event().wait()


def request(name: str, datatype: str, shape: list[int], size: int) -> Any:
    parameters = {"binary_data_size": size}
    return request_of({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}]})


async def test_finds_a_model_of_one_version_only() -> None:
    async with running() as app:
        assert find_model(app.service, "m", None) is find_model(app.service, "m", "v1")
        with pytest.raises(UnknownModel, match="version 'v1', not 'v2'"):
            find_model(app.service, "m", "v2")


@pytest.mark.parametrize("kind", ["raw", "encoded"])
async def test_reload_while_the_images_are_read(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    colour = {"preprocess": Preprocess("RGB", 8, 8, None, (0.5,) * 3, (0.5,) * 3)} if kind == "encoded" else {}
    async with running() as app:
        serve_next(app, FakeModel("v2", **colour))
        parse = v2.parse

        async def reload_meanwhile(*arguments: Any) -> Any:
            found = await parse(*arguments)
            if app.service.registry.get().model.version == "v1":
                await app.service.registry.reload(None)
                await asyncio.sleep(0.05)  # The old engine admits nothing any more.
            return found

        monkeypatch.setattr(v2, "parse", reload_meanwhile)
        if kind == "encoded":
            data = len(png(200)).to_bytes(4, "little") + png(200)
            wanted = request("encoded_images", "BYTES", [1], len(data))
        else:
            data = pixels(200).tobytes()
            wanted = request("images", "UINT8", [1, 8, 8, 1], len(data))
        answer = await infer_tensors(app.service, "m", None, wanted, memoryview(data), body=data, receive=never)
    assert answer.served.model.version == "v2"
