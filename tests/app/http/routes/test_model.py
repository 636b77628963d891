"""``GET /model`` and ``GET /models/{name}``."""

from __future__ import annotations

import pytest

from app.http.model import ModelDocument
from tests.app.fakes import FakeModel, FakeValueModel
from tests.app.support import running

pytestmark = pytest.mark.anyio


async def test_the_model_document() -> None:
    async with running({"m": FakeModel(), "n": FakeModel("v9")}) as app:
        document = ModelDocument.model_validate_json((await app.client.get("/model")).content)
        assert not document.feedback  # There is no log.
        assert (document.name, document.version, document.models) == ("m", "v1", ["m", "n"])
        assert sum(document.calibration.ood_score.counts) == document.calibration.images == 99
        assert len(document.calibration.ood_score.edges) == len(document.calibration.ood_score.counts) + 1
        quantiles = document.calibration.entropy_quantiles
        assert quantiles is not None and quantiles == pytest.approx([percent / 100 for percent in range(101)], abs=1e-6)
        assert document.checks == []
        assert document.report == {"metrics": {"accuracy": 0.99}}
        (headline,) = document.notes
        assert "nothing shows how many accepted images are wrong" in headline  # The fake has no risk.
        assert (await app.client.get("/models/n")).json()["version"] == "v9"
        assert (await app.client.get("/models/x")).status_code == 404


async def test_the_model_document_says_that_no_image_is_called_ambiguous() -> None:
    async with running(ambiguity_threshold=9.0) as app:
        headline, note = (await app.client.get("/model")).json()["notes"]
        assert "at most 30 % are wrong" in headline  # The last bound of the fake.
        assert note == "no image is called ambiguous: no entropy is above 9 nats"


async def test_a_regression_has_no_entropies() -> None:
    async with running({"m": FakeValueModel()}) as app:
        document = ModelDocument.model_validate_json((await app.client.get("/model")).content)
        assert document.calibration.entropy_quantiles is None
