"""The messages against their text, and against those of a client that is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("grpc", reason="the gRPC extra is not installed")
triton = pytest.importorskip("tritonclient.grpc.service_pb2")

from app.grpc import METHODS, PREFIX  # noqa: E402
from tests.conftest import ROOT  # noqa: E402

SERVICE = triton.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def messages_below(descriptor: Any) -> Iterator[Any]:
    """A message and all that it holds, those of maps included."""
    yield descriptor
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from messages_below(field.message_type)


@pytest.mark.parametrize("method", METHODS)
def test_messages_are_written_as_tritons(method: str) -> None:
    assert f"/{SERVICE.full_name}/" == PREFIX
    theirs = SERVICE.methods_by_name[method]
    for ours, other in zip(METHODS[method], (theirs.input_type, theirs.output_type), strict=True):
        written = {each.full_name: each.fields_by_name for each in messages_below(other)}
        for message in messages_below(ours.DESCRIPTOR):
            for field in message.fields:
                same = written[message.full_name][field.name]
                assert (field.number, field.type, field.is_repeated) == (same.number, same.type, same.is_repeated)


def test_what_is_compiled_is_the_text() -> None:
    text = (ROOT / "app" / "open_inference.proto").read_text(encoding="utf-8")
    file = next(iter(METHODS.values()))[0].DESCRIPTOR.file
    assert re.findall(r"rpc (\w+)\((\w+)\) returns \((\w+)\)", text) == [
        (name, request.DESCRIPTOR.name, response.DESCRIPTOR.name) for name, (request, response) in METHODS.items()
    ]
    nested = [each for message in file.message_types_by_name.values() for each in (message, *message.nested_types)]
    compiled = {each.name for each in nested if not each.GetOptions().map_entry}
    assert set(re.findall(r"message (\w+)", text)) == compiled
    written = [message for message in nested if message.name in compiled]
    fields = sorted((each.name, each.number) for message in written for each in message.fields)
    assert sorted((name, int(n)) for name, n in re.findall(r"(\w+) = (\d+);", text)) == fields
