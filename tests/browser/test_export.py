"""An exported graph in ONNX Runtime's WebAssembly in a real Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from psc_core.cli import export as cli
from psc_core.export import PIXELS, README, VECTORS
from tests.browser.test_page import Driver, chromium, driver, text, until
from tests.conftest import ROOT

__all__ = ["chromium", "driver"]

WEB = os.environ.get("PSC_ORT_WEB", "")  # the folder dist of onnxruntime-web: npm install onnxruntime-web
PAGE = """<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<script type="importmap">{"imports": {"onnxruntime-web": "./dist/ort.wasm.bundle.min.mjs"}}</script>
<script>var pixels; console.log = (line) => { found.textContent += `${line}\n`; };
addEventListener("unhandledrejection", ({reason}) => { found.textContent += reason; });</script>
<script type="module">
pixels = new Uint8Array(await (await fetch("pixels.bin")).arrayBuffer());
for (let at = 0; at < 5; at += 1) await import(`./block.mjs?${at}`), pixels = pixels.slice(784);
console.log("done");
</script>"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    assert cli.main(["--bundle", str(ROOT / "artifacts" / "dirty-mnist-resnet18"), "--out", str(tmp_path / "out")]) == 0
    (block,) = re.findall(r"```js\n(.*?)```", (tmp_path / "out" / README).read_text(), re.DOTALL)
    (tmp_path / "out" / "block.mjs").write_text(block.replace(", pixels,", ", pixels.slice(0, 784),"))
    (tmp_path / "out" / "index.html").write_text(PAGE)
    (tmp_path / "out" / "pixels.bin").write_bytes(load_file(tmp_path / "out" / VECTORS)[PIXELS][:5].numpy().tobytes())
    (tmp_path / "out" / "dist").symlink_to(WEB)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "out"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.skipif(not WEB, reason="PSC_ORT_WEB names no onnxruntime-web")
def test_a_browser_decides_as_the_bundle(driver: Driver, url: str, tmp_path: Path) -> None:
    driver.get(url)
    until(lambda: text(driver, "#found").endswith("done"))
    vectors = load_file(tmp_path / "out" / VECTORS)
    lines = re.findall(r"decision (\d), p-value ([\d.e-]+)", text(driver, "#found"))
    assert [int(decision) for decision, _ in lines] == vectors["decision"][:5].tolist(), json.dumps(lines)
    assert [float(p) for _, p in lines] == pytest.approx(vectors["ood_p_value"][:5].tolist(), abs=1e-3)
