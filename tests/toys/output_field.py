"""A score for each task: the probability of the most probable class minus that of the next; how much is noise."""

NAMES = {"classification": "max_probability_gap", "regression": "noise_fraction"}

EDITS = {
    "classification": {
        "psc_core/tasks/classification/answer.py": [
            (
                "    gates: GatePValues = None\n",
                """    max_probability_gap: Score = Field(description="Confidence minus the next probability.")
    gates: GatePValues = None
""",
            )
        ],
        "psc_core/tasks/classification/heads/base.py": [
            (
                "    return Scored({",
                """    first, second = probabilities.topk(2, dim=1).values.unbind(1)
    return Scored({"max_probability_gap": first - second, """,
            )
        ],
        "docs/service.md": [
            (
                "| `label`, `class_index`, `confidence` |",
                "| `max_probability_gap` | [0, 1] | probability of the most probable class minus that of the next |\n"
                "| `label`, `class_index`, `confidence` |",
            )
        ],
    },
    "regression": {
        "psc_core/tasks/regression/answer.py": [
            (
                "    gates: GatePValues = None\n",
                """    noise_fraction: Score = Field(description="Fraction of the variance that is noise.")
    gates: GatePValues = None
""",
            )
        ],
        "psc_core/tasks/regression/heads/base.py": [
            (
                "        served = mean if output is None else output[:, 0]\n",
                """        served = mean if output is None else output[:, 0]
        fraction = aleatoric.square() / (aleatoric.square() + epistemic.square())
""",
            ),
            ('"epistemic": epistemic}', '"epistemic": epistemic, "noise_fraction": fraction}'),
        ],
        "docs/service.md": [
            (
                "| `lower`, `upper` | the target's |",
                "| `noise_fraction` | [0, 1] | fraction of the variance that is noise |\n"
                "| `lower`, `upper` | the target's |",
            )
        ],
    },
}

PROGRAM = """
import io, json, sys, time
import numpy as np
from fastapi.testclient import TestClient
from PIL import Image

from app.main import create_app
from app.settings import load_settings
from psc_core import load_model
from psc_core.tasks.answer import response_type

name, own, bundles = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
image = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
file = io.BytesIO()
Image.fromarray(image).save(file, "PNG")

def expected(task, prediction):
    if task == "regression":
        noise, other = (float(part[0]) ** 2 for part in (prediction.aleatoric, prediction.epistemic))
        return noise / (noise + other)
    first, second = prediction.probabilities.topk(2).values[0]
    return float(first - second)

for task, bundle in bundles.items():
    model = load_model(bundle, device="cpu", allow_factories=["tests.tiny:network"])
    prediction = model.predict([image])
    assert (name in dir(prediction)) == (task == own)
    settings = {"bundle": bundle, "device": "cpu", "max_batch_size": 1, "allow_factories": ["tests.tiny:network"]}
    with TestClient(create_app(load_settings(settings))) as client:
        deadline = time.monotonic() + 60
        while client.get("/readyz").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        answer = client.post("/predict", content=file.getvalue(), headers={"content-type": "image/png"})
        assert answer.status_code == 200, answer.text
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        outputs = [each["name"] for each in client.get(f"/v2/models/{model.name}").json()["outputs"]]
    answered = response_type(answer.json()).model_validate_json(answer.content).predictions[0]
    members = answer.json()["predictions"][0]
    places = members, schemas[type(answered).__name__]["properties"], outputs, type(answered).model_fields
    assert [name in place for place in places] == [task == own] * 4
    if task == own:
        value = expected(task, prediction)
        assert abs(value - float(getattr(prediction, name)[0])) < 1e-5
        assert abs(value - members[name]) < 1e-4 and abs(value - getattr(answered, name)) < 1e-4
"""
