"""Act on each answer of a service, and send what people say back to it.

    psc-serve --demo --log log --log-sample 1 --feedback-keys secret    (in another terminal)
    python examples/act_on_answer.py
    python examples/act_on_answer.py http://host:8000

Prints what becomes of each image: its label is used, a person chooses, or it is set aside; and what the service noted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
images = sorted((Path(__file__).parents[1] / "artifacts" / "dirty-mnist-resnet18" / "examples").glob("*.png"))
PEOPLE = {"ambiguous.png": "9", "corner.png": "7"}  # What people will say; nothing of the shirt, which is no digit.

with httpx.Client(base_url=url, headers={"X-API-Key": "secret"}, timeout=60) as service:
    answer = service.post("/predict", files=[("images", image.read_bytes()) for image in images]).raise_for_status()
    request = answer.headers["traceresponse"]  # Names the answer; keep it with what you store.
    for index, (image, prediction) in enumerate(zip(images, answer.json()["predictions"], strict=True)):
        if prediction["decision"] == "accept":
            print(f"{image.name}: use {prediction['label']}")
            continue
        if prediction["decision"] == "abstain_ambiguous":
            print(f"{image.name}: a person chooses among {', '.join(prediction['prediction_set'])}")
        else:
            print(f"{image.name}: set aside, unlike anything seen (p={prediction['ood_p_value']:.3f})")
        said = {"label": PEOPLE[image.name]} if image.name in PEOPLE else {"kind": "none_of_the_classes"}
        label = {"request_id": request, "image_index": index, **said}
        noted = service.post("/feedback", json=label).raise_for_status().json()
        print(f"    noted: {noted['label'] or noted['kind']}")
print("with enough labels: psc-recalibrate --bundle BUNDLE --log log --out bundle-2")
