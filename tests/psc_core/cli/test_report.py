import shutil
from pathlib import Path

from psc_core.bundle import CONTENT
from psc_core.cli import evaluate as cli
from tests.conftest import Run
from tests.psc_core.cli.support import undated


def test_draws_the_page_of_the_fit_again(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "public"
    text, _ = run(cli.report_main, "--bundle", tiny_bundle, "--out", out)
    assert "with PSC" in text and f"report: {out}/report.html" in text
    _, err = run(cli.report_main, "--bundle", tiny_bundle, "--out", out, code=2)
    assert "holds report.html and report already; give --overwrite" in err
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    for words in (["--out", str(out), "--overwrite"], ["--out", str(bundle)], []):
        run(cli.report_main, "--bundle", bundle, *words)
    assert undated(out / "report.html") == undated(tiny_bundle / "report.html")
    assert sorted(path.name for path in (out / "report").iterdir()) == sorted(
        path.name for path in (tiny_bundle / "report").iterdir()
    )


def test_draws_the_page_of_a_regression_again(angle_bundle: Path, tmp_path: Path, run: Run) -> None:
    assert "RMSE" in run(cli.report_main, "--bundle", angle_bundle, "--out", tmp_path)[0]
    assert undated(tmp_path / "report.html") == undated(angle_bundle / "report.html")


def test_a_bundle_without_a_report(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    (bundle / CONTENT).unlink()
    _, err = run(cli.report_main, "--bundle", bundle, code=2)
    assert err.strip().count("\n") == 0 and "--no-report" in err
