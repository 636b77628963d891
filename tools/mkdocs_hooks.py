"""What the site has beside ``docs/``: results, examples, the notebook and the changelog, each from its one file.

Where ``make docs`` found npm, the site carries the shipped bundle as a page that runs in the reader's browser.
Sphinx's roles in docstrings become plain code in the Python reference.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from app import export_cli

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "out" / "npm" / "node_modules" / "onnxruntime-web"
TRY_IT = '<a href="demo/">Try it on digits in your browser</a>: no image leaves it. Or '
NOTEBOOK = "from-images-to-service"
_ROLE = re.compile(r":[a-z]+:<code>~?\.?([^<]*)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are kept elsewhere."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    pages: dict[str, str | bytes] = {"changelog.md": changes, "examples.md": examples(), **notebook()}
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.*")):
        pages[f"results/{file.name}"] = file.read_bytes()
        if file.suffix == ".md":  # What lies elsewhere is not on the site.
            pages[f"results/{file.name}"] = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", file.read_text())
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def examples() -> str:
    """Return one page of all examples, each below its line of the table."""
    folder = ROOT / "examples"
    text = (folder / "README.md").read_text().replace("](../docs/", "](")
    text = re.sub(r"\]\((\w+)\.py\)", r"](#\1py)", text)
    code = [f"## {file.name}\n\n```python\n{file.read_text()}```\n" for file in sorted(folder.glob("*.py"))]
    return "\n".join([text, *code])


def notebook() -> dict[str, str | bytes]:
    """Return the notebook as a page with its outputs, and the pictures of these."""
    lines: list[str] = []
    found: dict[str, str | bytes] = {}
    for cell in json.loads((ROOT / "docs" / f"{NOTEBOOK}.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        lines.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                name = f"{NOTEBOOK}-{len(found)}.png"
                found[name] = base64.b64decode(picture)
                lines.append(f"![What the code above draws]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                lines.append(f"```text\n{text}\n```")
    return {f"{NOTEBOOK}.md": "\n\n".join(lines), **found}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with links to the notebook's page instead of its file, and the first one with the demo."""
    if page.file.src_uri == "index.md" and RUNTIME.is_dir():
        markdown = markdown.replace("Try it on digits: ", TRY_IT)
    return markdown.replace(f"({NOTEBOOK}.ipynb)", f"({NOTEBOOK}.md)")


def on_post_build(config: MkDocsConfig) -> None:
    """Write the demo."""
    if RUNTIME.is_dir():
        words = ["--bundle", str(ROOT / "artifacts" / "dirty-mnist-resnet18"), "--runtime", str(RUNTIME)]
        if export_cli.main([*words, "--for", "web", "--out", str(Path(config.site_dir) / "demo")]):
            raise PluginError("the demo was not written; the line above says why")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with ``:class:`.PSC``` as ``PSC``."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
