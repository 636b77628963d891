"""A bundle as a model repository of other servers."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import ModelProto
from tritonclient.grpc import model_config_pb2, service_pb2

from app import export_cli as cli
from psc_core.errors import UsageError
from psc_core.export.folder import CLOSE, RUNTIMES, write_repository
from psc_core.export.graph import GRAPH, PIXELS, export_graphs
from psc_core.model import FittedModel, load_model
from tests.conftest import ROOT, Run

BUNDLE = ROOT / "artifacts" / "dirty-mnist-resnet18"
NAME = "dirty-mnist-resnet18"


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return load_model(BUNDLE, device="cpu")


@pytest.fixture(scope="module")
def graph(model: FittedModel) -> ModelProto:
    return export_graphs(model)[GRAPH]


@pytest.mark.parametrize("target", ["triton", "openvino"])
def test_a_graph_that_answers_otherwise_is_not_written(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setitem(CLOSE, "probabilities", -1.0)
    out, err = run(cli.main, "--bundle", BUNDLE, "--out", tmp_path, "--for", target, code=2)
    assert "DIFFERS" in out and "a runtime answers differently" in err
    assert not [*tmp_path.iterdir()]


def test_triton(model: FittedModel, tmp_path: Path, run: Run) -> None:
    words = ["--bundle", str(BUNDLE), "--out", str(tmp_path), "--for", "triton"]
    out, _ = run(cli.main, *words)
    assert out.endswith(f"next: tritonserver --model-repository {tmp_path}\n")
    assert f"holds {NAME}/config.pbtxt and {NAME}/1/model.onnx already" in run(cli.main, *words, code=2)[1]
    assert sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.*") if file.is_file()) == [
        Path(NAME, "1", "model.onnx"),
        Path(NAME, "config.pbtxt"),
    ]
    config = text_format.Parse((tmp_path / NAME / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert (config.name, config.platform, config.max_batch_size) == (NAME, "onnxruntime_onnx", 64)
    assert config.HasField("dynamic_batching")
    session = onnxruntime.InferenceSession(tmp_path / NAME / "1" / "model.onnx")
    assert [each.name for each in session.get_inputs()] == [each.name for each in config.input] == [PIXELS]
    assert list(config.input[0].dims) == [28, 28, 1]
    kinds = {"tensor(float)": "FP32", "tensor(int64)": "INT64", "tensor(bool)": "BOOL", "tensor(string)": "STRING"}
    found = {each.name: each for each in session.get_outputs()}
    assert found.keys() == {each.name for each in config.output}
    for each in config.output:
        assert model_config_pb2.DataType.Name(each.data_type) == f"TYPE_{kinds[found[each.name].type]}"
        batched = [64, *(each.reshape.shape if each.HasField("reshape") else each.dims)]
        assert batched[1:] == found[each.name].shape[1:]
    # Clients of our own v2 routes find the same names and types.
    ours = {**model.task.tensors, "label": "STRING"}
    shared = {
        each.name: model_config_pb2.DataType.Name(each.data_type)[5:] for each in config.output if each.name in ours
    }
    assert shared == {name: kind for name, kind in ours.items() if name in found}
    assert ours.keys() - found.keys() <= {"aleatoric", "map"}
    labels = session.run(["label"], {PIXELS: np.zeros((2, 28, 28, 1), np.uint8)})[0]
    prediction = model.predict([np.zeros((28, 28), np.uint8)])
    assert list(labels) == [prediction.labels[0]] * 2  # type: ignore[attr-defined]
    assert service_pb2.ModelInferRequest.InferInputTensor(name=PIXELS, datatype="UINT8", shape=[1, 28, 28, 1])


def test_names_in_other_scripts(model: FittedModel, graph: ModelProto, tmp_path: Path) -> None:
    write_repository(replace(model, name='Zäh"len 数'), copy.deepcopy(graph), tmp_path, triton=True)
    text = (tmp_path / 'Zäh"len 数' / "config.pbtxt").read_text(encoding="utf-8")
    assert text_format.Parse(text, model_config_pb2.ModelConfig()).name == 'Zäh"len 数'


def test_openvino_model_server(model: FittedModel, graph: ModelProto, tmp_path: Path) -> None:
    write_repository(model, graph, tmp_path, triton=False)
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("*.*") if file.is_file()] == [
        Path(NAME, "1", "model.onnx")
    ]
    answers = RUNTIMES["openvino"](tmp_path / NAME / "1" / "model.onnx")(np.zeros((2, 28, 28, 1), np.uint8))
    assert "label" not in answers and len(answers["decision"]) == 2
    with pytest.raises(UsageError, match="can be no folder's name"):
        write_repository(replace(model, name="a/b"), graph, tmp_path, triton=True)
