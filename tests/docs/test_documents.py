"""Documents against the code: links and headings, make targets, command lines, imports, generated tables."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import shtab

from app.cli import parser as serve_parser
from app.client_cli import parser as predict_parser
from app.export_cli import parser as export_parser
from benchmarks.report import SECTIONS, section, updated
from benchmarks.runs import RESULTS
from psc_core.cli.evaluate import parser as eval_parser
from psc_core.cli.evaluate import report_parser as report_parser
from psc_core.cli.fit import parser as fit_parser
from psc_core.cli.log import parser as log_parser
from psc_core.cli.log import recalibrate_parser as recalibrate_parser
from psc_core.cli.log import replay_parser as replay_parser
from psc_core.cli.score import parser as score_parser
from tests import warm
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "artifacts" / "README.md",
        ROOT / "examples" / "README.md",
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
PARSERS = {
    "psc-fit": fit_parser, "psc-eval": eval_parser, "psc-score": score_parser, "psc-report": report_parser,
    "psc-export": export_parser,
    "psc-log": log_parser, "psc-recalibrate": recalibrate_parser, "psc-replay": replay_parser,
    "psc-serve": serve_parser, "psc-predict": predict_parser,
}  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_exist(document: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        assert file.exists(), f"{document.name}: {target}"
        if heading:
            assert heading in headings(file.read_text()), f"{document.name}: {target}#{heading}"


def headings(text: str) -> set[str]:
    """Anchors of a Markdown page, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def command_lines(text: str) -> list[list[str]]:
    """Commands of the shell blocks, continued lines joined, comments and the mark of a background job dropped."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line.removesuffix("&"), comments=True) for line in lines if line.strip()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_parse(document: Path) -> None:
    for words in command_lines(document.read_text()):
        if words and words[0] in PARSERS and "…" not in words:
            PARSERS[words[0]]().parse_args(words[1:])


@pytest.mark.parametrize("command", PARSERS)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_flags_can_be_completed(command: str, shell: str) -> None:
    script = shtab.complete(PARSERS[command](), shell)
    assert "--help" in script and command in script.replace("_", "-")


def test_index_page_stands_alone() -> None:
    """Where a package index shows it, there are no other files to link to."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]["text"]
    assert "](" not in text
    for words in command_lines(text):
        PARSERS[words[0]]().parse_args(words[1:])


def test_readme_curl_lines_send_existing_files() -> None:
    files = re.findall(r"images=@(\S+)", README)
    assert len(files) == 4
    assert all((ROOT / file).is_file() for file in files)


def test_readme_python_imports_exported_names() -> None:
    import psc_core

    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(block, "README", "exec")
    (names,) = re.findall(r"from psc_core import (.*)", block)
    for name in names.split(", "):
        assert hasattr(psc_core, name)


def test_scores_are_read_with_the_names_of_their_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "scoring.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("scores").mkdir()
    rows = [
        {"item": "1", "label": "007", "ood_score": 0.5, "is_ood": True, "error": None},
        {"item": "2", "label": None, "ood_score": None, "is_ood": None, "error": "damaged"},
    ]
    Path("scores/part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exec(block, read := dict[str, Any]())
    found = read["scores"][read["scores"].is_ood].drop(columns="error")
    assert found.to_dict("records") == [{"item": "1", "label": "007", "ood_score": 0.5, "is_ood": True}]


@pytest.mark.parametrize(
    ("table", "document"), [("settings", "settings.md"), ("metrics", "metrics.md"), ("problems", "errors.md")]
)
def test_generated_tables_are_up_to_date(table: str, document: str) -> None:
    command = [sys.executable, "-m", "tests.docs.tables", table]
    printed = warm.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    page = (ROOT / "docs" / document).read_text()
    parts = re.split(r"\n*^(## .+)\n+", printed.strip(), flags=re.MULTILINE)
    for heading, rows in zip(["", *parts[1::2]], parts[::2], strict=True):
        under = page.partition(f"\n{heading}\n")[2].partition("\n## ")[0] if heading else page
        assert rows in under, f"{table}, {heading}: put this into docs/{document}:\n{rows}"
        assert len(set(lines := rows.splitlines())) == len(lines)


def test_documentation_site_builds_without_outside_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert {page.parent.name for page in pages} >= {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    loaded = r'<(?:script|img|link)\b[^>]*\b(?:src|href)="(https?://[^"]+)"'
    assert [found for page in pages for found in re.findall(loaded, page.read_text())] == []


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


@pytest.mark.parametrize("name", SECTIONS)
def test_section_is_made_from_its_results(name: str) -> None:
    text, page = section(RESULTS, name), (RESULTS / SECTIONS[name][0]).read_text()
    if text is None:  # Of a device that nothing was measured on.
        assert name.endswith("-cuda") and f"<!-- begin {name} -->" not in page
    else:
        assert updated(page, name, text) == page


def headlines() -> Mapping[str, str]:
    """Sections of the headline page that have a table, by title."""
    parts = re.split(r"\n## ", (RESULTS / "README.md").read_text())[1:]
    return {part.splitlines()[0]: part for part in parts if "\n|" in part}


def check_known(cells: Iterable[str], known: Sequence[float]) -> None:
    """Each decimal number of a table is one of those that are known, rounded."""
    for text in NUMBER.findall("\n".join(cells)):
        decimals, number = len(text.partition(".")[2]), float(text.replace(",", ""))
        assert not decimals or any(abs(value - number) <= 0.500001 * 10**-decimals for value in known), text


@pytest.mark.parametrize("title", headlines())
def test_headline_numbers_are_on_the_page_they_link_to(title: str) -> None:
    pages = set(re.findall(r"\]\(([a-z]+\.md)", headlines()[title]))
    known = [float(text.replace(",", "")) for page in pages for text in NUMBER.findall((RESULTS / page).read_text())]
    assert known
    lines = (line for line in headlines()[title].splitlines() if line.startswith("|"))
    check_known([line.partition("|")[2].partition("|")[2] for line in lines], known)


def test_numbers_of_the_shipped_bundle_are_measured() -> None:
    """By one of its two evaluations."""
    page = (ROOT / "artifacts" / "README.md").read_text()
    section = page.partition("### What it measures")[2].partition("\n## ")[0]
    files = set(re.findall(r"\]\(\.\./benchmarks/results/(shipped[a-z-]*\.json)\)", section))
    assert len(files) == 2
    known: list[float] = []
    for file in files:
        json.loads((RESULTS / file).read_text(), parse_float=lambda text: known.append(abs(float(text))))
    known += [100 * value for value in known] + [100 * (1 - value) for value in known]
    check_known([line for line in section.splitlines() if line.startswith("|")], known)
