"""``psc-predict`` against a scripted service."""

import io
import json
import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from PIL import Image

from app import client_cli as cli
from app.client import Client
from psc_core.errors import ExitCode
from tests.app.client.support import MODEL, PREDICTION, Reply, Script, answer, numbers, problem
from tests.app.fakes import FakeModel, FakePipelineWithMap, pixels, png
from tests.app.live import live_server
from tests.served import HTTP


def run_cli(script: Script, *arguments: str, environment: dict[str, str] | None = None) -> int:
    return cli.main(arguments, environment=environment or {}, transport=script.transport)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name in ("one.png", "two.png", "three.png"):
        (tmp_path / name).write_bytes(b"image")
    return [str(tmp_path / name) for name in ("one.png", "two.png", "three.png")]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["x.png", "--nonsense"],
        *(["x.png", flag, value] for flag in ("--batch-size", "--timeout") for value in ("0", "-1", "nan")),
    ],
)
def test_unusable_arguments_end_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_cli(Script(), *words)


def test_cli_prints_a_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(answer(2), answer(1))
    environment = {"PSC_CLIENT_URL": "http://elsewhere:1", "PSC_CLIENT_API_KEY": "secret"}
    assert run_cli(script, *files, "--batch-size", "2", "--model", "m", environment=environment) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["image", "label", "confidence", "entropy"]
    assert [line.split()[0] for line in lines] == files
    assert lines[0].split()[1:] == ["7", "0.970", "0.120", "-41.20", "0.6300", "accept"]
    assert str(script.requests[0].url) == "http://elsewhere:1/models/m/predict"
    assert script.requests[0].headers["x-api-key"] == "secret"


