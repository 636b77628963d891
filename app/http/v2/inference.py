"""Answer an inference request with output tensors; REST and gRPC share its checks, queue and thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from starlette.types import Receive

from app.errors import MalformedRequest, UnknownModel
from app.http.disconnect import has_disconnected
from app.http.uploads import parse
from app.http.v2.schemas import InferRequest
from app.http.v2.tensors import OutputTensor, images_of
from app.inference.decoder import EncodedImage
from app.inference.request import RequestMode
from app.models.served import ServedModel
from app.service import Service
from app.tasks.base import GATES_OUTPUT
from psc_core.model.pipeline import MAP


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    wanted: InferRequest  # the request without its binary data
    binary: memoryview | None  # the binary data of its input, if it has any
    body: bytes  # the whole body, whose size decides whether it is parsed on a thread


@dataclass(frozen=True)
class InferAnswer:
    """A model's answer to the images of a request."""

    served: ServedModel  # the model that answered
    alpha: float  # the false-alarm rate behind ``is_ood``
    tensors: list[OutputTensor]  # the wanted outputs, in order
    as_binary: Mapping[str, bool]  # maps the name of each output to whether the request asks for binary data


def find_model(service: Service, name: str, version: str | None) -> ServedModel:
    """Return the model of this name and, if one is given, this version.

    Raises:
        UnknownModel: If there is no such model.
        NotReady: If the model is not in service.
    """
    served = service.registry.get(name)
    if version is not None and version != served.model.version:
        raise UnknownModel(f"model {name!r} has the version {served.model.version!r}, not {version!r}; see /v2")
    return served


async def infer(service: Service, name: str, version: str | None, received: Received, receive: Receive) -> InferAnswer:
    """Answer a request.

    Args:
        service: The service whose model answers.
        name: The name of the model.
        version: The version of the model; ``None`` takes the one in service.
        received: The request.
        receive: The ASGI callable that tells when the client has left.

    Raises:
        PSCError: See :meth:`.ServedModel.predict` and :func:`.images_of`.
    """
    served, wanted, limit = find_model(service, name, version), received.wanted, service.settings.max_images_per_request
    while True:
        read = partial(images_of, wanted.inputs[0], received.binary, served.model.preprocess.shape, max_images=limit)
        images = await parse(service.parser, received.body, read)
        before, served = served, find_model(service, name, version)
        if served is before:  # Or a reload has swapped the model, whose input may have another size now.
            break
    task, classes, gates = served.task, served.model.classes, served.model.gates
    as_binary = wanted.binary_outputs(output_names(served))
    unknown = [output for output in as_binary if output not in task.tensors and output != MAP]
    if unknown:
        known = (*task.tensors, *([] if served.model.pipeline.map is None else [MAP]))
        raise MalformedRequest(f"model {served.name!r} has no output {unknown[0]!r}; expected some of {known}")
    alpha = wanted.parameters.alpha
    thresholds = served.thresholds if alpha is None else served.thresholds_with(alpha=alpha)
    outputs, decisions, explanation = await served.predict(
        images if isinstance(images, np.ndarray) else [EncodedImage(data) for data in images],
        thresholds,
        disconnected=partial(has_disconnected, receive),
        mode=RequestMode.MAP if MAP in as_binary else RequestMode.PREDICT,
        monitor=wanted.parameters.monitor,
    )
    tensors = [
        OutputTensor(MAP, "UINT8", list(explanation[MAP].shape), explanation[MAP])
        if output == MAP
        else OutputTensor(
            output,
            task.tensors[output],
            [len(outputs), *task.tensor_shape(output, classes, gates)],
            task.tensor(output, outputs, decisions, classes),
        )
        for output in as_binary
    ]
    return InferAnswer(served, thresholds.policy.alpha, tensors, as_binary)


def output_names(served: ServedModel) -> tuple[str, ...]:
    """Return the names of the outputs that a model returns unless the request names some.

    A model without gates leaves out theirs, though a request may name it.
    """
    return tuple(name for name in served.task.tensors if name != GATES_OUTPUT or served.model.gates)
