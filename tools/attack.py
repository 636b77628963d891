"""``make attack``: what an attack found once, against a service that runs now, as a table.

    python -m tools.attack [WORD …]    # only the cases whose names have one of the words

Each case is a function of the service's URL that gives what it saw in a few words, and whether that is what is wanted.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import serve
from tools import attack_grpc, attack_memory, forge
from tools.kill import CLIENTS, drain, kill
from tools.service import EXAMPLE, LIMIT_MIB, STALL_SECONDS, Seen, Status, ask, longest_stall, service

JSON = {"content-type": "application/json"}


class Case(NamedTuple):
    """An attack."""

    name: str
    attack: Callable[[str], Seen]

    def seen(self, url: str) -> Seen:
        """Attack; an error of the attack itself is not what is wanted."""
        try:
            return self.attack(url)
        except Exception as error:
            return Seen(repr(error), False)


def costly_json(url: str, body: bytes, path: str = "/predict", *, wanted: Status) -> Seen:
    """Eight at once."""
    with longest_stall(url) as longest, ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(lambda _: ask(url, path, content=body, headers=JSON), range(8)))
    now = f"{', '.join(map(str, statuses))}, /healthz waited {longest[0]:.2f} s"
    return Seen(now, statuses == {wanted} and longest[0] <= STALL_SECONDS)


def memory_given_back(_url: str) -> Seen:
    """Eight bodies of 47 MiB at once, then nothing."""
    with service() as started:
        before = started.resident_bytes()
        keys = many_keys(started.url)
        began = time.monotonic()
        while (grown := started.resident_bytes() - before) > KEPT and time.monotonic() < began + GIVEN_BACK_SECONDS:
            time.sleep(0.1)
        took = time.monotonic() - began
        peak = started.peak_bytes() - before
    now = f"{keys.now}; {peak >> 20} MiB more, {grown >> 20} MiB {took:.0f} s later"
    return Seen(now, keys.is_wanted and grown <= KEPT and peak <= 1 << 30)


def sigterm(_url: str) -> Seen:
    """Of a service that 16 clients send to, five times."""
    seen = [drain() for _ in range(5)]
    lost = sum(sum(each.lost.values()) for each in seen)
    wrong = sum(each.wrong for each in seen)
    now = f"{lost} of {sum(each.answered for each in seen)} requests lost, {wrong} not answered 200"
    return Seen(now, not lost and not wrong)


KEPT = 64 << 20  # Bytes that a service may have more than before
GIVEN_BACK_SECONDS = 60


def empty_lists(url: str) -> Seen:
    return costly_json(url, b'{"images":[' + b"[]," * (20 << 20) + b"0]}", wanted=400)


def many_keys(url: str) -> Seen:
    return costly_json(url, b"{" + b",".join(b'"k%d":0' % number for number in range(4_100_000)) + b"}", wanted=400)


def many_numbers(url: str) -> Seen:
    data = b"0," * ((1 << 22) - 100)
    head = b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,28,28,1],"data":['
    return costly_json(url, head + data + b"0]}]}", V2, wanted=400)


V2 = f"/v2/models/{SHIPPED_BUNDLE.name}/infer"


def empty_texts_as_shape(url: str) -> Seen:
    head = b'{"inputs":[{"name":"images","datatype":"UINT8","data":[0],"shape":['
    return costly_json(url, head + b'"",' * 2_000_000 + b'""]}]}', V2, wanted=400)


def empty_v2_outputs(url: str) -> Seen:
    head = b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,28,28,1],"data":[0]}],"outputs":['
    return costly_json(url, head + b"{}," * 260_000 + b"{}]}", V2, wanted=400)


def one_image(url: str, image: bytes, *, wanted: Status) -> Seen:
    began = time.perf_counter()
    status = ask(url, content=image, headers={"content-type": "image/x"})
    took = time.perf_counter() - began
    return Seen(f"{status} after {took:.2f} s", status == wanted and took <= 2 * STALL_SECONDS)


def still_bmp(url: str) -> Seen:
    commands = b"\0\2\0\0" * (15 << 20)
    head = struct.pack("<IiiHHIIiiII", 40, 900, 900, 1, 8, 1, len(commands), 0, 0, 256, 0) + bytes(1024)
    offset = 14 + len(head)
    first = struct.pack("<2sIHHI", b"BM", offset + len(commands), 0, 0, offset)
    return one_image(url, first + head + commands, wanted=413)


def progressive_jpeg(url: str) -> Seen:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (7000, 7000), 9).save(buffer, "JPEG", progressive=True)
    return one_image(url, buffer.getvalue(), wanted=413)


def many_large_images(url: str) -> Seen:
    """One request of 512 flat PNGs; meanwhile another client sends photographs."""
    import io

    from PIL import Image

    buffers = io.BytesIO(), io.BytesIO()
    Image.new("L", (5000, 5000), 9).save(buffers[0], "PNG")
    Image.linear_gradient("L").resize((1600, 1200)).save(buffers[1], "JPEG")
    files = [("images", ("x.png", buffers[0].getvalue(), "image/png"))] * 512
    photograph: dict[str, Any] = {"content": buffers[1].getvalue(), "headers": {"content-type": "image/jpeg"}}
    others: set[Status] = set()
    longest = 0.0
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(ask, url, files=files)
        while not many.done():
            sent = time.perf_counter()
            others.add(ask(url, **photograph))
            longest = max(longest, time.perf_counter() - sent)
    took = time.perf_counter() - began
    statuses = ", ".join(map(str, others))
    now = f"{many.result()} after {took:.1f} s, photographs meanwhile {statuses}, after {longest:.2f} s at most"
    return Seen(now, many.result() == 413 and others == {200} and longest <= STALL_SECONDS)


def semicolons(url: str) -> Seen:
    parts = (f"--b\r\nContent-Disposition: form-data; name=n{number}{';' * 4000}\r\n\r\nx\r\n" for number in range(900))
    headers = {"content-type": "multipart/form-data; boundary=b"}
    with longest_stall(url) as longest:
        status = ask(url, content="".join(parts) + "--b--\r\n", headers=headers)
    return Seen(f"{status}, /healthz waited {longest[0]:.2f} s", status == 400 and longest[0] <= STALL_SECONDS)


def killed(name: str, _url: str) -> Seen:
    with serve(f"--bundle={SHIPPED_BUNDLE}", "--workers=2") as server:
        seen = kill(server, name)
    now = (
        f"{seen.lost} requests lost, {seen.refused} answered 503, none predicted for {seen.longest_gap_s:.2f} s at most"
    )
    return Seen(now, seen.lost <= CLIENTS and not seen.wrong)


def cache(_url: str) -> Seen:
    """A pipe in the place of the exported network; then a folder that anybody may write to."""
    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place) / "psc", Path(place) / "log"
        shell = f"export XDG_CACHE_HOME={place} PSC_BACKEND=onnx"
        with service(shell=shell):
            kept = list(folder.glob("*.onnx"))
        for file in kept:
            file.unlink()
            os.mkfifo(file)
        with service(shell=shell):
            pass  # It is ready.
        folder.chmod(0o777)
        for file in kept:
            file.unlink(missing_ok=True)
            file.write_bytes(bytes(64))
        with service(shell=shell, stderr=str(log)):
            pass
        lines = sum(json.loads(line)["message"] == "cache not used" for line in log.read_text().splitlines())
    return Seen(f"starts twice, {lines} line of the shared folder", bool(kept) and lines >= 1)


def large_input(_url: str) -> Seen:
    import shutil

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(shutil.copytree(SHIPPED_BUNDLE, Path(folder) / "bundle"))
        forge.edit(bundle, lambda body: body["preprocess"].update({"height": 2048, "width": 2048}))
        words = [sys.executable, "-m", "app.cli", "--bundle", str(bundle), "--port", "0"]
        began = time.perf_counter()
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    took = time.perf_counter() - began
    return Seen(f"refused with {ended.returncode} after {took:.0f} s", ended.returncode == 2)


def still_answers(url: str) -> Seen:
    answer = httpx.post(f"{url}/predict", content=EXAMPLE, headers={"content-type": "image/png"}, timeout=30)
    prediction = answer.json()["predictions"][0]
    is_wanted = answer.status_code == 200 and prediction["label"] == "7"
    return Seen(f"{answer.status_code}, {prediction['label']}, {prediction['decision']}", is_wanted)


ON_ONE_SERVICE = (
    Case("8 JSON bodies of 60 MiB of empty lists", empty_lists),
    Case("8 JSON bodies of 4 million keys", many_keys),
    Case("8 v2 shapes of 2 million empty texts", empty_texts_as_shape),
    Case("8 times 260,000 empty v2 outputs", empty_v2_outputs),
    Case("8 v2 tensors of 4 million numbers in JSON", many_numbers),
    Case("run-length BMP of 61 MB that moves by nothing", still_bmp),
    Case("progressive JPEG of 49 megapixels", progressive_jpeg),
    Case("512 PNGs of 25 megapixels in one request", many_large_images),
    Case("900 part headers of 4,000 semicolons", semicolons),
    Case("the example, after all of these", still_answers),
)
ON_THEIR_OWN = (
    Case("memory after 8 JSON bodies of 47 MiB", memory_given_back),
    Case("SIGKILL of one of two fronts, 8 clients", partial(killed, "psc-front-0")),
    Case("SIGKILL of the engine behind them, 8 clients", partial(killed, "psc-engine")),
    Case("a bundle edited to a 2048² input", large_input),
    Case("gRPC: 10 million empty outputs", attack_grpc.empty_outputs),
    Case("gRPC: 400,000 empty outputs", attack_grpc.few_empty_outputs),
    Case("gRPC: 3 million parameters, 4 at once", attack_grpc.parameters),
    Case("gRPC: 4 million pixels one by one, 4 at once", attack_grpc.numbers_one_by_one),
    Case("32 clients with photographs, 1,400 MiB", attack_memory.photographs),
    Case("the same, five sixths of the memory taken before", attack_memory.nearly_full),
    Case("the kernel kills it for its neighbours' memory, 8 clients", attack_memory.killed),
    Case("a pipe as the cached network, a shared folder", cache),
    Case("SIGTERM with 16 clients, 5 times", sigterm),
)


def main(words: Sequence[str] = ()) -> int:
    """Print the table; 1 when something is not as wanted."""
    failed = 0
    print("| attack | seen | |\n| --- | --- | --- |")
    with service() as started:
        idle = started.resident_bytes()
        for case in (*ON_ONE_SERVICE, *ON_THEIR_OWN):
            if words and not any(word in case.name for word in words):
                continue
            failed += _show(case.name, case.seen(started.url))
        peak = started.peak_bytes()
    limit = f" of {LIMIT_MIB}" if started.is_limited else ""
    now = Seen(f"{peak >> 20} MiB{limit}, {idle >> 20} idle", peak <= 2 * idle + (1 << 30))
    failed += _show("the most memory in all of these", now)
    return 1 if failed else 0


def _show(name: str, seen: Seen) -> bool:
    mark = {True: "ok", False: "**no**", None: "—"}[seen.is_wanted]
    print(f"| {name} | {seen.now} | {mark} |", flush=True)
    return seen.is_wanted is False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
