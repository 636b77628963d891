"""HTTPS through uvicorn with a real certificate, and links that hold behind a proxy's path."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.app.fakes import png
from tests.app.support import PNG, running
from tests.app.test_server import Process


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
@pytest.mark.parametrize("workers", [1, 2])
def test_https_with_a_certificate(tmp_path: Path, workers: int) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = Process(f"--tls-certificate={certificate}", f"--tls-key={key}", f"--workers={workers}")
    trust = ssl.create_default_context(cafile=str(certificate))
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trust) as client:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try:
                    if client.get("/readyz").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.05)
            answer = client.post("/predict", content=png(3), headers=PNG)
            assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/healthz")
    finally:
        server.process.terminate()
        assert server.end() == 0
        assert server.process.stdout is not None
        assert server.process.stderr is not None
        server.process.stdout.close()
        server.process.stderr.close()


def test_a_certificate_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, tiny_bundle: Path) -> None:
    missing, broken = tmp_path / "missing.pem", tmp_path / "broken.pem"
    broken.write_text("no certificate\n")
    for path in (missing, broken):
        words = ["--bundle", str(tiny_bundle), f"--tls-certificate={path}", f"--tls-key={path}"]
        ended = subprocess.run([sys.executable, "-m", "app.cli", *words], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert f"certificate chain in {path}" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


@pytest.mark.anyio
async def test_a_proxys_path_is_in_the_document_and_the_page_links_relatively() -> None:
    async with running(root_path="/uncertain") as app:
        document = (await app.client.get("/openapi.json")).json()
        assert {"url": "/uncertain"} in document["servers"]
        docs = (await app.client.get("/docs")).text
        assert "/uncertain/openapi.json" in docs
        page = (await app.client.get("/")).text
        assert 'href="/' not in page
        assert 'src="/' not in page
        assert (await app.client.post("/predict", content=png(1), headers=PNG)).status_code == 200
