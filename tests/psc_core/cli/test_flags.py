import errno
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from psc_core import __version__
from psc_core.cli import flags
from psc_core.cli import main as psc
from psc_core.errors import DataError

ENDS = {"--help": 0, "--version": 0, "": 2, "--unknown": 2}  # a flag, and the code that a command ends with


@pytest.mark.parametrize(
    "command",
    ["evaluate.main", "evaluate.report_main", "fit.main", "log.main", "log.recalibrate_main", "log.replay_main",
     "score.main"],
)  # fmt: skip
def test_help_the_version_and_usage_errors_import_no_torch(command: str) -> None:
    module, function = command.split(".")
    program = f"""
import sys
from importlib.metadata import distribution
from psc_core.cli.{module} import {function} as main
for flag in {[*ENDS]}:
    try:
        main(flag.split())
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = [line.split() for line in done.stderr.splitlines() if line.endswith((" True", " False"))]
    assert said == [[str(code), "False"] for code in ENDS.values()]


def test_psc_runs_the_other_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fit", "serve", "log"):
        monkeypatch.setattr("sys.argv", ["psc", name, "--version"])
        with pytest.raises(SystemExit, match=r"^0$"):
            psc()
        assert capsys.readouterr().out == f"psc {__version__}\n"
    monkeypatch.setattr("sys.argv", ["psc", "--help"])
    assert psc() == 0
    listed = capsys.readouterr().out
    names = {point.name.removeprefix("psc-") for point in distribution("psc").entry_points} - {"psc"}
    assert names == {line.split()[0] for line in listed.splitlines() if line.startswith("  ")}
    monkeypatch.setattr("sys.argv", ["psc", "nothing"])
    assert psc() == 2 and "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_full_disk_is_a_failure_and_no_bad_input(code: int, is_named: bool) -> None:
    def fill(_: object) -> None:
        try:
            raise OSError(code, "is full", "part-00000.jsonl")
        except OSError as error:
            if is_named:
                raise DataError("cannot write") from error
            raise

    assert flags.run(fill, flags.command("psc", "", ""), []) == 1


def test_a_closed_standard_output_is_a_failure_of_one_line() -> None:
    program = """
import sys
from psc_core.cli import flags
sys.exit(flags.run(lambda _: print("done"), flags.command("psc-score", "", ""), []))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read().startswith("psc-score: standard output, or a connection, was closed (")
        assert process.wait() == 1
    none = subprocess.run([sys.executable, "-c", f"import sys\nsys.stdout = None\n{program}"], check=False)
    assert none.returncode == 0
