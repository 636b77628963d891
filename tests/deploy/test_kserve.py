"""``deploy/kserve`` and the KServe SDK: its models know every field, its client gets the answers of ``/predict``."""

from __future__ import annotations

import re
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import serve

kserve = pytest.importorskip("kserve", reason="the KServe SDK is not installed")
kubernetes = pytest.importorskip("kubernetes.client")

FOLDER = ROOT / "deploy" / "kserve"
KINDS = {"ServingRuntime": "V1alpha1ServingRuntime", "InferenceService": "V1beta1InferenceService"}
EXAMPLES = sorted((ROOT / "artifacts" / "dirty-mnist-resnet18" / "examples").glob("*.png"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def model_of(name: str) -> Any:
    """The SDK's or Kubernetes' class of this name."""
    return getattr(kserve, name, None) or getattr(kubernetes, name, None)


def check(kind: str, value: Any, where: str) -> None:
    """Fail on a field that a model of the SDK does not have, at any depth."""
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), where
        for index, each in enumerate(value):
            check(inner[1], each, f"{where}[{index}]")
    elif inner := re.fullmatch(r"dict\((?:str, )(.+)\)", kind):
        assert isinstance(value, dict), where
        for key, each in value.items():
            check(inner[1], each, f"{where}.{key}")
    elif (model := model_of(kind)) is not None and hasattr(model, "attribute_map"):
        assert isinstance(value, dict), where
        types = {model.attribute_map[name]: each for name, each in model.openapi_types.items()}
        for key, each in value.items():
            assert key in types, f"{where} has no field {key}"
            check(types[key], each, f"{where}.{key}")
    elif kind in ("str", "int", "bool"):
        assert isinstance(value, {"str": str, "int": int, "bool": bool}[kind]), f"{where}: {value!r} is no {kind}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_fields_are_those_of_the_sdk(path: Any) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    check(KINDS[document["kind"]], document, document["kind"])


def test_rejects_a_field_that_is_not() -> None:
    document = yaml.safe_load((FOLDER / "servingruntime.yaml").read_text(encoding="utf-8"))
    document["spec"]["containers"][0]["arg"] = []
    with pytest.raises(AssertionError, match=r"containers\[0\] has no field arg"):
        check(KINDS["ServingRuntime"], document, "ServingRuntime")


@pytest.mark.anyio
async def test_arguments_of_the_runtime_answer_kserves_client() -> None:
    runtime = yaml.safe_load((FOLDER / "servingruntime.yaml").read_text(encoding="utf-8"))
    service = yaml.safe_load((FOLDER / "inferenceservice.yaml").read_text(encoding="utf-8"))
    name = service["metadata"]["name"]
    (container,) = runtime["spec"]["containers"]
    given = [each.replace("{{.Name}}", name).replace("/mnt/models", str(SHIPPED_BUNDLE)) for each in container["args"]]
    flags = [each for each in given if not each.startswith(("--port=", "--host="))]
    assert len(given) - len(flags) == 2
    with serve(*flags) as server:
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        assert await client.is_server_ready(server.url)
        assert await client.is_model_ready(server.url, name)
        files = [path.read_bytes() for path in EXAMPLES]
        tensor = kserve.InferInput("encoded_images", [len(files)], "BYTES")
        tensor.set_data_from_numpy(np.array(files, dtype=object), binary_data=True)
        answer = await client.infer(server.url, kserve.InferRequest(name, [tensor]), model_name=name)
        got = {output.name: output.as_numpy().reshape(len(files), -1).tolist() for output in answer.outputs}
        for file, p_value, probabilities in zip(files, got["ood_p_value"], got["probabilities"], strict=True):
            own = httpx.post(server.url + "/predict", content=file, headers={"content-type": "image/png"})
            (prediction,) = own.json()["predictions"]
            np.testing.assert_allclose(p_value, [prediction["ood_p_value"]], rtol=1e-5)
            np.testing.assert_allclose(probabilities, prediction["probabilities"], rtol=1e-3, atol=1e-5)
        await client.close()
        assert server.terminate() == 0
