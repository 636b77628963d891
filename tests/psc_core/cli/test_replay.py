import json
from pathlib import Path

import numpy as np

from psc_core.cli import log as cli
from tests.conftest import Run
from tests.logged import Logged, png, write_log


def test_prints_tables_and_writes_a_page(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    log = tmp_path / "log"
    write_log(log, [Logged(png(np.full((28, 28), 8 * i, np.uint8)), answered="1") for i in range(20)])
    words = ["--log", str(log), "--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network"]
    text, _ = run(cli.replay_main, *words, "--out", tmp_path / "page.html")
    assert "Of all answered images, by the 20 of the random sample" in text
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()
    _, err = run(cli.replay_main, *words, "--out", tmp_path / "page.html", code=2)
    assert "holds page.html already; give --overwrite" in err
    text, _ = run(cli.replay_main, *words, "--out", tmp_path / "page.html", "--overwrite", "--json")
    assert json.loads(text)["all_images"]["rows"] == 20
    assert "has no logged images of digits" in run(cli.replay_main, *words, "--since", "2030-01-01", code=2)[1]
