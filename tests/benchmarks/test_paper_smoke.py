"""Every script runs at smoke scale on the repository's images, and resumes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.paper import report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and checkpoints that the scripts share."""
    return tmp_path_factory.mktemp("benchmarks")


@pytest.mark.parametrize(("name", "module"), report.SECTIONS.items())
@pytest.mark.filterwarnings("ignore")
def test_runs_and_resumes(folder: Path, data_root: Path, name: str, module: str) -> None:
    main = importlib.import_module(module).main
    options = ["--scale", "smoke", "--data", str(data_root), "--out", str(folder), "--device", "cpu"]
    first = main(options)
    files = {file.name for file in folder.glob(f"{name}-smoke*")}
    assert {f"{name}-smoke.json", f"{name}-smoke.md"} <= files
    origins = json.loads((folder / f"{name}-smoke.json").read_text())["origins"]
    assert all(origin["environment"]["torch"] and "--scale smoke" in origin["command"] for origin in origins.values())
    shown = (folder / f"{name}-smoke.md").read_text()
    assert str(data_root) not in shown + json.dumps(first)
    for figure in (line for line in shown.splitlines() if line.startswith("![")):
        assert figure.partition("(")[2].rstrip(")") in files
    assert main(options)["result"] == first["result"]


@pytest.mark.filterwarnings("ignore")
def test_another_density_and_layer_add_a_row(folder: Path, data_root: Path) -> None:
    main = importlib.import_module(report.SECTIONS["ddu_case_study"]).main
    options = ["--scale", "smoke", "--data", str(data_root), "--out", str(folder), "--device", "cpu"]
    rows = main([*options, "--only", "vgg16", "--density", "gda++", "--collapse-on", "dirty-mnist"])["result"]["rows"]
    found = rows["vgg16+PSC, gda++, collapse on dirty-mnist"]
    assert 0.0 <= found["auroc_ood"] <= 1.0
    assert "collapse on dirty-mnist" in (folder / "ddu_case_study-smoke.md").read_text()
