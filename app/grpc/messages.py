"""The classes of the protocol's messages, from the compiled ``open_inference.proto``.

They have a descriptor pool of their own, because a client in the same process, such as Triton's, may register messages
with the same names.
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

# Maps the name of a method to the classes of its request and its response.
METHODS: Final[Mapping[str, tuple[Any, Any]]] = {
    method.name: (GetMessageClass(method.input_type), GetMessageClass(method.output_type))
    for method in _SERVICE.methods
}

PREFIX: Final = f"/{_SERVICE.full_name}/"  # the part of a method's HTTP/2 path before its name
