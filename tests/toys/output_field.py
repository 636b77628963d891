"""A score: the probability of the most probable class minus that of the next."""

EDITS = {
    "psc_core/prediction.py": [
        (
            "    is_ood: IsOod\n",
            """    max_probability_gap: Score = Field(description="Confidence minus the probability of the next class.")
    is_ood: IsOod
""",
        )
    ],
    "psc_core/model/pipeline.py": [
        (
            "        return pack(scores, ",
            """        first, second = scored.probabilities.topk(2, dim=1).values.unbind(1)
        scores["max_probability_gap"] = first - second
        return pack(scores, """,
        )
    ],
    "docs/service.md": [
        (
            "| `label`, `class_index`, `confidence` |",
            "| `max_probability_gap` | [0, 1] | probability of the most probable class minus that of the next |\n"
            "| `label`, `class_index`, `confidence` |",
        )
    ],
}

PROGRAM = """
import io, sys, time
import numpy as np
import torch
from fastapi.testclient import TestClient
from PIL import Image

from app.client import ImagePrediction, PredictResponse
from app.main import create_app
from app.settings import load_settings
from psc_core import PSC

NAME = "max_probability_gap"
image = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
prediction = PSC.load(sys.argv[1], device="cpu").predict([image])
first, second = prediction.probabilities.topk(2).values[0]
torch.testing.assert_close(getattr(prediction, NAME)[0], first - second)

file = io.BytesIO()
Image.fromarray(image).save(file, "PNG")
with TestClient(create_app(load_settings({"bundle": sys.argv[1], "device": "cpu", "max_batch_size": 1}))) as client:
    deadline = time.monotonic() + 60
    while client.get("/readyz").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    answer = client.post("/predict", content=file.getvalue(), headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text
    assert abs(answer.json()["predictions"][0][NAME] - float(first - second)) < 1e-4
    assert NAME in client.get("/openapi.json").json()["components"]["schemas"]["ImagePrediction"]["properties"]
    model = client.get("/model").json()["name"]
    assert NAME in [output["name"] for output in client.get(f"/v2/models/{model}").json()["outputs"]]
assert getattr(PredictResponse.model_validate_json(answer.content).predictions[0], NAME) is not None
assert NAME in ImagePrediction.model_fields
"""
