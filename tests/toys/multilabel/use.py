"""Fit, evaluate, save, load, serve and score a model of the added task; run in the copy of the sources."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
from importlinter.cli import lint_imports
from PIL import Image

from app.client import Client
from app.tasks.base import served_task
from psc_core import PRESETS, load_model, open_dataset
from psc_core.cli import evaluate, fit, score
from psc_core.tasks.task import task_type
from tests.served import serve
from tests.toys.marks import MARKS, marks, trained

DATA = "tests.toys.marks:marks"
FACTORY = "tests.tiny:network"
ALLOWED = ("--allow-factories", FACTORY)
COUNT = 20


def fit_and_evaluate(folder: Path, digits: str) -> None:
    job = ["--task", "multilabel", "--model", FACTORY, "--weights", str(trained(folder)), "--preset", "mnist"]
    job += ["--train", DATA, "--val", DATA, "--device", "cpu", "--minimum-dim", "8", "--coverage", "0.9"]
    assert fit.main([*job, "--out", "bundle"]) == 0
    assert Path("bundle/report.html").exists() and "4 labels" in Path("bundle/README.md").read_text()
    job = ["--bundle", "bundle", "--id", DATA, "--ood", f"digits=mnist:{digits}", "--device", "cpu", *ALLOWED]
    assert evaluate.main([*job, "--out", "evaluated"]) == 0
    measured = json.loads(Path("evaluated/report.json").read_text())
    assert measured["quality"]["accuracy"] > 0.9 and measured["auroc"]["digits"] > 0.9, measured
    for rate in ("false_alarms", "misses"):
        assert measured[rate]["count"] <= measured[rate]["calibrated_acceptance"][1], measured


def load_and_predict(digits: str, bundles: dict[str, str]) -> None:
    """A manifest names the task; bundles of other tasks are read as before."""
    assert json.loads(Path("bundle/manifest.json").read_text())["task"] == "multilabel"
    model = load_model("bundle", device="cpu", allow_factories=[FACTORY])
    assert type(model.task) is task_type("multilabel") and model.classes == MARKS
    assert model.save("again").version == model.version
    for task, bundle in bundles.items():
        assert load_model(bundle, device="cpu", allow_factories=[FACTORY]).task.name == task
    test = marks("test", PRESETS["mnist"])
    found = model.predict(next(test.batches(COUNT)).images).labels
    ends = test.offsets.tolist()
    held = [{MARKS[k] for k in test.labels[ends[i] : ends[i + 1]].tolist()} for i in range(COUNT)]
    assert sum({*labels} == wanted for labels, wanted in zip(found, held, strict=True)) >= 0.8 * COUNT
    others = open_dataset(f"mnist:{digits}", split="test", preprocess=PRESETS["mnist"])
    assert model.predict(next(others.batches(COUNT)).images).decision.count("abstain_ood") >= 0.8 * COUNT


def serve_and_ask(files: list[bytes]) -> None:
    """Through ``/predict`` and its client, the v2 protocol and the OpenAPI document."""
    model = load_model("bundle", device="cpu", allow_factories=[FACTORY])
    expected = model.predict(files)
    with serve("--bundle=bundle", f"--allow-factories={FACTORY}") as server:
        with Client(server.url) as client:
            answer = client.ask(files, explain=True)
        assert type(answer) is task_type("multilabel").response_type
        for i, each in enumerate(answer.predictions):
            got = tuple(each.labels), tuple(each.undecided), each.decision
            assert got == (expected.labels[i], expected.undecided[i], expected.decision[i])
            assert abs(each.entropy - float(expected.entropy[i])) < 1e-4
            assert each.explanation.nearest_label in MARKS

        assert httpx.get(f"{server.url}/model").json()["task"] == "multilabel"

        images = {"name": "encoded_images", "datatype": "BYTES", "shape": [len(files)]}
        call = {"inputs": [{**images, "data": [base64.b64encode(file).decode() for file in files]}]}
        outputs = httpx.post(f"{server.url}/v2/models/{model.name}/infer", json=call).json()["outputs"]
        tensors = {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in outputs}
        assert [*tensors] == [*served_task(model.task).tensors]
        np.testing.assert_array_equal(tensors["holds"], expected.decisions.holds)
        np.testing.assert_allclose(tensors["probabilities"], expected.probabilities.numpy(), atol=1e-4)

        schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
        assert {"MultilabelResponse", "ClassificationResponse", "RegressionResponse"} <= {*schemas}
        one = {"content": files[0], "headers": {"content-type": "image/png"}}
        assert httpx.post(f"{server.url}/predict?alpha=0.5", **one).json()["policy"]["alpha"] == 0.5
        assert httpx.post(f"{server.url}/predict?max_undecided=3", **one).json()["policy"]["max_undecided"] == 3
        refused = httpx.post(f"{server.url}/predict?max_width=3", **one)
        assert refused.status_code == 400 and "is a multi-label model, which has no max_width" in refused.text
        assert 'reason="undecided"' in server.metrics()


def score_a_folder(folder: Path, files: list[bytes]) -> None:
    folder.mkdir()
    for number, file in enumerate(files):
        (folder / f"{number:02}.png").write_bytes(file)
    assert score.main([str(folder), "--bundle", "bundle", "--out", "scores", "--device", "cpu", *ALLOWED]) == 0
    lines = [line for part in sorted(Path("scores").glob("*.jsonl")) for line in part.read_text().splitlines()]
    expected = load_model("bundle", device="cpu", allow_factories=[FACTORY]).predict(files)
    assert [tuple(json.loads(line)["labels"]) for line in lines] == [*expected.labels]


def main(folder: Path, digits: str, bundles: dict[str, str]) -> None:
    tests = ["tests/psc_core/tasks/test_task.py", "tests/psc_core/tasks/across", "tests/app/tasks/test_base.py"]
    subprocess.run([sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *tests], check=True)
    assert lint_imports(no_cache=True) == 0
    fit_and_evaluate(folder, digits)
    load_and_predict(digits, bundles)
    files = []
    for image in next(marks("test", PRESETS["mnist"]).batches(COUNT)).images[:, 0].numpy():
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        files.append(file.getvalue())
    serve_and_ask(files)
    score_a_folder(folder / "images", files)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
