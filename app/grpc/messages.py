"""Classes of the protocol's messages, from the compiled ``open_inference.proto``.

They live in a pool of their own: clients in the same process, such as Triton's, register messages of the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_SET: Final = FileDescriptorSet.FromString(files(__package__).joinpath("open_inference.binpb").read_bytes())
_POOL: Final = DescriptorPool()
_POOL.AddSerializedFile(_SET.file[0].SerializeToString())
_SERVICE: Final = _POOL.FindServiceByName("inference.GRPCInferenceService")

METHODS: Final[Mapping[str, tuple[Any, Any]]] = {
    method.name: (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
    for method in _SERVICE.methods
}
"""Name of a method → classes of its request and of its response."""

PREFIX: Final = f"/{_SERVICE.full_name}/"
"""The path before the name of a method, as HTTP/2 carries it."""
