"""An exported graph in ONNX Runtime's WebAssembly in a real Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from app import export_cli as cli
from psc_core.export.folder import README, VECTORS
from psc_core.export.graph import PIXELS
from psc_core.model import load_model
from tests.browser.test_page import FAILING, Driver, before_the_page, chromium, driver, find, text, until
from tests.conftest import ROOT
from tests.encoded import encode
from tests.npm import write_runtime
from tests.served import GUARD_SECONDS

__all__ = ["chromium", "driver"]

BUNDLE = ROOT / "artifacts" / "dirty-mnist-resnet18"
WEB = os.environ.get("ORT_WEB", "")  # the folder dist of onnxruntime-web: npm install onnxruntime-web
PAGE = """<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<script type="importmap">{"imports": {"onnxruntime-web": "./dist/ort.wasm.bundle.min.mjs"}}</script>
<script>var pixels; console.log = (line) => { found.textContent += `${line}\n`; };
addEventListener("unhandledrejection", ({reason}) => { found.textContent += reason; });</script>
<script type="module">
pixels = new Uint8Array(await (await fetch("pixels.bin")).arrayBuffer());
for (let at = 0; at < 5; at += 1) await import(`./block.mjs?${at}`), pixels = pixels.slice(784);
console.log("done");
</script>"""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder as any file server does."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    assert cli.main(["--bundle", str(BUNDLE), "--out", str(tmp_path / "out")]) == 0
    (block,) = re.findall(r"```js\n(.*?)```", (tmp_path / "out" / README).read_text(), re.DOTALL)
    (tmp_path / "out" / "block.mjs").write_text(block.replace(", pixels,", ", pixels.slice(0, 784),"))
    (tmp_path / "out" / "index.html").write_text(PAGE)
    (tmp_path / "out" / "pixels.bin").write_bytes(load_file(tmp_path / "out" / VECTORS)[PIXELS][:5].numpy().tobytes())
    (tmp_path / "out" / "dist").symlink_to(WEB)
    with serving(tmp_path / "out") as url:
        yield url


@pytest.mark.skipif(not WEB, reason="ORT_WEB names no onnxruntime-web")
def test_a_browser_decides_as_the_bundle(driver: Driver, url: str, tmp_path: Path) -> None:
    driver.get(url)
    until(lambda: text(driver, "#found").endswith("done"))
    vectors = load_file(tmp_path / "out" / VECTORS)
    lines = re.findall(r"decision (\d), p-value ([\d.e-]+)", text(driver, "#found"))
    assert [int(decision) for decision, _ in lines] == vectors["decision"][:5].tolist(), json.dumps(lines)
    assert [float(p) for _, p in lines] == pytest.approx(vectors["ood_p_value"][:5].tolist(), abs=1e-3)


ASK = """
const [bytes, done] = arguments;
const form = new FormData();
form.append("images", new File([new Uint8Array(bytes)], "image"));
fetch("models/digits/predict?explain=true", {method: "POST", body: form})
  .then(async (response) => done([response.status, await response.json()]));
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    words = ["--bundle", str(BUNDLE), "--out", str(tmp_path / "site"), "--for", "web", "--runtime", WEB]
    assert cli.main(words) == 0
    with serving(tmp_path / "site") as url:
        yield url


