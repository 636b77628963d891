"""The programs in ``examples`` run on the repository's data and print what they and the gallery say."""

import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from psc_core import PSC
from psc_core.checks import CHECKS
from psc_core.pipeline import Pipeline
from tests import warm
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import serve_shipped

EXAMPLES: Final = ROOT / "examples"
GALLERY: Final = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")

# Examples that train a network: their numbers, and with them layers and decisions, depend on the machine.
DIFFERS: Final = {
    "in_memory.py", "own_model.py", "own_images.py", "timm_folder.py", "hugging_face.py", "onnx_file.py",
    "regression.py",
}  # fmt: skip


def run(name: str, *arguments: str) -> str:
    """Run an example in a process of its own; what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = warm.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


Run = Callable[..., str]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs an example in this process, which has torch already; what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run_here(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
        code = None
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert not code, printed.err
        return printed.out

    return run_here


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path) -> Iterator[None]:
    """An example writes nothing where it is started."""
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name not in {"log", "given"}] == []


def section(name: str) -> str:
    """The section of the gallery on an example."""
    (found,) = [part for part in GALLERY.split("\n## ") if f"python examples/{name}" in part]
    return found


def shown(name: str) -> list[str]:
    """The lines that the gallery shows of an example's output."""
    (block,) = re.findall(r"```text\n(.*?)```", section(name), re.DOTALL)
    lines: list[str] = block.splitlines()
    return lines


def check_shown(name: str, said: str) -> None:
    """Check that each line of the gallery is printed, in order; of :data:`DIFFERS` that each begins alike."""
    lines = iter(said.splitlines())
    for line in shown(name):
        assert any(alike(line, each, name in DIFFERS) for each in lines), f"{name} does not print {line!r}:\n{said}"


def alike(line: str, other: str, differs: bool) -> bool:
    words, others = (re.sub(r"[\d.,]+", "0", each).split() if differs else each.split() for each in (line, other))
    return words[:1] == others[:1] if differs else words == others


def test_every_example_is_listed_and_shown() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == names and len(listed) == len(names)
    assert {*re.findall(r"python examples/(\w+\.py)", GALLERY)} == names - {"digits.py"}


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - {"digits.py"}))
def test_the_gallery_shows_lines_of_the_example(name: str) -> None:
    source = [line.strip() for line in (EXAMPLES / name).read_text().splitlines()]
    for block in re.findall(r"```python\n(.*?)```", section(name), re.DOTALL):
        lines = [line.strip() for line in block.splitlines()]
        starts = range(len(source) - len(lines) + 1)
        assert any(source[start : start + len(lines)] == lines for start in starts), block


def test_in_memory(here: Run) -> None:
    said = here("in_memory.py")
    assert "ClassificationPrediction for 200 images: " in said and "the most unusual digit: abstain_ood" in said
    digits, clothes = map(float, re.findall(r"([\d.]+)% are called out", said))
    assert digits < 15 and clothes > 85
    again = re.search(r"calibrated on 600 images: ([\d.]+)% of the digits\n$", said)
    assert again is not None and float(again[1]) < 15
    check_shown("in_memory.py", said)


def test_own_model(here: Run) -> None:
    said = here("own_model.py")
    assert "◀ chosen" in said and "nothing has collapsed" not in said
    digits, clothes = (re.findall(rf"^{kind}: .*, (\w+)$", said, re.M) for kind in ("digit", "piece of clothing"))
    assert digits.count("accept") >= 4 and clothes.count("abstain_ood") >= 4
    assert said.endswith("loaded again: the same decisions\n")
    check_shown("own_model.py", said)


@pytest.mark.slow
def test_own_images(here: Run) -> None:
    said = here("own_images.py")
    right, _, accepted = map(float, re.findall(r"([\d.]+)%", said)[:3])
    assert 90 < right < accepted
    test, other = map(float, re.findall(r"([\d.]+)% are called out", said))
    assert test < 15 and other > 85
    check_shown("own_images.py", said)


@pytest.mark.slow
def test_regression(here: Run) -> None:
    said = here("regression.py")
    held, nominal, clothes = map(int, re.findall(r"(\d+)%", said))
    assert abs(held - nominal) < 8 and clothes > 60
    check_shown("regression.py", said)


def test_score_folder_and_why_rejected(here: Run, tmp_path: Path) -> None:
    for name in ("why_rejected.py", "score_folder.py"):
        check_shown(name, here(name))
    given = tmp_path / "given"
    given.mkdir()
    (given / "text.png").write_text("no image")
    said = here("score_folder.py", str(ROOT / "artifacts" / "dirty-mnist-resnet18"), str(given))
    assert said.startswith("1 images, 1 with an error\ntext.png ")


def test_why_rejected_without_checks_or_a_map(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    psc = PSC.load(SHIPPED_BUNDLE, device="cpu")
    bare = replace(psc, pipeline=Pipeline(psc.pipeline.scorer, psc.pipeline.calibration_scores))
    monkeypatch.setattr(PSC, "load", lambda bundle: bare)
    assert here("why_rejected.py").endswith("shirt.png: abstain_ood\n    unlike the training images\n")
    assert all(f'"{name}": "' in (EXAMPLES / "why_rejected.py").read_text() for name in CHECKS)


def test_new_camera(here: Run) -> None:
    with pytest.warns(UserWarning, match="of clear images like the calibration images at most 5 % are wrong"):
        said = here("new_camera.py")
    before, after = map(int, re.findall(r": (\d+)% false alarms", said))
    assert before > 3 * after
    check_shown("new_camera.py", said)


def test_ask_service_and_act(tmp_path: Path, here: Run) -> None:
    log = ("--log", str(tmp_path / "log"), "--log-sample", "1", "--feedback-keys", "secret")
    with serve_shipped(*log) as url:
        check_shown("ask_service.py", here("ask_service.py", url))
        check_shown("act_on_answer.py", here("act_on_answer.py", url))
        given = tmp_path / "given"
        given.write_text("no image")
        with pytest.raises(AssertionError, match="415 Unsupported image format"):
            here("ask_service.py", url, str(given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("timm_folder.py", "timm"), ("hugging_face.py", "transformers"), ("onnx_file.py", "onnx")]
)
def test_libraries(name: str, package: str) -> None:
    pytest.importorskip(package)
    said = run(name)
    of_digits, of_clothes = re.findall(r"^(?:test|other) (\{.*\})$", said, re.MULTILINE)
    assert "'accept'" in of_digits
    rejected = re.search(r"'abstain_ood': (\d+)", of_clothes)
    assert rejected is not None and int(rejected[1]) > 200
    check_shown(name, said)
