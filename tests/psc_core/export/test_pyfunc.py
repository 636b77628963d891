"""A bundle as an MLflow model, as MLflow loads and serves it."""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pandas
import pytest
import torch
from starlette.testclient import TestClient

from psc_core import __version__
from psc_core.errors import BundleError, ImageError, UsageError
from psc_core.export.pyfunc import BUNDLE, COLUMN, save_pyfunc
from psc_core.model import FittedModel, load_model
from psc_core.scoring import NOT_FINITE
from psc_core.tasks.base import Outputs
from tests.conftest import ROOT, SHIPPED_BUNDLE

pytestmark = [  # MLflow's own, when it is imported, and of a table that it compares with a range
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
    pytest.mark.filterwarnings("ignore:Operation with range is deprecated"),
]

EXAMPLES = sorted((SHIPPED_BUNDLE / "examples").glob("*.png"))
FILES = [file.read_bytes() for file in EXAMPLES]
TEXTS = [base64.b64encode(data).decode() for data in FILES]
DECISIONS = ["abstain_ambiguous", "accept", "abstain_ood", "abstain_ood"]


@pytest.fixture(scope="module")
def mlflow() -> Any:
    """Imported while a test runs, because MLflow then reports nothing to its makers."""
    return pytest.importorskip("mlflow.pyfunc", reason="needs the extra psc[mlflow]")


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return load_model(SHIPPED_BUNDLE, device="cpu")


