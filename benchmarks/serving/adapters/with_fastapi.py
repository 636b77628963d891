"""The plainest service: a FastAPI endpoint that decodes and runs the model, one image at a time."""

from __future__ import annotations

import binascii
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from benchmarks.serving.adapters.model import Model
from benchmarks.serving.adapters.settings import port

app = FastAPI()
model = Model()


@app.post("/predict")
async def predict(request: Request) -> Any:
    return model.predict([model.decode(await request.body())])[0]


@app.post("/predict/many")
async def predict_many(request: Request) -> Any:
    """Answer images as base64 in JSON, as one batch."""
    images = (await request.json())["images"]
    return model.predict([model.decode(binascii.a2b_base64(image)) for image in images])


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=port(), log_level="error", access_log=False)
