"""A bundle that ``psc-fit`` made, served: the answers are those of ``PSC.predict``, however they are batched."""

from __future__ import annotations

import asyncio
import io
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from app.main import create_app
from app.settings import load_settings
from psc_core import PSC
from psc_core.answers import ClassificationResponse
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from tests.app.support import until
from tests.served import GUARD_SECONDS, serve

ALLOW = "tests.tiny:network"
ADMIN = {"x-api-key": "root"}


@pytest.fixture(scope="session")
def digits(data_root: Path) -> list[bytes]:
    """64 digits and shirts as PNG files."""
    files = []
    for name, count in (("mnist", 40), ("fashion-mnist", 24)):
        dataset = open_dataset(f"{name}:{data_root}", split="test", preprocess=PRESETS["mnist"])
        for index in range(min(count, len(dataset))):
            buffer = io.BytesIO()
            Image.fromarray(np.asarray(dataset.image(index))[0]).save(buffer, "PNG")
            files.append(buffer.getvalue())
    return files


def application(bundle: Path, **settings: Any) -> Any:
    options = {"bundle": f"tiny={bundle}", "device": "cpu", "allow_factories": ALLOW, "admin_keys": "root"}
    return create_app(load_settings({**options, **settings}))


async def answer(client: httpx.AsyncClient, files: list[bytes], query: str = "") -> dict[str, Any]:
    uploads = [("images", (f"{k}.png", data)) for k, data in enumerate(files)]
    response = await client.post("/predict" + query, files=uploads)
    assert response.status_code == 200, response.text
    ClassificationResponse.model_validate_json(response.content)
    document: dict[str, Any] = response.json()
    return document


@pytest.mark.anyio
async def test_served_answers_are_those_of_predict_at_every_batch_size(tiny_bundle: Path, digits: list[bytes]) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=(ALLOW,))
    expected = psc.predict(digits)
    app = application(tiny_bundle)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await until(lambda: not app.state.service.reasons(), 60)

        async def check(start: int, stop: int) -> None:
            document = await answer(client, digits[start:stop])
            assert document["model"] == {"name": "tiny", "version": psc.version, "layer": psc.layer}
            for row, got in enumerate(document["predictions"], start):
                np.testing.assert_allclose(got["probabilities"], expected.probabilities[row], atol=1e-5)
                assert got["log_density"] == pytest.approx(expected.log_density[row].item(), abs=1e-3, rel=1e-4)
                assert got["predictive_entropy"] == pytest.approx(expected.predictive_entropy[row].item(), abs=1e-4)
                assert (got["label"], got["decision"]) == (expected.labels[row], expected.decision[row])

        for count in (1, 2, 3, 7, 16, 33, len(digits)):
            await check(0, count)
        await asyncio.gather(*(check(k, k + 1) for k in range(len(digits))), check(0, len(digits)))
        explained = (await answer(client, digits[:5], "?explain=true"))["predictions"]
        for row, got in enumerate(explained):
            assert len(got["explanation"]["class_distances"]) == len(psc.classes)
            assert tuple(got["prediction_set"]) == expected.prediction_set[row]
        assert (await client.get("/model")).json()["version"] == psc.version


@pytest.mark.anyio
@pytest.mark.parametrize("query", ["", "?monitor=false"])
async def test_the_examples_of_the_readme_again_and_again_are_no_drift(shipped_bundle: Path, query: str) -> None:
    examples = [(shipped_bundle / "examples" / f"{name}.png").read_bytes() for name in ("clean", "ambiguous", "shirt")]
    app = create_app(load_settings({"bundle": f"digits={shipped_bundle}", "device": "cpu", "backend": "folded"}))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await until(lambda: not app.state.service.reasons(), 60)
        for count in range(8):
            for images in (examples, *([image] for image in examples)):
                decisions = [each["decision"] for each in (await answer(client, images, query))["predictions"]]
                assert count or len(images) == 1 or decisions == ["accept", "abstain_ambiguous", "abstain_ood"]
        live = (await client.get("/models/digits/live")).json()
        assert (live["images"], live["drift_alarms"], live["drift_active"]) == (0 if query else 3, 0, False)


@pytest.mark.anyio
async def test_a_bundle_altered_on_disk_changes_nothing_when_reloaded(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    app = application(bundle)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await until(lambda: not app.state.service.reasons(), 60)
        assert (await client.post("/admin/reload", headers=ADMIN)).status_code == 200
        damaged = next(bundle.glob("*.safetensors"))
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(bytes(data))
        response = await client.post("/admin/reload", headers=ADMIN)
        assert response.status_code == 422
        assert damaged.name in response.json()["detail"]
        assert (await client.get("/readyz")).status_code == 200


def test_psc_serve_starts_answers_and_stops(tiny_bundle: Path, digits: list[bytes]) -> None:
    installed = str(Path(sys.executable).with_name("psc-serve"))
    flags = (f"--bundle={tiny_bundle}", f"--allow-factories={ALLOW}")
    with serve(*flags, ready=False, program=[installed]) as server:
        server.process.send_signal(signal.SIGHUP)  # There is nothing to reload yet.
        server.wait_ready()
        response = httpx.post(
            server.url + "/predict", content=digits[0], headers={"content-type": "image/png"}, timeout=GUARD_SECONDS
        )
        assert response.status_code == 200
        assert server.terminate() == 0
        assert any('"message":"model ready"' in line for line in server.log)
        assert not any("Traceback" in line for line in server.log)
