"""Attacks on the port of gRPC, each on a service of its own whose memory is limited, so that it alone would end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from app.grpc import METHODS, PREFIX
from tests.app.grpc.support import free_port
from tests.conftest import SHIPPED_BUNDLE
from tools.service import EXAMPLE, STALL_SECONDS, Seen, Started, longest_stall, service

LIMIT = "ulimit -d 8388608"  # 8 GiB of data, in the shell's units

SECONDS = 30.0
EMPTY_OUTPUT, PARAMETER = b"\x32\0", b"\x22\x08\x0a\x02ab\x12\x02\x08\x01"
"""A field of ``ModelInferRequest``, as it is sent."""


def good_message() -> bytes:
    """The example as the only image."""
    tensor = {"name": "encoded_images", "datatype": "BYTES", "shape": [1]}
    data = len(EXAMPLE).to_bytes(4, "little") + EXAMPLE
    request = METHODS["ModelInfer"][0](model_name=SHIPPED_BUNDLE.name, inputs=[tensor], raw_input_contents=[data])
    return bytes(request.SerializeToString())


@contextmanager
def serving() -> Iterator[tuple[Started, Callable[[], grpc.Channel]]]:
    """A service and new connections to its port of gRPC."""
    port = free_port()
    with service("--grpc-port", str(port), "--grpc-message-bytes", str(64 << 20), shell=LIMIT) as started:
        yield (
            started,
            lambda: grpc.insecure_channel(
                f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            ),
        )


def infer(channel: grpc.Channel, message: bytes) -> str:
    """The name of the status."""
    try:
        channel.unary_unary(f"{PREFIX}ModelInfer")(message, timeout=SECONDS)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def many_fields(fields: bytes, *, at_once: int = 1, wanted: str = "INVALID_ARGUMENT") -> Seen:
    """A good message that goes on with many fields."""
    message = good_message() + fields
    with serving() as (started, connect), connect() as channel:
        before = started.peak_bytes()
        with longest_stall(started.url) as longest, ThreadPoolExecutor(at_once) as pool:
            codes = set(pool.map(lambda _: infer(channel, message), range(at_once)))
        grown = (started.peak_bytes() - before) >> 20
        last = infer(channel, good_message())
    now = f"{', '.join(sorted(codes))}, /healthz waited {longest[0]:.2f} s, {grown} MiB more, then {last}"
    return Seen(now, codes == {wanted} and longest[0] <= STALL_SECONDS and grown <= 1024 and last == "OK")


def empty_outputs(_url: str) -> Seen:
    return many_fields(EMPTY_OUTPUT * 10_000_000)


def few_empty_outputs(_url: str) -> Seen:
    return many_fields(EMPTY_OUTPUT * 400_000)


def parameters(_url: str) -> Seen:
    return many_fields(PARAMETER * 3_000_000, at_once=4)


def numbers_one_by_one(_url: str) -> Seen:
    """Pixels of an input that are not packed, as many as might be if they were."""
    contents = b"\x20\x01" * (1 << 22)
    return many_fields(b"\x2a" + nested(b"\x2a" + nested(contents)), at_once=4)


def nested(content: bytes) -> bytes:
    """A field's content behind its length, as the wire format writes it."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes((*length, size)) + content
