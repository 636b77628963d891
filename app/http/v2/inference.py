"""A request of the protocol → output tensors, whatever carried it: the same checks, queue and thresholds for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from starlette.types import Receive

from app.errors import MalformedRequest, UnknownModel
from app.http.disconnect import has_disconnected
from app.http.uploads import parse
from app.http.v2.schemas import GATES, InferRequest, outputs_of
from app.http.v2.tensors import Datatype, OutputTensor, images_of
from app.inference.decoder import EncodedImage
from app.inference.request import Images
from app.models.served import ServedModel
from app.service import Service
from psc_core.model.decision import AnyDecisions, Decisions
from psc_core.model.outputs import FloatArray, Outputs

DATATYPES: Final[Mapping[str, Datatype]] = {"is_ood": "BOOL", "label": "BYTES", "class_index": "INT64"}
"""Of the outputs that are not ``FP32``."""


@dataclass(frozen=True)
class Answer:
    """What a model says of the images of a request.

    Attributes:
        served: The model that answered.
        alpha: The false-alarm rate behind ``is_ood``.
        tensors: The wanted outputs, in order.
        as_binary: Name of each to whether it was asked for as binary data.
    """

    served: ServedModel
    alpha: float
    tensors: list[OutputTensor]
    as_binary: Mapping[str, bool]


def find_model(service: Service, name: str, version: str | None) -> ServedModel:
    """The model of this name and, where one is given, this version.

    Raises:
        UnknownModel: There is none.
        NotReady: It is not in service.
    """
    served = service.registry.get(name)
    if version is not None and version != served.model.version:
        raise UnknownModel(f"model {name!r} has the version {served.model.version!r}, not {version!r}; see /v2")
    return served


async def infer(
    service: Service,
    name: str,
    version: str | None,
    wanted: InferRequest,
    binary: memoryview | None,
    body: bytes,
    receive: Receive,
) -> Answer:
    """Answer a request.

    Args:
        service: Whose model answers.
        name: Of the model.
        version: Of the model; ``None`` takes the one in service.
        wanted: The request without its binary data.
        binary: The binary data of its input, if it has some.
        body: All that was received; a large one is parsed on a thread.
        receive: Tells when the client has left.

    Raises:
        PSCError: See :meth:`.ServedModel.predict` and :func:`.images_of`.
    """
    served = find_model(service, name, version)
    images: Images | list[bytes] | None = None
    while images is None or served is not find_model(service, name, version):  # A reload may swap it at every await.
        served = find_model(service, name, version)
        size, limit = served.model.preprocess.shape, service.settings.max_images_per_request
        images = await parse(body, partial(images_of, wanted.inputs[0], binary, size, max_images=limit))
    as_binary = wanted.binary_outputs(outputs_of(served.model.gates, is_regression=served.model.is_regression))
    check_outputs(served, as_binary)
    thresholds = served.thresholds_with(alpha=wanted.parameters.alpha)
    outputs, decisions, _ = await served.predict(
        images if isinstance(images, np.ndarray) else [EncodedImage(data) for data in images],
        thresholds,
        disconnected=partial(has_disconnected, receive),
    )
    tensors = [_output(output, outputs, decisions, served.model.classes) for output in as_binary]
    return Answer(served, thresholds.policy.alpha, tensors, as_binary)


def check_outputs(served: ServedModel, wanted: Iterable[str]) -> None:
    """Refuse outputs of the other kind of model.

    Raises:
        MalformedRequest: There is one.
    """
    known = outputs_of((GATES,), is_regression=served.model.is_regression)
    strange = [name for name in wanted if name not in known]
    if strange:
        raise MalformedRequest(f"model {served.name!r} has no output {strange[0]!r}; expected some of {known}")


def _output(name: str, outputs: Outputs[FloatArray], decisions: AnyDecisions, classes: tuple[str, ...]) -> OutputTensor:
    if name == "label" and isinstance(decisions, Decisions):
        labels = [classes[k] for k in decisions.class_index.tolist()]
        return OutputTensor(name, "BYTES", (len(labels),), labels)
    if name == GATES:
        return OutputTensor(name, "FP32", outputs.gate_p_values.shape, outputs.gate_p_values)
    values: Any = getattr(decisions, name, None)
    if values is None:
        values = outputs.probabilities if name == "probabilities" else outputs[name]
    return OutputTensor(name, DATATYPES.get(name, "FP32"), values.shape, values)
