"""Write a report as files: one self-contained HTML page, its figures as PNG, and the model card of the bundle."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, pass_eval_context
from jinja2.nodes import EvalContext

from psc_core.bundle import Manifest
from psc_core.images.decode import SMALL, as_base64, png_of
from psc_core.network.described import NetworkSpec
from psc_core.report import FIGURES, PAGE, figures
from psc_core.report.content import FILE, Role
from psc_core.report.facts import Facts

CARD: Final = "README.md"

_WIDE: Final = 5.0  # the width, in inches, from which a figure takes a whole line of the page
_HERE: Final = Path()  # the path of the bundle in commands, which are the same wherever the bundle lies

_CONTROLS: Final = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029], " ")


@pass_eval_context
def _plain(template: EvalContext, value: object) -> object:
    """Return a text without control characters, and without tags on the card; the page is escaped as a whole."""
    if not isinstance(value, str):
        return value
    plain = value.translate(_CONTROLS)
    return plain if template.autoescape else plain.replace("<", "&lt;")


TEMPLATES: Final = Environment(
    loader=PackageLoader("psc_core.report", ""),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_plain,
)


def write(facts: Facts, folder: Path) -> Path:
    """Write :data:`PAGE` and :data:`FIGURES` into ``folder``, replacing another report, and return the page's path."""
    drawn = figures.draw(facts)
    pngs = {name: figures.png(figure) for name, figure in drawn.items()}
    (folder / FIGURES).mkdir(exist_ok=True)
    _remove_figures(folder)
    for name, png in pngs.items():
        (folder / FIGURES / f"{name}.png").write_bytes(png)
    words, limits = facts.of_task, facts.limits
    shown = [
        {
            "name": name,
            "title": title,
            "text": words.no_limit[name] if limits.get(name, 0) is None else text,
            "png": as_base64(pngs[name]),
            "is_wide": drawn[name].get_figwidth() >= _WIDE,
        }
        for name, (title, text) in words.texts.items()
        if name in drawn
    ]
    page = folder / PAGE
    page.write_text(
        _template(facts, PAGE).render(**_values(facts), figures=shown, gallery=_gallery(facts), glossary=words.glossary)
    )
    return page


def write_card(facts: Facts) -> None:
    """Write the model card into the bundle's folder."""
    (facts.folder / CARD).write_text(_template(facts, CARD).render(**_values(facts)))


def remove(folder: Path) -> None:
    """Remove page, figures, content and card from a bundle's folder, because after a new fit they are out of date."""
    for file in (folder / PAGE, folder / FILE, folder / CARD):
        file.unlink(missing_ok=True)
    _remove_figures(folder)
    with suppress(OSError):  # missing, or it holds other files, such as an evaluation's
        (folder / FIGURES).rmdir()


def _remove_figures(folder: Path) -> None:
    for file in (folder / FIGURES).glob("*.png"):
        file.unlink()


def serve_command(folder: Path, manifest: Manifest) -> str:
    """Return the command that serves a bundle."""
    return f"psc-serve --bundle {shlex.quote(str(folder))}{_permission(manifest)}"


def _permission(manifest: Manifest) -> str:
    """Return the flag that permits importing the factory of a network, if the bundle needs it."""
    network = manifest.backbone.network
    if network is None or not NetworkSpec(**dict(network)).is_factory:
        return ""
    return f" --allow-factories {shlex.quote(network.spec)}"


def _template(facts: Facts, name: str) -> Template:
    return TEMPLATES.get_template(f"{facts.of_task.templates}.{name}.jinja")


def _values(facts: Facts) -> dict[str, Any]:
    images, permission = facts.of_task.test_images, _permission(facts.manifest)
    return {
        "facts": facts,
        "manifest": facts.manifest,
        "roles": Role,
        "serve": serve_command(_HERE, facts.manifest),
        "evaluate": f"psc-eval --bundle {_HERE} --id {images} --ood NAME=images/others --out report{permission}",
    }


def _gallery(facts: Facts) -> list[dict[str, Any]]:
    classes = facts.manifest.classes
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for picture in facts.content.pictures:
        entry = {
            "png": as_base64(png_of(picture.pixels.numpy(), SMALL)),
            "predicted": classes[picture.predicted],
            "right": picture.predicted == picture.label,
            "ood_score": picture.ood_score,
            "entropy": picture.entropy,
        }
        found.setdefault(picture.label, {}).setdefault(picture.why, []).append(entry)
    return [{"name": classes[label], "reasons": reasons} for label, reasons in found.items()]
