import shutil
from pathlib import Path

import pytest

from psc_core.bundle import CONTENT
from psc_core.cli import evaluate as cli
from tests.psc_core.cli.support import run, undated


def test_draws_the_page_of_the_fit_again(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "public"
    code, text, _ = run(capsys, cli.report_main, ["--bundle", str(tiny_bundle), "--out", str(out)])
    assert code == 0
    assert "with PSC" in text and f"report: {out}/report.html" in text
    code, _, err = run(capsys, cli.report_main, ["--bundle", str(tiny_bundle), "--out", str(out)])
    assert code == 2 and "holds report.html and report already; give --overwrite" in err
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    for words in (["--out", str(out), "--overwrite"], ["--out", str(bundle)], []):
        assert run(capsys, cli.report_main, ["--bundle", str(bundle), *words])[0] == 0
    assert undated(out / "report.html") == undated(tiny_bundle / "report.html")
    assert sorted(path.name for path in (out / "report").iterdir()) == sorted(
        path.name for path in (tiny_bundle / "report").iterdir()
    )


def test_draws_the_page_of_a_regression_again(
    angle_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = run(capsys, cli.report_main, ["--bundle", str(angle_bundle), "--out", str(tmp_path)])
    assert code == 0 and "RMSE" in text
    assert undated(tmp_path / "report.html") == undated(angle_bundle / "report.html")


def test_a_bundle_without_a_report(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    (bundle / CONTENT).unlink()
    code, _, err = run(capsys, cli.report_main, ["--bundle", str(bundle)])
    assert code == 2 and err.strip().count("\n") == 0 and "--no-report" in err
