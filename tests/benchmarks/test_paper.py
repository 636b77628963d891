"""Every script with a scale runs at smoke scale on the repository's images, and resumes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.paper import ddu_case_study

SCRIPTS = {
    "ddu_case_study": "benchmarks.paper.ddu_case_study",
    "collapse_figure": "benchmarks.paper.collapse_figure",
    "projection_table": "benchmarks.paper.projection_table",
    "cifar10_uq": "benchmarks.paper.cifar10_uq",
    "ood": "benchmarks.ood.run",
    "regression": "benchmarks.regression.run",
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> list[str]:
    """Results and checkpoints that the scripts share."""
    folder = tmp_path_factory.mktemp("benchmarks")
    return ["--scale", "smoke", "--data", str(data_root), "--out", str(folder), "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore")
def test_runs_and_resumes(options: list[str], data_root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main, folder = importlib.import_module(SCRIPTS[name]).main, Path(options[5])
    first = main(options)
    record = json.loads((folder / f"{name}-smoke.json").read_text())
    parts = record["parts"].values()
    assert parts and all(part["environment"]["torch"] and "--scale smoke" in part["command"] for part in parts)
    shown = capsys.readouterr().out
    assert str(data_root) not in shown.partition("Measured at scale")[2] + json.dumps(record)
    for figure in (line for line in shown.splitlines() if line.startswith("![")):
        assert (folder / figure.partition("(")[2].rstrip(")")).exists()
    assert main(options) == first


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_another_density_and_layer_add_a_row(options: list[str]) -> None:
    added = ["--only", "vgg16", "--density", "gda++", "--collapse-on", "dirty-mnist"]
    rows = ddu_case_study.rows_of(ddu_case_study.main([*options, *added]))
    assert 0.0 <= rows["vgg16+PSC, gda++, collapse on dirty-mnist"]["auroc_ood"] <= 1.0
