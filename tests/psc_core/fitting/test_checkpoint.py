import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from psc_core import bundle, fit
from psc_core.cli import fit as cli
from psc_core.cli import job
from psc_core.compute import Compute
from psc_core.errors import ExitCode
from psc_core.fit_data import agree
from tests import tiny, warm
from tests.conftest import ROOT, TinyJob
from tests.psc_core.cli.support import undated

STAGES = ("collapse", "project", "fit_model")
NAME = ("--name", "digits")


def version(folder: Path) -> str:
    return bundle.read_bundle(folder).manifest.version


def arguments(job: TinyJob, out: Path, *more: str, report: bool = False) -> list[str]:
    """Arguments of a fit with a quick head, and without the pictures that take most of its time, unless asked for."""
    head = () if {"--head", "--predictions"} & {*more} else ("--head", "duq")
    return [*job.args, *NAME, *head, "--out", str(out), *([] if report else ["--no-report"]), *more]


@pytest.fixture(scope="module")
def uninterrupted(tiny_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Version of the bundle that one uninterrupted run writes."""
    out = tmp_path_factory.mktemp("uninterrupted") / "bundle"
    assert cli.main(arguments(tiny_job, out)) == 0
    return version(out)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stages that were run, in order."""
    ran: list[str] = []

    def recorded(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return stage(*args, **kwargs)

        return run

    for name in STAGES:
        monkeypatch.setattr(fit, name, recorded(name, getattr(fit, name)))
    return ran


def stopped(*_: Any, **__: Any) -> NoReturn:
    raise KeyboardInterrupt


def interrupt(job: TinyJob, out: Path, stage: str, more: Sequence[str] = ()) -> None:
    """Run the job until ``stage`` begins, and interrupt it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, stage, stopped)
        assert cli.main(arguments(job, out, *more)) == ExitCode.INTERRUPTED
    assert not out.exists()


def kept(out: Path) -> set[str]:
    return {file.name for folder in out.parent.glob(".*.stages") for file in folder.iterdir()}


def files_of(folder: Path) -> list[Path]:
    return sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("head", ["laplace", "sngp"])
def test_equal_jobs_equal_bytes(
    tiny_job: TinyJob, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.setattr("psc_core.heads.sngp.FEATURES", 64)
    first, second = tmp_path / "first" / "bundle", tmp_path / "second" / "bundle"
    if head == "laplace":
        first = tiny_bundle
        assert cli.main([*tiny_job.args, "--out", str(second)]) == 0
    else:
        for out in (first, second):
            assert cli.main(arguments(tiny_job, out, "--head", head)) == 0
    files = files_of(first)
    assert files == files_of(second)
    for name in files:
        if name.name == "report.html":
            assert undated(first / name) == undated(second / name)
        else:
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_new_interpreter_gives_the_same_version(tiny_job: TinyJob, tmp_path: Path, uninterrupted: str) -> None:
    program = "import sys, torch; torch.set_num_threads(1); from psc_core.cli.fit import main; sys.exit(main())"
    done = warm.run(
        [sys.executable, "-c", program, *arguments(tiny_job, tmp_path / "bundle")],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert version(tmp_path / "bundle") == uninterrupted


def test_seed_changes_the_version(tiny_job: TinyJob, tmp_path: Path, uninterrupted: str) -> None:
    assert cli.main(arguments(tiny_job, tmp_path / "bundle", "--seed", "1")) == 0
    assert version(tmp_path / "bundle") != uninterrupted


@pytest.mark.parametrize(
    ("stage", "files", "left"),
    [
        ("collapse", set(), ["collapse", "project", "fit_model"]),
        ("project", {"job.txt", "collapse.json"}, ["project", "fit_model"]),
        ("fit_model", {"job.txt", "collapse.json", "fitted_projection.safetensors"}, ["fit_model"]),
    ],
)
def test_resumed_fit_gives_the_same_bundle(
    tiny_job: TinyJob,
    tmp_path: Path,
    uninterrupted: str,
    calls: list[str],
    stage: str,
    files: set[str],
    left: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "bundle"
    interrupt(tiny_job, out, stage)
    assert kept(out) == files
    calls.clear()
    capsys.readouterr()
    assert cli.main(arguments(tiny_job, out)) == 0
    says_so = "this fit goes on where an interrupted run stopped" in capsys.readouterr().out
    assert says_so == (left != list(STAGES))
    assert calls == left
    assert version(out) == uninterrupted
    assert kept(out) == set()


def test_fit_that_was_interrupted_in_its_report_goes_on(
    tiny_job: TinyJob, tmp_path: Path, uninterrupted: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle is there by then: this job may replace it, another one not without ``--overwrite``."""
    out = tmp_path / "bundle"
    with monkeypatch.context() as patch:
        patch.setattr(job, "collect_fit", stopped)
        assert cli.main(arguments(tiny_job, out, report=True)) == ExitCode.INTERRUPTED
    assert version(out) == uninterrupted and not (out / "report.html").exists()
    stages = kept(out)
    calls.clear()
    for other in (("--seed", "1"), ("--fresh",)):
        assert cli.main(arguments(tiny_job, out, *other, report=True)) == ExitCode.BAD_INPUT
    assert kept(out) == stages and calls == []
    assert cli.main(arguments(tiny_job, out, report=True)) == 0
    assert calls == ["fit_model"]
    assert version(out) == uninterrupted and (out / "report.html").exists()
    assert kept(out) == set()


@pytest.mark.parametrize("change", [("--mean", "0.2"), ("--epsilon", "0.3"), ("--fresh",)])
def test_changed_job_starts_again(tiny_job: TinyJob, tmp_path: Path, calls: list[str], change: tuple[str, ...]) -> None:
    out = tmp_path / "bundle"
    interrupt(tiny_job, out, "fit_model")
    calls.clear()
    assert cli.main(arguments(tiny_job, out, *change)) == 0
    assert calls == list(STAGES)


def test_edited_code_of_the_network_starts_again(
    tiny_job: TinyJob, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    interrupt(tiny_job, out, "fit_model")
    plain = tiny.network

    def edited(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
        net = plain(num_classes, in_channels)
        net[3] = nn.GELU()
        return net

    monkeypatch.setattr(tiny, "network", edited)
    calls.clear()
    assert cli.main(arguments(tiny_job, out)) == 0
    assert calls == list(STAGES)


@pytest.mark.parametrize("change", [("--head", "laplace"), ("--predictions", "original")])
def test_later_settings_resume(tiny_job: TinyJob, tmp_path: Path, calls: list[str], change: tuple[str, ...]) -> None:
    out = tmp_path / "bundle"
    assert cli.main(arguments(tiny_job, out, "--pca", "9999")) == 2
    calls.clear()
    assert cli.main(arguments(tiny_job, out, *change)) == 0
    assert calls == ["fit_model"]


def test_incomplete_stage_is_refitted(tiny_job: TinyJob, tmp_path: Path, uninterrupted: str, calls: list[str]) -> None:
    out = tmp_path / "bundle"
    interrupt(tiny_job, out, "fit_model")
    folder = next(tmp_path.glob(".*.stages"))
    (folder / "fitted_projection.safetensors").rename(folder / "fitted_projection.safetensors.part")
    calls.clear()
    assert cli.main(arguments(tiny_job, out)) == 0
    assert calls == ["project", "fit_model"]
    assert version(out) == uninterrupted


@dataclass(frozen=True)
class Peer(Compute):
    """One of two processes; ``others`` is what the other one adds to a sum."""

    world: int = 2
    others: float = 0.0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(self.others)


def test_processes_agree_on_finished_stages() -> None:
    assert agree("kept", Compute(torch.device("cpu"))) == "kept"
    assert agree(None, Compute(torch.device("cpu"))) is None
    assert agree("kept", Peer(torch.device("cpu"), others=1.0)) == "kept"
    assert agree("kept", Peer(torch.device("cpu"), others=0.0)) is None
    assert agree(None, Peer(torch.device("cpu"), others=1.0)) is None
