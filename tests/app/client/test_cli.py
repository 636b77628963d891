"""``psc-predict`` against a scripted service."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from app import client_cli as cli
from psc_core import __version__
from tests.app.client.support import MODEL, Reply, Script, answer, numbers, problem
from tests.app.fakes import FakeModel, FakePipelineWithMap, pixels, png
from tests.app.live import live_server


def run_cli(script: Script, *arguments: str, environment: dict[str, str] | None = None) -> int:
    return cli.main(arguments, environment=environment or {}, transport=script.transport)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name in ("one.png", "two.png", "three.png"):
        (tmp_path / name).write_bytes(b"image")
    return [str(tmp_path / name) for name in ("one.png", "two.png", "three.png")]


@pytest.mark.parametrize(("flag", "kind"), [("--batch-size", "a positive integer"), ("--timeout", "a number above 0")])
@pytest.mark.parametrize("value", ["0", "-1", "many", "nan"])
def test_cli_flags_say_what_they_want(capsys: pytest.CaptureFixture[str], flag: str, kind: str, value: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_cli(Script(), "one.png", f"{flag}={value}")
    assert f"expected {kind}, got '{value}'" in capsys.readouterr().err


def test_cli_prints_a_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(answer(2), answer(1))
    environment = {"PSC_CLIENT_URL": "http://elsewhere:1", "PSC_CLIENT_API_KEY": "secret"}
    assert run_cli(script, *files, "--batch-size", "2", "--model", "m", environment=environment) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "image", "label", "confidence", "entropy", "log", "density", "p-value", "decision",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == files
    assert lines[1].split()[1:] == ["7", "0.970", "0.120", "-41.20", "0.6300", "accept"]
    assert len({line.index("accept") for line in lines[1:]}) == 1
    assert str(script.requests[0].url) == "http://elsewhere:1/models/m/predict"
    assert script.requests[0].headers["x-api-key"] == "secret"


def test_cli_prints_numbers(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(numbers()), files[0]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["image", "mean", "deviation", "interval", "log", "density", "p-value", "decision"]
    assert lines[1].split()[1:] == ["12.5", "5", "2", "…", "23", "0.50", "0.5000", "accept"]
    assert run_cli(Script(numbers()), files[0], "--json") == 0
    assert json.loads(capsys.readouterr().out)["mean"] == 12.5


def test_cli_prints_answers_of_two_tasks(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(answer(), numbers()), *files[:2], "--batch-size", "1") == 0  # A reload changed the model.
    head, first, second = capsys.readouterr().out.splitlines()
    for title in ("label", "entropy", "decision", "mean", "interval"):
        assert head.count(title) == 1
    assert head.index("label") == first.index("7", len(files[0])) and second.index("12.5") == head.index("mean")


def test_cli_prints_a_line_for_each_image_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(), "absent.png", "missing.png") == 2
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "image"
    assert [line.split(maxsplit=1)[0] for line in lines] == ["absent.png", "missing.png"]
    assert all("  error: cannot read" in line for line in lines)


def test_cli_prints_json_lines(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(answer(3)), *files, "--json") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["image"] for document in documents] == files
    assert documents[0]["model"] == MODEL
    assert documents[0]["prediction_set"] == ["7"]
    assert documents[0]["is_ood"] is False


@pytest.mark.parametrize(
    ("reply", "code"),
    [(problem(422), 2), (problem(401), 2), (httpx.ReadTimeout("slow"), 2), (problem(500), 1)],
)
def test_cli_exit_codes(files: list[str], capsys: pytest.CaptureFixture[str], reply: Reply, code: int) -> None:
    assert run_cli(Script(reply), *files) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("psc-predict: ")
    assert output.err.count("\n") == 1


def test_a_bad_image_has_its_line_and_the_others_their_answers(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(problem(422, index=1), answer(1), answer(1))
    assert run_cli(script, *files) == 2
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == files
    assert [line.split()[-1] for line in (lines[1], lines[3])] == ["accept", "accept"]
    assert lines[2].endswith("error: 422 Kind: what was wrong")
    assert output.err == "psc-predict: 1 of the images could not be answered\n"


def test_an_absent_file_has_its_line(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(answer(1), answer(2))
    assert run_cli(script, files[0], "absent.png", *files[1:], "--json") == 2
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["image"] for document in documents] == [files[0], "absent.png", *files[1:]]
    assert ["error" in document for document in documents] == [False, True, False, False]
    assert "cannot read absent.png: No such file" in documents[1]["error"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_file_name_that_is_not_utf8(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes(b"image")
    terminal = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run_cli(Script(answer(2)), str(tmp_path / os.fsdecode(b"caf\xe9.png")), files[0], *flags) == 0
    terminal.flush()
    first, second = terminal.buffer.getvalue().decode().splitlines()[-2:]  # type: ignore[attr-defined]
    assert "caf?.png" in first and "one.png" in second


def test_a_batch_that_is_too_large_is_sent_in_halves(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(problem(413), answer(1), answer(2)), *files) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["accept"] * 3


def test_an_image_that_is_too_large_by_itself_has_its_line(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(problem(413), answer(1), problem(413), problem(413), answer(1), answer(1))
    assert run_cli(script, *files, files[0], "--batch-size", "3") == 2
    output = capsys.readouterr()
    lines = output.out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [*files, files[0]]
    assert [line.split()[-1] for line in (lines[0], lines[2], lines[3])] == ["accept"] * 3
    assert lines[1].endswith("error: 413 Kind: what was wrong")
    assert output.err == "psc-predict: 1 of the images could not be answered\n"


def test_answers_are_kept_when_the_service_goes(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(answer(2), problem(500)), *files, "--batch-size", "2") == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 3 and output.err.count("\n") == 1


def test_folders(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "four.JPG").write_bytes(b"image")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    assert run_cli(Script(answer(4)), "-r", str(tmp_path)) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert found == sorted([*files, str(tmp_path / "deeper" / "four.JPG")])
    assert run_cli(Script(), "-r", str(tmp_path / "empty")) == 2
    assert "has no images" in capsys.readouterr().err
    assert run_cli(Script(), str(tmp_path)) == 2
    assert "Is a directory; name the images in it, or give psc-predict --recursive" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_cli(Script(), "--version")
    assert capsys.readouterr().out == f"psc {__version__}\n"


def test_cli_bad_usage_ends_with_2(files: list[str]) -> None:
    assert run_cli(Script(), files[0], "--url", "nowhere") == 2
    for arguments in ([], [files[0], "--batch-size", "0"], [files[0], "--timeout", "inf"], ["--nonsense"]):
        with pytest.raises(SystemExit) as caught:
            run_cli(Script(), *arguments)
        assert caught.value.code == 2


def test_against_the_real_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bright.png").write_bytes(png(255))
    with live_server(api_keys=("key",)) as url:
        environment = {"PSC_CLIENT_URL": url, "PSC_CLIENT_API_KEY": "key"}
        assert cli.main([str(tmp_path / "bright.png")], environment=environment) == 0
    assert "bright" in capsys.readouterr().out.splitlines()[1]
    assert cli.main([str(tmp_path / "bright.png")], environment={"PSC_CLIENT_URL": url}) == 2


def test_maps_of_the_real_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.png").write_bytes(png(ord(name)))
    (tmp_path / "c.png").write_bytes(b"no image")
    model = FakeModel(pipeline=FakePipelineWithMap())
    with live_server({"m": model}) as url:
        own = ["-r", str(tmp_path), "--url", url, "--maps", str(tmp_path / "maps"), "--no-monitor"]
        assert cli.main(own) == 2
        assert 'psc_unmonitored_images_total{model="m",reason="asked"} 2.0' in httpx.get(f"{url}/metrics").text
        taken = tmp_path / "taken"
        taken.write_text("")
        assert cli.main([str(tmp_path / "a" / "same.png"), "--url", url, "--maps", str(taken)]) == 2
    assert "cannot write" in (err := capsys.readouterr().err) and "choose another folder for --maps" in err
    assert sorted(file.name for file in (tmp_path / "maps").iterdir()) == ["00000-same.png", "00001-same.png"]
    with Image.open(tmp_path / "maps" / "00001-same.png") as picture:
        assert np.array_equal(np.asarray(picture), pixels(ord("b")))


@pytest.mark.parametrize("index", ["1", -1, True, 3, 1.0, None, [0]])
def test_an_index_of_no_image_concerns_every_image(
    files: list[str], capsys: pytest.CaptureFixture[str], index: object
) -> None:
    script = Script(problem(422, index=index))
    assert run_cli(script, *files) == 2
    assert len(script.requests) == 1
    assert capsys.readouterr().err == "psc-predict: 422 Kind: what was wrong\n"


def test_more_bad_images_than_python_has_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = sys.getrecursionlimit()
    file = tmp_path / "bad.png"
    file.write_bytes(b"image")
    script = Script(*(problem(422, index=0) for _ in range(count)))
    assert run_cli(script, *[str(file)] * count, "--batch-size", str(count), "--json") == 2
    assert len(capsys.readouterr().out.splitlines()) == count
