"""HTTPS through uvicorn with a real certificate, and links that hold behind a proxy's path."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.app.fakes import png
from tests.app.support import PNG, running
from tests.app.test_healthcheck import healthcheck
from tests.served import GUARD_SECONDS, serve_fake


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
@pytest.mark.parametrize("workers", [1, 2])
def test_https_with_a_certificate(tmp_path: Path, workers: int) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(certificate))
    with serve_fake(f"--tls-certificate={certificate}", f"--tls-key={key}", f"--workers={workers}") as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        answer = httpx.post(server.url + "/predict", content=png(3), headers=PNG, verify=trust, timeout=GUARD_SECONDS)
        assert answer.status_code == 200
        assert healthcheck(PSC_PORT=str(server.port), PSC_TLS_CERTIFICATE=str(certificate)) == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/healthz", timeout=GUARD_SECONDS)
        assert server.terminate() == 0


def test_rejects_an_unusable_certificate_in_one_line(tmp_path: Path, tiny_bundle: Path) -> None:
    missing, broken = tmp_path / "missing.pem", tmp_path / "broken.pem"
    broken.write_text("no certificate\n")
    for path in (missing, broken):
        words = ["--bundle", str(tiny_bundle), f"--tls-certificate={path}", f"--tls-key={path}"]
        program = [sys.executable, "-m", "app.cli", *words]
        ended = subprocess.run(program, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
        assert ended.returncode == 2
        assert f"certificate chain in {path}" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


@pytest.mark.anyio
async def test_a_proxys_path_is_in_the_document_and_the_page_links_relatively() -> None:
    async with running(root_path="/uncertain") as app:
        document = (await app.client.get("/openapi.json")).json()
        assert {"url": "/uncertain"} in document["servers"]
        for path in ("/", "/docs"):
            page = (await app.client.get(path)).text
            assert 'href="/' not in page
            assert 'src="/' not in page
        assert 'url: "openapi.json"' in (await app.client.get("/page/docs.js")).text
        assert (await app.client.post("/predict", content=png(1), headers=PNG)).status_code == 200