@pytest.mark.skipif(not WEB, reason="ORT_WEB names no onnxruntime-web")
def test_the_page_needs_no_service(driver: Driver, site: str) -> None:
    with before_the_page(driver, FAILING):
        driver.get(site)
    until(lambda: len(find(driver, "#examples button")) == 4)
    signs = {"clean": "✓ Accept", "ambiguous": "? Unclear", "shirt": "! Unusual", "corner": "! Unusual"}
    for button, (name, sign) in zip(find(driver, "#examples button"), signs.items(), strict=True):
        button.click()
        shown = f"{name}.png | {sign}"
        until(lambda shown=shown: f"{text(driver, '#panel-name')} | {text(driver, '#badge')}" == shown)  # type: ignore[misc]
    assert not any(element.is_displayed() for element in find(driver, "#views, footer nav"))
    assert text(driver, "#local") == "The model runs in this browser: your images stay here."
    driver.set_script_timeout(GUARD_SECONDS)
    model, photo = load_model(BUNDLE, device="cpu"), Image.linear_gradient("L").resize((301, 703)).convert("RGB")
    turned = Image.Exif()
    turned[0x112] = 6
    seen_through = photo.copy()
    seen_through.putalpha(photo.convert("L").rotate(180))
    for image, kind, more in ((photo, "PNG", {}), (photo, "JPEG", {"exif": turned}), (seen_through, "PNG", {})):
        file = encode(image, kind, **more)
        status, answer = driver.execute_async_script(ASK, list(file))
        ours, (theirs,) = model.predict([file]), answer["predictions"]
        assert status == 200 and theirs["decision"] == ours.decision[0] and theirs["label"] == ours.labels[0]
        assert theirs["probabilities"] == pytest.approx(ours.probabilities[0].tolist(), abs=0.01)
        assert theirs["prediction_set"] == list(ours.prediction_set[0])
        assert theirs["checks"].keys() == set(model.checks)
    status, answer = driver.execute_async_script(ASK, list(b"no image"))
    assert status == 415 and "cannot read the image" in answer["detail"]
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


CHANGED = """
const {prototype} = OffscreenCanvasRenderingContext2D, {getImageData} = prototype;
prototype.getImageData = function (...area) {
  const read = getImageData.apply(this, area);
  read.data[0] ^= Number(window.changed ?? 0);
  return read;
};
"""


@pytest.fixture
def without_runtime(tmp_path: Path) -> Path:
    """An exported page that reads pixels, and has no runtime to answer with."""
    folder, runtime = tmp_path / "site", write_runtime(tmp_path / "npm")
    assert cli.main(["--bundle", str(BUNDLE), "--out", str(folder), "--for", "web", "--runtime", str(runtime)]) == 0
    return folder


def test_what_a_canvas_does_not_keep_is_refused(driver: Driver, without_runtime: Path) -> None:
    about = json.loads((without_runtime / "model.json").read_text())
    images = {mode: Image.new(mode, (8, 1100)) for mode in ("RGB", "RGBA")}  # more rows than are read at once
    images["in part"] = images["RGBA"].copy()
    images["in part"].putpixel((5, 1050), (0, 0, 0, 1))
    answers = {}
    with serving(without_runtime) as site, before_the_page(driver, CHANGED):
        for written, background in enumerate(("none", "black"), start=1):
            about["input"]["background"] = background
            (without_runtime / "model.json").write_text(json.dumps(about))
            os.utime(without_runtime / "model.json", (written, written))  # What is so old would be taken from a cache.
            driver.get(site)
            until(lambda: text(driver, "#local").startswith("The model could not be loaded."))
            for name, image in images.items():
                answers[background, name] = driver.execute_async_script(ASK, list(encode(image)))
            driver.execute_script("window.changed = 1")
            answers[background, "changed"] = driver.execute_async_script(ASK, list(encode(image)))
    driver.get_log("browser")
    refused = {place: answer["detail"] for place, (status, answer) in answers.items() if status == 415}
    for background in ("none", "black"):
        assert "changes the pixels" in refused.pop((background, "changed"))
    assert refused.keys() == {("none", "RGBA"), ("none", "in part"), ("black", "RGBA")}
    assert all("transparent" in detail for detail in refused.values())
    assert {status for status, _ in answers.values()} == {415, 500}, answers


def test_a_page_without_its_runtime_says_so(driver: Driver, without_runtime: Path) -> None:
    (without_runtime / "onnxruntime" / "ort.wasm.min.js").unlink()
    with serving(without_runtime) as site, before_the_page(driver, FAILING):  # Other files are loaded again.
        driver.get(site)
        until(lambda: text(driver, "#local").startswith("The model could not be loaded."))
        until(lambda: len(find(driver, "#examples button")) == 4)
        find(driver, "#examples button")[0].click()
        until(lambda: text(driver, "#badge") not in ("", "Waiting…", "Classifying…"))
        assert "dynamically imported module" in text(driver, ".tile") and "API key" not in text(driver, "main")
        ask = "fetch(arguments[0], {method: 'POST'}).then((found) => arguments[1](found.status))"
        assert driver.execute_async_script(ask, "other") == 404
        assert (
            driver.execute_async_script(ask, "models/digits/predict?map=true") == 422
        )  # before it is classified again
    driver.get_log("browser")
