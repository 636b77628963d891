"""``make attack``: what an attack found once, against a service that runs now, as a table.

    python -m tools.attack [WORD …]    # only the cases whose names have one of the words

Each case is a function of the service's URL that gives what it saw in a few words, and whether that is what is wanted.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import serve
from tools import attack_files, attack_grpc, attack_memory, forge
from tools.kill import CLIENTS, drain, kill
from tools.service import EXAMPLE, LIMIT_MIB, STALL_SECONDS, Seen, is_ready, longest_stall, service

JSON = {"content-type": "application/json"}


class Case(NamedTuple):
    """An attack."""

    name: str
    attack: Callable[[str], Seen]


def costly_json(url: str, body: bytes, path: str = "/predict") -> Seen:
    """Eight at once."""
    statuses: list[int] = []

    def send() -> None:
        statuses.append(httpx.post(f"{url}{path}", content=body, headers=JSON, timeout=120).status_code)

    with longest_stall(url) as longest:
        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return Seen(f"{sorted(set(statuses))}, /healthz waited {longest[0]:.2f} s", longest[0] <= STALL_SECONDS)


def memory_given_back(_url: str) -> Seen:
    """Eight bodies of 47 MiB at once, then nothing."""
    with service() as started:
        before = started.resident_bytes()
        many_keys(started.url)
        end = time.monotonic() + 60
        while (grown := started.resident_bytes() - before) > 64 << 20 and time.monotonic() < end:
            time.sleep(0.1)
        peak = started.peak_bytes() - before
    return Seen(f"{peak >> 20} MiB more, {grown >> 20} MiB afterwards", grown <= 64 << 20 and peak <= 1 << 30)


def sigterm(_url: str) -> Seen:
    """Of a service that 16 clients send to, five times."""
    seen = [drain() for _ in range(5)]
    lost = sum(sum(each.lost.values()) for each in seen)
    return Seen(f"{lost} of {sum(each.answered for each in seen)} requests lost", lost == 0)


def empty_lists(url: str) -> Seen:
    return costly_json(url, b'{"images":[' + b"[]," * (20 << 20) + b"0]}")


def many_keys(url: str) -> Seen:
    return costly_json(url, b"{" + b",".join(b'"k%d":0' % number for number in range(4_100_000)) + b"}")


def many_numbers(url: str) -> Seen:
    data = b"0," * ((1 << 22) - 100)
    head = b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,28,28,1],"data":['
    return costly_json(url, head + data + b"0]}]}", V2)


V2 = f"/v2/models/{SHIPPED_BUNDLE.name}/infer"


def empty_texts_as_shape(url: str) -> Seen:
    head = b'{"inputs":[{"name":"images","datatype":"UINT8","data":[0],"shape":['
    return costly_json(url, head + b'"",' * 2_000_000 + b'""]}]}', V2)


def empty_v2_outputs(url: str) -> Seen:
    head = b'{"inputs":[{"name":"images","datatype":"UINT8","shape":[1,28,28,1],"data":[0]}],"outputs":['
    return costly_json(url, head + b"{}," * 260_000 + b"{}]}", V2)


def one_image(url: str, image: bytes) -> Seen:
    began = time.perf_counter()
    answer = httpx.post(f"{url}/predict", content=image, headers={"content-type": "image/x"}, timeout=120)
    took = time.perf_counter() - began
    return Seen(f"{answer.status_code} after {took:.2f} s", took <= 2 * STALL_SECONDS)


def still_bmp(url: str) -> Seen:
    commands = b"\0\2\0\0" * (15 << 20)
    head = struct.pack("<IiiHHIIiiII", 40, 900, 900, 1, 8, 1, len(commands), 0, 0, 256, 0) + bytes(1024)
    offset = 14 + len(head)
    return one_image(url, struct.pack("<2sIHHI", b"BM", offset + len(commands), 0, 0, offset) + head + commands)


def progressive_jpeg(url: str) -> Seen:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (7000, 7000), 9).save(buffer, "JPEG", progressive=True)
    return one_image(url, buffer.getvalue())


def many_large_images(url: str) -> Seen:
    """One request of 512 flat PNGs; meanwhile another client sends photographs."""
    import io

    from PIL import Image

    buffers = io.BytesIO(), io.BytesIO()
    Image.new("L", (5000, 5000), 9).save(buffers[0], "PNG")
    Image.linear_gradient("L").resize((1600, 1200)).save(buffers[1], "JPEG")
    files = [("images", ("x.png", buffers[0].getvalue(), "image/png"))] * 512
    of_many: list[int] = []
    others: set[int] = set()
    longest = 0.0
    sender = threading.Thread(
        target=lambda: of_many.append(httpx.post(f"{url}/predict", files=files, timeout=120).status_code)
    )
    sender.start()
    began = time.perf_counter()
    while sender.is_alive():
        sent = time.perf_counter()
        answer = httpx.post(
            f"{url}/predict", content=buffers[1].getvalue(), headers={"content-type": "image/jpeg"}, timeout=120
        )
        longest = max(longest, time.perf_counter() - sent)
        others.add(answer.status_code)
    took = time.perf_counter() - began
    now = f"{of_many[0]} after {took:.1f} s, photographs meanwhile {sorted(others)}, after {longest:.2f} s at most"
    return Seen(now, of_many == [413] and others == {200} and longest <= STALL_SECONDS)


def multipart(url: str, parts: list[str]) -> httpx.Response:
    body = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n\r\nx\r\n" for part in parts) + "--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    return httpx.post(f"{url}/predict", content=body.encode("latin-1"), headers=headers, timeout=120)


def semicolons(url: str) -> Seen:
    with longest_stall(url) as longest:
        status = multipart(url, [f"name=n{number}{';' * 4000}" for number in range(900)]).status_code
    return Seen(f"{status}, /healthz waited {longest[0]:.2f} s", longest[0] <= STALL_SECONDS)


def control_characters(url: str) -> Seen:
    answer = multipart(url, [f'name="{chr(1) * 4000}{number}"' for number in range(900)])
    return Seen(f"{answer.status_code} of {len(answer.content)} bytes", len(answer.content) < 10_000)


def heads(url: str) -> Seen:
    port = int(url.rsplit(":", 1)[1])
    seen = []
    for head in (b"HTTP/1.1\r\nhost: a\r\nhost: b", b"HTTP/2.0\r\nhost: a", b"HTTP/1.1\r\nhost: a\r\nexpect: 200-ok"):
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"GET /healthz " + head + b"\r\n\r\n")
            seen.append(client.recv(100).split()[1].decode())
    return Seen(", ".join(seen), seen == ["400", "505", "417"])


def refused_preflight(url: str) -> Seen:
    headers = {"origin": "https://bad.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{url}/predict", headers=headers, timeout=30)
    kind = answer.headers["content-type"]
    return Seen(f"{answer.status_code}, {kind}", kind == "application/problem+json")


def full_metrics(_url: str) -> Seen:
    from app.server import metrics_parent
    from psc_core.errors import UsageError

    try:
        metrics_parent([Path("/proc")])  # Where nothing is free.
    except UsageError as error:
        return Seen(f"refused: {str(error)[:44]} …", True)
    return Seen("taken", False)


def blinded_drift(_url: str) -> Seen:
    import numpy as np

    from app.drift import DriftMonitor

    medians = []
    for history in (0, 20_000):
        found = []
        for seed in range(11):
            generator = np.random.default_rng(seed)
            calibration = np.sort(generator.normal(size=2000))
            strange = generator.random(6000) < 0.05
            streams = (
                generator.normal(-8, 1, history),
                generator.normal(0, 1, history),
                generator.normal(0, 1, 6000) - 8 * strange,
            )
            ranks = [(1 + np.searchsorted(calibration, scores, side="right")) / 2001 for scores in streams]
            monitor = DriftMonitor(2000, 0.05, false_alarm_probability=0.01, window=1000)
            monitor.update(np.concatenate(ranks[:2]))
            found.append(next((at for at in range(0, 6000, 10) if monitor.update(ranks[2][at : at + 10])), 6000) + 10)
        medians.append(float(np.median(found)))
    return Seen(f"alarm after {medians[1]:.0f} images, {medians[0]:.0f} of a new one", medians[1] <= 2 * medians[0])


def loose_manifests(_url: str) -> Seen:
    import shutil

    from psc_core.bundle import read_bundle
    from psc_core.errors import BundleError

    refused = 0
    for version in (True, 4.0):
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(shutil.copytree(SHIPPED_BUNDLE, Path(folder) / "bundle"))
            forge.assign(bundle, "schema_version", version)
            try:
                read_bundle(bundle)
            except BundleError as error:
                refused += len(str(error)) < 1000
    return Seen(f"{refused} of 2 refused", refused == 2)


def full_disk(_url: str) -> Seen:
    import errno
    from unittest import mock

    from psc_core import PSC
    from psc_core.errors import BundleError

    model = PSC.load(SHIPPED_BUNDLE, device="cpu")
    full = OSError(errno.ENOSPC, "No space left on device")
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync", side_effect=full):
        try:
            model.save(Path(folder) / "bundle")
        except BundleError as error:
            is_named = folder in str(error) and "free space" in str(error)
            return Seen("path and remedy" if is_named else str(error)[:60], is_named)
    return Seen("written", False)


def half_closed(url: str) -> Seen:
    head = f"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: image/png\r\ncontent-length: {len(EXAMPLE)}\r\n\r\n"
    answered = 0
    for _ in range(20):
        clients = [socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 60) for _ in range(10)]
        for client in clients:
            client.sendall(head.encode() + EXAMPLE)
            client.shutdown(socket.SHUT_WR)
        for client in clients:
            with client, client.makefile("rb") as answer:
                answered += answer.read().startswith(b"HTTP/1.1 200")
    return Seen(f"{answered} of 200 answered", answered == 200)


def full_stderr(_url: str) -> Seen:
    with service("--workers", "2", stderr="/dev/full") as started:
        status = httpx.post(
            f"{started.url}/predict", content=EXAMPLE, headers={"content-type": "image/png"}
        ).status_code
    return Seen(f"serves, {status}", status == 200)


def damaged_tiffs(_url: str) -> Seen:
    import io

    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with service(stderr=str(log)) as started:
            for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd"):
                buffer = io.BytesIO()
                Image.linear_gradient("L").save(buffer, "TIFF", compression=compression)
                data = bytearray(buffer.getvalue())
                data[100:140] = b"\xa5" * 40
                httpx.post(
                    f"{started.url}/predict", content=bytes(data), headers={"content-type": "image/tiff"}, timeout=30
                )
        others = sum(not line.startswith("{") for line in log.read_text().splitlines())
    return Seen(f"{others} other lines", others == 0)


def no_descriptors(_url: str) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with service(stderr=str(log), shell="ulimit -n 96") as started:
            port = int(started.url.rsplit(":", 1)[1])
            clients = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(200)]
            time.sleep(1)
            for client in clients:
                client.close()
            while not is_ready(started.url):
                time.sleep(0.1)
        lines = sum("file descriptors are in use" in line for line in log.read_text().splitlines())
    return Seen(f"{lines} line in the log", lines == 1)


def killed_worker(_url: str) -> Seen:
    with serve(f"--bundle={SHIPPED_BUNDLE}", "--workers=2") as server:
        seen = kill(server)
    now = f"{seen.lost} requests lost, {seen.meanwhile} answered meanwhile, none for {seen.longest_gap_s:.2f} s at most"
    return Seen(now, seen.lost <= CLIENTS and not seen.wrong)


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
    return Seen(f"{answer.status_code}, {prediction['label']}, {prediction['decision']}", prediction["label"] == "7")


CASES = (
    Case("8 JSON bodies of 60 MiB of empty lists", empty_lists),
    Case("8 JSON bodies of 4 million keys", many_keys),
    Case("memory after 8 JSON bodies of 47 MiB", memory_given_back),
    Case("8 v2 shapes of 2 million empty texts", empty_texts_as_shape),
    Case("8 times 260,000 empty v2 outputs", empty_v2_outputs),
    Case("8 v2 tensors of 4 million numbers in JSON", many_numbers),
    Case("run-length BMP of 61 MB that moves by nothing", still_bmp),
    Case("progressive JPEG of 49 megapixels", progressive_jpeg),
    Case("512 PNGs of 25 megapixels in one request", many_large_images),
    Case("900 part headers of 4,000 semicolons", semicolons),
    Case("900 field names of control characters", control_characters),
    Case("two Hosts, HTTP/2.0, Expect: 200-ok", heads),
    Case("200 clients that close their side", half_closed),
    Case("CORS preflight of another origin", refused_preflight),
    Case("workers' metrics where nothing is free", full_metrics),
    Case("20,000 far images, then few", blinded_drift),
    Case("schema_version true and 4.0", loose_manifests),
    Case("disk full while a bundle is written", full_disk),
    Case("standard error that cannot be written", full_stderr),
    Case("damaged TIFFs", damaged_tiffs),
    Case("200 connections with 96 file descriptors", no_descriptors),
    Case("SIGKILL of one of two workers, 8 clients", killed_worker),
    Case("a bundle edited to a 2048² input", large_input),
    Case("gRPC: 10 million empty outputs", attack_grpc.empty_outputs),
    Case("gRPC: 400,000 empty outputs", attack_grpc.few_empty_outputs),
    Case("gRPC: 3 million parameters, 4 at once", attack_grpc.parameters),
    Case("gRPC: 4 million pixels one by one, 4 at once", attack_grpc.numbers_one_by_one),
    Case("gRPC: 16 calls of each method that send nothing", attack_grpc.silent_streams),
    Case("32 clients with photographs, 1,400 MiB", attack_memory.photographs),
    Case("the same, five sixths of the memory taken before", attack_memory.nearly_full),
    Case("the kernel kills it for its neighbours' memory, 8 clients", attack_memory.killed),
    Case("a pipe as the cached network, a shared folder", attack_files.cache),
    Case("psc-score: a pipe, /dev/zero, a sparse file of 40 GB", attack_files.hostile_folder),
    Case("psc-fit: classes of mathematics, HTML and escapes", attack_files.class_names),
    Case("SIGTERM with 16 clients, 5 times", sigterm),
    Case("the example, after all of these", still_answers),
)


def main(words: Sequence[str] = ()) -> int:
    """Print the table; 1 when something is not as wanted."""
    failed = 0
    print("| attack | seen | |\n| --- | --- | --- |")
    with service("--cors-origins", "https://good.example") as started:
        idle = started.resident_bytes()
        for case in (case for case in CASES if not words or any(word in case.name for word in words)):
            failed += _show(case.name, case.attack(started.url))
        peak = started.peak_bytes()
    limit = f" of {LIMIT_MIB}" if started.is_limited else ""
    now = Seen(f"{peak >> 20} MiB{limit}, {idle >> 20} idle", peak <= 2 * idle + (1 << 30))
    failed += _show("the most memory in all of these", now)
    return 1 if failed else 0


def _show(name: str, seen: Seen) -> bool:
    print(f"| {name} | {seen.now} | {'ok' if seen.is_wanted else '**no**'} |", flush=True)
    return not seen.is_wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
