"""Each benchmark runs at its smallest scale on the repository's images, and published commands can be given."""

import argparse
import importlib
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.device import plan, report, run
from benchmarks.device.subjects import Subject
from benchmarks.runs import RESULTS
from benchmarks.serving import peers
from tests.conftest import ROOT

SCRIPTS = {
    "ddu_case_study": "benchmarks.paper.ddu_case_study",
    "collapse_figure": "benchmarks.paper.collapse_figure",
    "projection_table": "benchmarks.paper.projection_table",
    "cifar10_uq": "benchmarks.paper.cifar10_uq",
    "ood": "benchmarks.ood.run",
    "regression": "benchmarks.regression.run",
    "reviewed": "benchmarks.reviewed",
}


@pytest.fixture(autouse=True)
def _keep_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs name their data folder in the environment; tests after them must not see it."""
    monkeypatch.setenv("PSC_DATA", "")
    monkeypatch.delenv("PSC_DATA")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> list[str]:
    """Results and checkpoints that the scripts share."""
    folder = tmp_path_factory.mktemp("benchmarks")
    return ["--scale", "smoke", "--data", str(data_root), "--out", str(folder), "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore")
def test_scripts_run_and_resume(options: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "ood":
        pytest.importorskip("pytorch_ood", reason="its peers come with psc[bench]")
    main, folder = importlib.import_module(SCRIPTS[name]).main, Path(options[5])
    first = main(options)
    record = json.loads((folder / f"{name}-smoke.json").read_text())
    assert record["parts"]
    shown = capsys.readouterr().out
    assert options[3] not in shown.partition("Measured at scale")[2] + json.dumps(record)  # Folders of this machine.
    assert main(options) == first


@pytest.mark.slow
def test_a_server_is_measured_beside_ours(tmp_path: Path) -> None:
    words = ["--only", "psc", "fastapi", "--cases", "compute-bound", "--best-instructions", "--out", str(tmp_path)]
    assert peers.main([*words, "--seconds", "0.2", "--rounds", "1", "--sweeps", "1"]) == 0
    (table,) = json.loads((tmp_path / "serving-peers.json").read_text())["tables"]
    for found in table["servers"].values():
        assert found["rounds"][0]["closed"]["images_per_s"] > 0 and found["sweeps"][0], found


def test_a_step_of_the_device_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, stages = "layer3.0.shortcut", ("layer1", "layer2")
    tiny = Subject("tiny", "benchmarks.networks:wide_resnet10_1", (), 10, 32, layer, (4, 3, 5), stages, (1,))
    limits = {"operations_per_s": {"fp32": 1e11, "bf16": 1e11}, "bytes_per_s": 1e10}
    for module in (run, report):
        monkeypatch.setattr(module, "SUBJECTS", (tiny,))
    monkeypatch.setattr(run, "limits_of", lambda *_: limits)
    run.main(["--device", "cpu", "--quick", "--only", "tiny", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "device-cpu.json").read_text())["subjects"]["tiny"]
    assert [(cell["precision"], cell["bucket"]) for cell in found["cells"]] == [("fp32", 1), ("bf16", 1)]
    for cell in found["cells"]:
        assert set(cell["parts_ms"]) == set(report.PARTS) and 0 < cell["tail_fraction"] < 1
        assert 0.5 < cell["operations_over_plain"] < 1  # The network is cut before its end.


@pytest.mark.parametrize("name", plan.PARTS)
def test_parts_for_a_gpu_name_what_is_there(name: str) -> None:
    words = plan.PARTS[name].words("cuda", Path("out"), Path("data"))
    assert find_spec(words[2]) is not None and not any("{" in word for word in words)
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_published_commands_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [ROOT / "README.md", *ROOT.glob("a*/README.md"), *(ROOT / "docs").glob("*.md"), *RESULTS.glob("*.md")]
    found = re.findall(r"python -m (benchmarks\.[^`#\n]*)", "\n".join(page.read_text() for page in pages))
    commands = {command.strip().replace("\\", "") for command in found}
    kept = {each for each in commands if (ROOT / f"{each.split()[0].replace('.', '/')}.py").exists()}
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, argv: list[str]) -> None:
        parse(self, argv)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    assert len(kept) > 30
    for command in kept - {"benchmarks.train"}:
        module, *words = shlex.split(command)
        with pytest.raises(InterruptedError):
            importlib.import_module(module).main(words)
