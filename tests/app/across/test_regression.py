"""A regression, served: ``/predict``, v2 and the client give what ``PSCRegressor.predict`` gives."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.client import AsyncClient, BadAnswer
from app.main import create_app
from app.settings import load_settings
from psc_core import PSCRegressor
from psc_core.answers import REGRESSION_SCORES, RegressionResponse
from tests.app.across.test_real_bundle import ALLOW, digits
from tests.app.support import until

__all__ = ["digits"]


@asynccontextmanager
async def serving(bundle: Path, **settings: Any) -> AsyncIterator[tuple[Any, httpx.ASGITransport]]:
    app = create_app(load_settings({"bundle": f"m={bundle}", "device": "cpu", "allow_factories": ALLOW, **settings}))
    async with app.router.lifespan_context(app):
        await until(lambda: not app.state.service.reasons(), 60)
        yield app, httpx.ASGITransport(app)


def parts(files: list[bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", (f"{k}.png", data)) for k, data in enumerate(files)]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["blr", "dve"])
async def test_answers_are_those_of_predict(
    kind: str, angle_bundle: Path, neighbours_bundle: Path, digits: list[bytes]
) -> None:
    bundle = {"blr": angle_bundle, "dve": neighbours_bundle}[kind]
    model = PSCRegressor.load(bundle, device="cpu", allow_factories=(ALLOW,))
    expected = model.predict(digits)
    async with (
        serving(bundle) as (_, transport),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
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
        page = (await client.get("/")).text
        assert "page.js" in page


@pytest.mark.anyio
async def test_a_width_of_the_request_decides(angle_bundle: Path, digits: list[bytes]) -> None:
    async with (
        serving(angle_bundle, max_width=1e9) as (_, transport),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        wide = (await client.post("/predict", files=parts(digits[:9]))).json()
        narrow = (await client.post("/predict?max_width=0.001&alpha=0.02", files=parts(digits[9:18]))).json()
        assert wide["policy"]["max_width"] == 1e9 and narrow["policy"] == {
            **wide["policy"],
            "max_width": 0.001,
            "alpha": 0.02,
        }
        assert "abstain_uncertain" not in {each["decision"] for each in wide["predictions"]}
        assert "accept" not in {each["decision"] for each in narrow["predictions"]}
        for query in ("top_k=2", "ambiguity_threshold=1"):
            refused = await client.post(f"/predict?{query}", files=parts(digits[:1]))
            assert refused.status_code == 400 and query.partition("=")[0] in refused.json()["detail"]
        text = (await client.get("/metrics")).text
        assert 'psc_predictions_total{label="angle",model="m"} 18.0' in text
        uncertain = [each["decision"] for each in narrow["predictions"]].count("abstain_uncertain")
        assert f'psc_abstained_total{{model="m",reason="uncertain"}} {uncertain}.0' in text
        assert 'reason="ambiguous"' not in text and "psc_predictive_entropy_nats_bucket" not in text


@pytest.mark.anyio
async def test_v2_gives_the_numbers(angle_bundle: Path, digits: list[bytes]) -> None:
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=(ALLOW,))
    expected = model.predict(digits[:5])
    async with (
        serving(angle_bundle) as (_, transport),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        outputs = {each["name"]: each for each in (await client.get("/v2/models/m")).json()["outputs"]}
        assert list(outputs) == [*REGRESSION_SCORES, "lower", "upper", "checks", "is_ood", "map"]
        sizes = [len(data).to_bytes(4, "little") + data for data in digits[:5]]
        binary = b"".join(sizes)
        tensor = {
            "name": "encoded_images",
            "datatype": "BYTES",
            "shape": [5],
            "parameters": {"binary_data_size": len(binary)},
        }
        head = json.dumps({"inputs": [tensor]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = (await client.post("/v2/models/m/infer", content=head + binary, headers=headers)).json()
        got = {each["name"]: np.array(each["data"]) for each in answer["outputs"]}
        for name in REGRESSION_SCORES:
            np.testing.assert_allclose(got[name], expected.outputs[name].numpy(), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(got["upper"], expected.interval[:, 1].numpy(), rtol=1e-3, atol=1e-3)
        for name, status in (("mean", 200), ("label", 400), ("probabilities", 400)):
            head = json.dumps({"inputs": [tensor], "outputs": [{"name": name}]}).encode()
            headers = {"Inference-Header-Content-Length": str(len(head))}
            response = await client.post("/v2/models/m/infer", content=head + binary, headers=headers)
            assert response.status_code == status, response.text


@pytest.mark.anyio
async def test_the_client_gives_typed_numbers(angle_bundle: Path, tiny_bundle: Path, digits: list[bytes]) -> None:
    async with serving(angle_bundle) as (_, transport), AsyncClient("http://test", transport=transport) as client:
        answer = await client.predict_values(digits[:3], max_width=1.0, explain=True)
        assert len(answer.predictions) == 3 and answer.policy.max_width == 1.0
        assert answer.predictions[0].explanation is not None
        with pytest.raises(BadAnswer, match="use predict_values"):
            await client.predict(digits[:1])
    async with serving(tiny_bundle) as (_, transport), AsyncClient("http://test", transport=transport) as client:
        with pytest.raises(BadAnswer, match="use predict"):
            await client.predict_values(digits[:1])