def test_cli_prints_numbers_and_answers_of_two_tasks(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(numbers()), files[0]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[1:] == ["12", "5", "2", "…", "23", "0.50", "0.5000", "accept"]
    assert run_cli(Script(answer(), numbers()), *files[:2], "--batch-size", "1") == 0  # A reload changed the model.
    head, first, second = capsys.readouterr().out.splitlines()
    for title in ("label", "entropy", "decision", "mean", "interval"):
        assert head.count(title) == 1
    assert head.index("label") == first.index("7", len(files[0])) and second.index("12  ") + 2 == head.index("mean") + 4


def test_nothing_commands_the_terminal(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b]0;pwned\x07\x1b[31m\u202e\n\x9beight"
    named = httpx.Response(200, json=answer().json() | {"predictions": [PREDICTION | {"label": odd}]})
    assert run_cli(Script(named, problem(400, detail=odd, index=0)), *files[:2], "--batch-size", "1") == 2
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert len(lines) == 3 and "eight" in lines[1] and "eight" in lines[2]
    assert all(line.isprintable() for line in lines)
    assert run_cli(Script(problem(401, detail=odd)), files[0]) == 2
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


def test_cli_prints_json_lines(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(answer(3)), *files, "--json") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["image"] for document in documents] == files
    assert (documents[0]["model"], documents[0]["prediction_set"], documents[0]["is_ood"]) == (MODEL, ["7"], False)


def test_a_key_that_no_header_carries_is_not_printed(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with live_server() as url:
        assert cli.main([files[0], "--url", url], environment={"PSC_CLIENT_API_KEY": "secret "}) == 2
    output = capsys.readouterr()
    assert "API key" in output.err and "secret" not in output.out + output.err


@pytest.mark.parametrize(
    ("reply", "code"), [(problem(422), 2), (problem(401), 2), (httpx.ReadTimeout("slow"), 2), (problem(500), 1)]
)
def test_cli_exit_codes(files: list[str], capsys: pytest.CaptureFixture[str], reply: Reply, code: int) -> None:
    assert run_cli(Script(reply), *files) == code
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1


def test_images_that_cannot_be_answered_have_their_line(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A bad one, one that is too large by itself, and one that is absent."""
    bad = Script(problem(422, index=1), answer(1), answer(1))
    large = Script(problem(413), answer(1), problem(413), problem(413), answer(1))
    for script in (bad, large):
        assert run_cli(script, *files, "--batch-size", "3") == 2
        _, *lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == files
        assert ["error: " in line for line in lines] == [False, True, False]
    assert run_cli(Script(problem(422, index=0)), files[0]) == 2
    assert capsys.readouterr().out.startswith(f"{files[0]}  error: "), "no titles without columns"
    assert run_cli(Script(answer(1), answer(2)), files[0], "absent.png", *files[1:], "--json") == 2
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["image"] for document in documents] == [files[0], "absent.png", *files[1:]]
    assert ["error" in document for document in documents] == [False, True, False, False]


def test_errors_do_not_count_the_images_of_a_request(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for where in ("image 0", "image 0 ('x.png')"):
        for flags in ((), ("--json",)):
            bad = problem(422, index=0, filename="x.png", detail=f"{where}: it is cut short")
            assert run_cli(Script(bad, answer(2)), *files, *flags) == 2
            output = capsys.readouterr().out
            assert "422 Kind: it is cut short" in output and "image 0" not in output


def test_an_interruption_is_no_traceback(
    files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "ask", Mock(side_effect=KeyboardInterrupt))
    assert run_cli(Script(), *files) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "psc-predict: interrupted\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_names_not_utf8(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
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


def test_answers_are_kept_when_the_service_goes(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(answer(2), problem(500)), *files, "--batch-size", "2") == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 3 and output.err.count("\n") == 1


def test_answers_of_a_part_are_kept_when_the_rest_fails(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(Script(problem(422, index=1), answer(1), problem(500)), *files, "--json") == 1
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["image"] for document in documents] == files[:2]
    assert ["error" in document for document in documents] == [False, True]


def test_folders(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "four.JPG").write_bytes(b"image")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    assert run_cli(Script(answer(4)), "-r", str(tmp_path)) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert found == sorted([*files, str(tmp_path / "deeper" / "four.JPG")])
    assert run_cli(Script(), "-r", str(tmp_path / "empty")) == 2
    assert run_cli(Script(), str(tmp_path)) == 2
    assert "--recursive" in capsys.readouterr().out


def test_maps_of_the_real_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.png").write_bytes(png(ord(name)))
    (tmp_path / "c.png").write_bytes(b"no image")
    model = FakeModel(pipeline=FakePipelineWithMap())
    with live_server({"m": model}) as url:
        own = ["-r", str(tmp_path), "--url", url, "--maps", str(tmp_path / "maps"), "--no-monitor"]
        assert cli.main(own) == 2
        assert 'psc_unmonitored_images_total{model="m",reason="asked"} 2.0' in HTTP.get(f"{url}/metrics").text
        taken = tmp_path / "taken"
        taken.write_text("")
        assert cli.main([str(tmp_path / "a" / "same.png"), "--url", url, "--maps", str(taken)]) == 2
    assert "choose another folder for --maps" in capsys.readouterr().err
    assert sorted(file.name for file in (tmp_path / "maps").iterdir()) == ["00000-same.png", "00001-same.png"]
    with Image.open(tmp_path / "maps" / "00001-same.png") as picture:
        assert np.array_equal(np.asarray(picture), pixels(ord("b")))


@pytest.mark.parametrize("index", ["1", -1, True, 3, 1.0, None, [0]])
def test_an_index_of_no_image_concerns_all(files: list[str], capsys: pytest.CaptureFixture[str], index: object) -> None:
    script = Script(problem(422, index=index))
    assert run_cli(script, *files) == 2
    assert len(script.requests) == 1
    assert "422 Kind: what was wrong" in capsys.readouterr().err


def test_more_bad_images_than_python_has_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    count, file = 300, tmp_path / "bad.png"
    sys.setrecursionlimit(count)
    file.write_bytes(b"image")
    script = Script(*(problem(422, index=0) for _ in range(count)))
    assert run_cli(script, *[str(file)] * count, "--batch-size", str(count), "--json") == 2
    assert len(capsys.readouterr().out.splitlines()) == count
