"""Bundles that ``psc-fit`` made, served: the answers are those of ``predict``, however they are batched."""

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from app.main import create_app
from app.settings import load_settings
from psc_core import PSC, PSCRegressor
from psc_core.answers import REGRESSION_SCORES, ClassificationResponse, RegressionResponse
from tests.app.support import PNG, until
from tests.encoded import encode
from tests.opened import opened
from tests.served import HTTP, serve

ALLOW = "tests.tiny:network"


ADMIN = {"x-api-key": "root"}


@pytest.fixture(scope="module")
def digits() -> list[bytes]:
    sets = (opened("mnist").subset(torch.arange(40)), opened("fashion-mnist").subset(torch.arange(24)))
    return [encode(data.image(index)[0]) for data in sets for index in range(len(data))]


@asynccontextmanager
async def serving(bundle: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    options = {"bundle": f"tiny={bundle}", "device": "cpu", "allow_factories": ALLOW, "admin_keys": "root"}
    app = create_app(load_settings({**options, **settings}))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        await until(lambda: not app.state.service.reasons(), 60)
        yield client


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
    async with serving(tiny_bundle) as client:

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
    async with serving(shipped_bundle, backend="folded") as client:
        for count in range(8):
            for images in (examples, *([image] for image in examples)):
                decisions = [each["decision"] for each in (await answer(client, images, query))["predictions"]]
                assert count or len(images) == 1 or decisions == ["accept", "abstain_ambiguous", "abstain_ood"]
        live = (await client.get("/models/tiny/live")).json()
        assert (live["images"], live["drift_alarms"], live["drift_active"]) == (0 if query else 3, 0, False)


@pytest.mark.anyio
async def test_a_bundle_altered_on_disk_changes_nothing_when_reloaded(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    async with serving(bundle) as client:
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
        response = HTTP.post(server.url + "/predict", content=digits[0], headers=PNG)
        assert response.status_code == 200
        assert server.terminate() == 0
        assert any('"message":"model ready"' in line for line in server.log)
        assert not any("Traceback" in line for line in server.log)


def parts(files: list[bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", (f"{k}.png", data)) for k, data in enumerate(files)]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["blr", "dve"])
async def test_numbers_are_predicted(
    kind: str, angle_bundle: Path, neighbours_bundle: Path, digits: list[bytes]
) -> None:
    bundle = {"blr": angle_bundle, "dve": neighbours_bundle}[kind]
    model = PSCRegressor.load(bundle, device="cpu", allow_factories=(ALLOW,))
    expected = model.predict(digits)
    async with serving(bundle) as client:
        response = await client.post("/predict", files=parts(digits))
        assert response.status_code == 200, response.text
        document = RegressionResponse.model_validate_json(response.content)
        assert document.target == model.target and document.policy == model.policy
        for row, got in enumerate(document.predictions):
            for name in REGRESSION_SCORES:
                assert getattr(got, name) == pytest.approx(float(expected.outputs[name][row]), rel=1e-3, abs=1e-3)
            assert (got.lower, got.upper) == pytest.approx(tuple(expected.interval[row].tolist()), rel=1e-3, abs=1e-3)
            assert got.decision == expected.decision[row] and got.is_ood == bool(expected.is_ood[row])
            assert got.checks is not None and set(got.checks) == set(model.checks)
        assert {"accept", "abstain_ood"} <= {got.decision for got in document.predictions}

        explained = await client.post("/predict?explain=true", files=parts(digits[:4]))
        told = RegressionResponse.model_validate_json(explained.content).predictions[0].explanation
        assert told is not None and told.nearest_bin in model.classes
        assert len(told.bin_distances) == len(model.classes)
        if kind == "blr":
            assert told.nearest_examples is None and "nearest_examples" not in explained.text
        else:
            assert told.nearest_examples is not None
            assert tuple(near.layer for near in told.nearest_examples) == model.head_layers
            assert sum(near.weight for near in told.nearest_examples) == pytest.approx(1.0, abs=1e-5)
            for near in told.nearest_examples:
                distances = [each.distance for each in near.examples]
                assert len(distances) == 3 and distances == sorted(distances)

        summary = (await client.get("/model")).json()
        assert summary["target"] == {"name": "angle", "unit": "degrees"}
        assert set(summary["policy"]) == {"alpha", "max_width", "coverage"}
        assert summary["calibration"]["images"] == len(model.calibration)


@pytest.mark.anyio
async def test_a_width_of_the_request_decides(angle_bundle: Path, digits: list[bytes]) -> None:
    async with serving(angle_bundle, max_width=1e9) as client:
        wide = (await client.post("/predict", files=parts(digits[:9]))).json()
        narrow = (await client.post("/predict?max_width=0.001&alpha=0.02", files=parts(digits[9:18]))).json()
        assert wide["policy"]["max_width"] == 1e9
        assert narrow["policy"] == {**wide["policy"], "max_width": 0.001, "alpha": 0.02}
        assert "abstain_uncertain" not in {each["decision"] for each in wide["predictions"]}
        assert "accept" not in {each["decision"] for each in narrow["predictions"]}
        text = (await client.get("/metrics")).text
        assert 'psc_predictions_total{label="angle",model="tiny"} 18.0' in text
        uncertain = [each["decision"] for each in narrow["predictions"]].count("abstain_uncertain")
        assert f'psc_abstained_total{{model="tiny",reason="uncertain"}} {uncertain}.0' in text
        assert 'reason="ambiguous"' not in text and "psc_predictive_entropy_nats_bucket" not in text


@pytest.mark.anyio
async def test_an_answer_names_the_reviewed_images_it_is_like(shipped_bundle: Path, tmp_path: Path) -> None:
    digits = opened("mnist")
    upright = digits.image(0)[0]
    sevens = [at for at in range(120, 800) if digits.first_labels()[at] == 7][:24]
    turned = [np.ascontiguousarray(digits.image(at)[0][::-1, ::-1]) for at in sevens]
    pairs = [(torch.from_numpy(np.stack(turned[:20]))[:, None], torch.zeros(20, dtype=torch.int64))]
    model = PSC.load(shipped_bundle, device="cpu").learn(pairs, digits.subset(torch.arange(120)))
    model.save(tmp_path / "learnt")
    files = [encode(image) for image in (*turned[20:], upright)]
    async with serving(tmp_path / "learnt") as client:
        *unknown, known = (await answer(client, files, "?explain=true"))["predictions"]
        told = [each["explanation"]["reviewed"] for each in unknown if each["decision"] == "abstain_ood"]
        assert len(told) >= 3 and known["explanation"].get("reviewed") is None
        for each in told:
            assert (each["name"], each["images"], each["day"]) == ("0", 20, None)
            assert [near["label"] for near in each["nearest"]] == ["0"] * 3 and each["nearest"][0]["png"]
        assert unknown[0]["checks"]["reviewed"] < 0.05 < known["checks"]["reviewed"]
        assert (await client.get("/model")).json()["checks"] == ["texture", "content", "reviewed"]
