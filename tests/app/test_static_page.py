"""The page as a static folder.  What it answers in a browser: tests/browser/test_export.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from onnx import ModelProto

from app import export_cli as cli
from app.export_cli import find_runtime, write_page
from psc_core.errors import UsageError
from psc_core.export.graph import ANY_SIZE
from psc_core.images.decode import DEFAULT_MAX_PIXELS
from psc_core.model import load_model
from tests.conftest import ROOT, Run
from tests.npm import write_runtime

BUNDLE = ROOT / "artifacts" / "dirty-mnist-resnet18"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for the npm package onnxruntime-web."""
    return write_runtime(tmp_path_factory.mktemp("npm") / "onnxruntime-web")


def test_the_folder_has_all_that_it_asks_for(runtime: Path, tmp_path: Path, run: Run) -> None:
    site = tmp_path / "site"
    words = ["--bundle", str(BUNDLE), "--out", str(site), "--for", "web", "--runtime", str(runtime)]
    out, _ = run(cli.main, *words)
    assert f"next: python3 -m http.server --directory {site}" in out
    assert "holds index.html and model.json and" in run(cli.main, *words, code=2)[1]
    (tmp_path / "other" / "page").mkdir(parents=True)  # of another site
    assert "holds page already" in run(cli.main, *words, "--out", tmp_path / "other", code=2)[1]
    page = (site / "index.html").read_text()
    assert re.findall(r'src="(page/[^"]+js)"', page) == ["page/local.js"]  # It loads the others when it can answer.
    assert "<noscript>" not in page and 'href="metrics"' not in page  # which name what only a service has
    assert "it needs a web server" in page and 'import("./page.js")' in (site / "page" / "local.js").read_text()
    assert not list(site.rglob("*.mjs"))
    assert page.index("default-src 'self'") < page.index("<script")
    for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page):
        assert (site / path).is_file(), path
    modules = list((site / "page").glob("*.js"))
    assert len(modules) > 10
    for module in modules:
        for path in re.findall(r'from "([^"]+)"', module.read_text()):
            assert (module.parent / path).resolve().is_file(), (module.name, path)
    text = (site / "page" / "local.js").read_text()
    for name in ("model.json", "examples.json", ANY_SIZE):
        assert name in text and (site / name).is_file()
    assert not list(site.rglob("docs.*")) and not (site / "onnxruntime" / "ort.all.mjs").exists()
    assert json.loads((site / "examples.json").read_text())["files"] == [
        *(f"{name}.png" for name in ("ambiguous", "clean", "corner", "shirt"))
    ]
    about, model = json.loads((site / "model.json").read_text()), load_model(BUNDLE, device="cpu")
    assert about["classes"] == list(model.classes) and about["version"] == model.version
    assert about["decisions"] == ["accept", "abstain_ambiguous", "abstain_ood"]
    pixels = re.search(r"MAX_PIXELS = ([\d_]+)", text)
    assert pixels and int(pixels[1].replace("_", "")) == DEFAULT_MAX_PIXELS
    assert (
        not about["feedback"] and not about["report"]
    )  # Nobody reviews here, and the fit's machine is nobody's concern.


def test_a_runtime_is_needed_before_anything_is_read(runtime: Path, tmp_path: Path, run: Run) -> None:
    words = ("--bundle", tmp_path / "none", "--out", tmp_path / "x", "--for", "web", "--runtime", tmp_path)
    assert "holds no onnxruntime-web; run npm install onnxruntime-web" in run(cli.main, *words, code=2)[1]
    assert not (tmp_path / "x").exists()
    assert find_runtime(runtime / "dist") == find_runtime(runtime) == runtime / "dist"
    (tmp_path / "ort.wasm.min.mjs").touch()
    with pytest.raises(UsageError, match="npm install"):
        find_runtime(tmp_path)


def test_only_images_of_their_folder_are_published(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "mine.png").write_bytes((BUNDLE / "examples" / "clean.png").read_bytes())
    (tmp_path / "few" / "link.png").symlink_to(tmp_path / "secret.png")
    model = load_model(BUNDLE, device="cpu")
    offered = tmp_path / "site" / "examples"
    for examples, names in ((BUNDLE / "examples", 4), (offered, 4), (tmp_path / "few", 1)):  # Former ones do not stay.
        write_page(model, ModelProto(), tmp_path / "site", runtime=runtime, examples=examples)
        assert len(list(offered.iterdir())) == names
    assert json.loads((tmp_path / "site" / "examples.json").read_text())["files"] == ["mine.png"]


def test_a_link_in_place_of_a_bundles_examples_is_not_published(runtime: Path, tmp_path: Path) -> None:
    bundle, private = tmp_path / "bundle", tmp_path / "private"
    for folder in (bundle, private):
        folder.mkdir()
    (private / "mine.png").write_bytes((BUNDLE / "examples" / "clean.png").read_bytes())
    (bundle / "examples").symlink_to(private)
    site, model = tmp_path / "site", load_model(BUNDLE, device="cpu")
    write_page(model, ModelProto(), site, runtime=runtime, examples=bundle / "examples", bundle=bundle)
    assert json.loads((site / "examples.json").read_text())["files"] == []


def test_images_of_class_folders_are_offered(runtime: Path, tmp_path: Path) -> None:
    image, model = (BUNDLE / "examples" / "clean.png").read_bytes(), load_model(BUNDLE, device="cpu")
    for name in ("cat", "dog"):
        (tmp_path / "val" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "val" / name / f"{number}.png").write_bytes(image)
        (tmp_path / "val" / name / "0.TIF").write_bytes(image)  # Browsers do not show it.
    site = tmp_path / "site"
    write_page(model, ModelProto(), site, runtime=runtime, examples=tmp_path / "val")
    assert json.loads((site / "examples.json").read_text())["files"] == [
        f"{name}-{number}.png" for number in range(6) for name in ("cat", "dog")
    ]
    assert (site / "examples" / "dog-1.png").read_bytes() == image
    for file in tmp_path.glob("val/*/*.png"):
        file.write_bytes(image + bytes(1 << 20))
    with pytest.raises(UsageError, match=r"at most 1 MiB .* none of TIFF"):
        write_page(model, ModelProto(), tmp_path / "other", runtime=runtime, examples=tmp_path / "val")
    assert not (tmp_path / "other").exists()


def test_images_that_would_not_travel(tmp_path: Path, run: Run) -> None:
    for target in ("triton", "openvino", "mlflow"):
        words = ["--bundle", str(BUNDLE), "--out", str(tmp_path / "x"), "--for", target, "--images", str(tmp_path)]
        assert f"no images travel along for {target}" in run(cli.main, *words, code=2)[1]
