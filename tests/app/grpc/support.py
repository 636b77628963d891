"""The fakes behind a port of gRPC, and Triton's client."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc.aio import InferenceServerClient

from tests.app.support import Running, running


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def calling(models: Mapping[str, Any] | None = None, **settings: Any) -> AsyncIterator[tuple[Running, Any]]:
    """The application in this process and a client of its gRPC port."""
    port = free_port()
    async with running(models, grpc_port=port, **settings) as app, InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield app, client


def raw(images: np.ndarray[Any, Any]) -> Any:
    tensor = triton.InferInput("images", images.shape, "UINT8")
    tensor.set_data_from_numpy(images)
    return tensor


def encoded(*files: bytes) -> Any:
    tensor = triton.InferInput("encoded_images", [len(files)], "BYTES")
    tensor.set_data_from_numpy(np.array(files, dtype=object))
    return tensor
