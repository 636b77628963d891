import json
from pathlib import Path

import numpy as np
import pytest

from psc_core.cli import log as cli
from tests.logged import Logged, png, write_log
from tests.psc_core.cli.support import run


def test_prints_tables_and_writes_a_page(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    write_log(log, [Logged(png(np.full((28, 28), 8 * i, np.uint8)), answered="1") for i in range(20)])
    words = ["--log", str(log), "--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network"]
    code, text, err = run(capsys, cli.replay_main, [*words, "--out", str(tmp_path / "page.html")])
    assert code == 0, err
    assert "Of all answered images, by the 20 of the random sample" in text
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()
    code, _, err = run(capsys, cli.replay_main, [*words, "--out", str(tmp_path / "page.html")])
    assert code == 2 and "holds page.html already; give --overwrite" in err
    code, text, _ = run(
        capsys, cli.replay_main, [*words, "--out", str(tmp_path / "page.html"), "--overwrite", "--json"]
    )
    assert code == 0 and json.loads(text)["all_images"]["rows"] == 20
    code, _, err = run(capsys, cli.replay_main, [*words, "--since", "2030-01-01"])
    assert code == 2 and "has no logged images of digits" in err