@pytest.fixture(scope="module")
def folder(mlflow: Any, model: FittedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlflow") / "digits"
    save_pyfunc(model, out)
    return out


@pytest.fixture(scope="module")
def loaded(mlflow: Any, folder: Path) -> Any:
    return mlflow.load_model(str(folder))


@pytest.fixture(scope="module")
def client(loaded: Any) -> TestClient:
    """MLflow's server, which ``mlflow models serve`` starts."""
    from mlflow.pyfunc.scoring_server import init

    return TestClient(init(loaded))


def served(model: FittedModel, images: Sequence[bytes], **thresholds: float) -> list[dict[str, Any]]:
    """The predictions of ``POST /predict``, as its JSON has them."""
    outputs = model.outputs(model.compute(images).packed.numpy())
    policy = model.calibration.changed(model.policy, thresholds)
    documents = model.calibration.decide(outputs, policy).documents(outputs, model.classes)
    found: list[dict[str, Any]] = orjson.loads(orjson.dumps(documents, option=orjson.OPT_SERIALIZE_NUMPY))
    return found


def assert_same(got: Any, expected: Any, within: float = 1e-5) -> None:
    """Numbers may differ by rounding; everything else is equal."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(got[name], value, within)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, within)
    elif isinstance(expected, float):
        assert math.isclose(got, expected, rel_tol=within, abs_tol=within)
    else:
        assert got == expected and type(got) is type(expected)


@pytest.mark.thorough
def test_a_fresh_process_answers_as_the_service(folder: Path, model: FittedModel) -> None:
    code = """
import json, mlflow.pyfunc, pandas, pathlib, sys
model = mlflow.pyfunc.load_model(sys.argv[1])
files = [pathlib.Path(file).read_bytes() for file in sys.argv[2:]]
print(json.dumps(model.predict(pandas.DataFrame({"image": files}))))
"""
    words = [sys.executable, "-c", code, str(folder), *map(str, EXAMPLES)]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    answers = json.loads(found.stdout)
    assert [each["decision"] for each in answers] == DECISIONS
    assert_same(answers, served(model, FILES))


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_split": {"columns": [COLUMN], "data": [[text] for text in TEXTS]}},
        {"dataframe_records": [{COLUMN: text} for text in TEXTS]},
        {"dataframe_records": [{COLUMN: base64.encodebytes(data).decode()} for data in FILES]},  # in lines
        {"inputs": {COLUMN: TEXTS}},
        {"instances": [{COLUMN: text} for text in TEXTS]},
    ],
    ids=["split", "records", "lines", "inputs", "instances"],
)
def test_every_form_of_request(client: TestClient, model: FittedModel, body: dict[str, Any]) -> None:
    answer = client.post("/invocations", json=body)
    assert answer.status_code == 200 and list(answer.json()) == ["predictions"]
    assert_same(answer.json()["predictions"], served(model, FILES))


def request(*texts: Any, **params: Any) -> dict[str, Any]:
    return {"dataframe_split": {"columns": [COLUMN], "data": [[text] for text in texts]}, "params": params}


def test_thresholds_are_parameters(client: TestClient, loaded: Any, model: FittedModel) -> None:
    schema = {each.name: each.default for each in loaded.metadata.get_params_schema()}
    assert schema == {name: getattr(model.policy, name) for name in ("alpha", "ambiguity_threshold", "coverage")}
    for given in ({"alpha": 0.9}, {"ambiguity_threshold": 1e-6}, {"coverage": 0.999}):
        answers = client.post("/invocations", json=request(*TEXTS, **given)).json()["predictions"]
        assert_same(answers, served(model, FILES, **given))
        assert answers != loaded.predict(pandas.DataFrame({COLUMN: FILES})), given
    few = loaded.predict(pandas.DataFrame({COLUMN: FILES}), params={"alpha": 0.9})
    assert [each["decision"] for each in few] == ["abstain_ood"] * 4


NO_FILES = ("not base64", "héé", str(EXAMPLES[0]), "data:image/png;base64,AAAA", 3, None)
"""Cells; a path is none either: a server must not read its own files for a client."""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (request(TEXTS[0], alpha=2), "parameter alpha: expected less than 1"),
        (request(TEXTS[0], alpha=1e-5), "expected alpha ≥ 1/(n + 1)"),
        (request(TEXTS[0], coverage=0.99999), "expected coverage ≤ n/(n + 1)"),
        (request(TEXTS[0], ambiguity_threshold=-2.0), "parameter ambiguity_threshold: expected at least -1"),
        (request(TEXTS[0], alpha="much"), "alpha"),
        *((request(TEXTS[0], cell), "image 1: expected base64") for cell in NO_FILES),
    ],
)
def test_thresholds_and_cells_that_are_refused(client: TestClient, body: dict[str, Any], why: str) -> None:
    answer = client.post("/invocations", json=body)
    assert answer.status_code == 400 and why in answer.json()["message"]


@pytest.mark.parametrize("data", [b"no image", b"", FILES[0][:60]], ids=["text", "empty", "cut"])
def test_a_file_that_is_no_image_is_refused_in_our_words(
    client: TestClient, model: FittedModel, mlflow: Any, loaded: Any, data: bytes
) -> None:
    with pytest.raises(ImageError) as reason:
        model.preprocess.from_bytes(data)
    text = f"image 1: {reason.value}"
    answer = client.post("/invocations", json=request(TEXTS[0], base64.b64encode(data).decode()))
    assert answer.status_code == 400 and answer.json()["message"].endswith(f"Error: {text}")
    with pytest.raises(sys.modules["mlflow.exceptions"].MlflowException) as refused:
        loaded.predict(pandas.DataFrame({COLUMN: [FILES[0], data]}))
    assert str(refused.value) == text


def test_outputs_that_are_not_finite(client: TestClient, model: FittedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(self: FittedModel, images: torch.Tensor) -> Outputs[torch.Tensor]:
        packed = torch.zeros(len(images), len(self.score_names) + self.num_probabilities + len(self.checks))
        packed[2, 0] = torch.nan
        return self.outputs(packed)

    monkeypatch.setattr(FittedModel, "compute", compute)
    answer = client.post("/invocations", json=request(*TEXTS))
    assert answer.status_code == 400 and answer.json()["message"].endswith(f"image 2: {NOT_FINITE}")


def test_no_images(loaded: Any) -> None:
    assert loaded.predict(pandas.DataFrame({COLUMN: []}, dtype=object)) == []


def test_the_folder_holds_the_bundle_and_no_code(folder: Path, model: FittedModel, client: TestClient) -> None:
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    ours = {name.removeprefix(f"data/{BUNDLE}/") for name in files if name.startswith("data/")}
    assert {Path(name).suffix for name in ours} == {".json", ".safetensors"}
    texts = {"MLmodel", "conda.yaml", "input_example.json", "python_env.yaml", "requirements.txt"}
    assert {name for name in files if not name.startswith("data/")} == {*texts, "serving_input_example.json"}
    assert load_model(folder / "data" / BUNDLE, device="cpu").version == model.version
    about = (folder / "MLmodel").read_text()
    assert "loader_module: psc_core.export.pyfunc" in about and "code: null" in about
    assert f"name: {model.name}" in about and f"version: {model.version}" in about
    assert str(ROOT) not in about and str(folder.parent) not in about
    assert f"psc=={__version__}" in (folder / "requirements.txt").read_text().splitlines()
    example = json.loads((folder / "serving_input_example.json").read_text())
    assert len(client.post("/invocations", json=example).json()["predictions"]) == 1


def test_an_altered_bundle_is_refused(mlflow: Any, folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = copy / "data" / BUNDLE / "head.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"head\.safetensors"):
        mlflow.load_model(str(copy))


def test_a_bundle_with_a_factory_is_refused(mlflow: Any, folder: Path, angle_bundle: Path, tmp_path: Path) -> None:
    """Nobody allowed it, so what a folder names is not imported."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shutil.rmtree(copy / "data" / BUNDLE)
    shutil.copytree(angle_bundle, copy / "data" / BUNDLE)
    with pytest.raises(BundleError, match=r"tests\.tiny:network"):
        mlflow.load_model(str(copy))


def test_a_regression_with_a_network_of_ones_own(mlflow: Any, angle_bundle: Path, tmp_path: Path) -> None:
    """The network travels as a graph, so that nobody has to allow its factory."""
    model = load_model(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    save_pyfunc(model, tmp_path / "angles")
    assert f"psc[onnx]=={__version__}" in (tmp_path / "angles" / "requirements.txt").read_text().splitlines()
    loaded = mlflow.load_model(str(tmp_path / "angles"))
    schema = {each.name: each.default for each in loaded.metadata.get_params_schema()}
    assert schema == {name: getattr(model.policy, name) for name in ("alpha", "max_width", "coverage")}
    answers = loaded.predict(pandas.DataFrame({COLUMN: FILES}))
    assert_same(answers, served(model, FILES), within=1e-3)
    narrow = loaded.predict(pandas.DataFrame({COLUMN: FILES}), params={"max_width": 1e-3, "alpha": 0.02})
    assert_same(narrow, served(model, FILES, max_width=1e-3, alpha=0.02), within=1e-3)
    assert "abstain_uncertain" in {each["decision"] for each in narrow}


def test_a_folder_with_files_is_left_alone(mlflow: Any, model: FittedModel, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="is not empty; give a new folder"):
        save_pyfunc(model, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_model_is_written_over_by_request(mlflow: Any, model: FittedModel, folder: Path, tmp_path: Path) -> None:
    out = shutil.copytree(folder, tmp_path / "model")
    (out / "old").touch()
    with pytest.raises(UsageError, match="is not empty; give a new folder"):
        save_pyfunc(model, out)
    save_pyfunc(model, out, overwrite=True)
    assert (out / "MLmodel").is_file() and not (out / "old").exists()


def test_without_mlflow(model: FittedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow.pyfunc", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"needs mlflow.*; pip install 'psc\[mlflow\]'"):
        save_pyfunc(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
