"""A task that is registered at run time is fitted, saved, loaded, measured and served as the two that come with psc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from app.main import create_app
from app.settings import load_settings
from psc_core import PRESETS, load_model, open_dataset
from psc_core.bundle import read_bundle
from psc_core.data.dataset import ImageDataset
from psc_core.data.loaders import LoaderDescription
from psc_core.errors import BundleError
from psc_core.evaluation.evaluate import evaluate
from psc_core.fit import fit
from psc_core.heads.base import ClassifierData
from psc_core.heads.duq import DuqHead
from psc_core.tasks import TASKS
from psc_core.tasks.classification import Classification
from tests.app.support import until
from tests.conftest import SHIPPED_BUNDLE, TinyJob


class Rings(DuqHead):
    kind = "rings"

    @classmethod
    def fit(cls, data: ClassifierData) -> Rings:
        fitted = super().fit(data)
        return cls(fitted.state_dict(), record=fitted.record)


class Triage(Classification):
    """A classifier one of whose classes is urgent, with a head of its own; metrics count urgent images and others."""

    name = "triage"
    noun = "triage"
    heads: ClassVar = {Rings.kind: Rings}

    urgent: str

    @classmethod
    def of_images(cls, train: ImageDataset) -> Triage:
        return cls(urgent=train.classes[0])

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("urgent" if label == self.urgent else "other" for label in classes)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def bundle(tiny_job: TinyJob, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("triage")
    preprocess = PRESETS["mnist"]
    splits = (open_dataset(f"mnist:{data_root}", split=split, preprocess=preprocess) for split in ("train", "val"))
    settings = {"layer": "4", "device": "cpu", "predictions": "psc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, Triage.name, Triage)
        model = fit("triage", tiny_job.net, tuple(splits), LoaderDescription.of(None, None, None), "triage", settings)
        model.save(folder)
        yield folder


def test_a_bundle_names_it(bundle: Path, data_root: Path) -> None:
    assert read_bundle(bundle).manifest.task == Triage(urgent="0")
    model = load_model(bundle, device="cpu")
    assert isinstance(model.task, Triage) and model.task.urgent == "0"
    assert isinstance(model.pipeline.scorer.head, Rings)
    images = open_dataset(f"mnist:{data_root}", split="test", preprocess=model.preprocess)
    found = evaluate(model, images, {}).report.to_json()
    assert found["images"] == len(images) and found["classification"]["psc"]["accuracy"] > 0.5


@pytest.mark.anyio
async def test_it_is_served(bundle: Path) -> None:
    app = create_app(load_settings({"bundle": f"m={bundle}", "device": "cpu"}))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await until(lambda: not app.state.service.reasons(), 60)
        image, of = (SHIPPED_BUNDLE / "examples" / "clean.png").read_bytes(), {"Content-Type": "image/png"}
        answer = await client.post("/predict?explain=true&top_k=2", content=image, headers=of)
        assert answer.status_code == 200, answer.text
        assert answer.json()["urgent"] == "0" and len(answer.json()["predictions"][0]["top"]) == 2
        metrics = (await client.get("/metrics")).text
        assert 'psc_predictions_total{label="other",model="m"} 1.0' in metrics


def test_it_is_gone_where_it_is_not_registered(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TASKS, Triage.name)
    with pytest.raises(BundleError, match="task"):
        load_model(bundle)
