"""The report as files: one self-contained HTML page, its figures as PNG, and the model card of the bundle."""

from __future__ import annotations

import base64
import io
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from psc_core.bundle.manifest import Manifest
from psc_core.calibration.intervals import ValueCalibration
from psc_core.network.load import Recipe
from psc_core.report import figures, value_figures, words
from psc_core.report.content import FILE, Role
from psc_core.report.facts import Facts

PAGE: Final = "report.html"
CARD: Final = "README.md"
FIGURES: Final = "report"
"""Folder of the figures."""

_HERE: Final = Path()
"""The bundle in commands of its files, which are the same wherever it lies."""

_TEMPLATES: Final = Environment(
    loader=PackageLoader("psc_core.report", ""),
    autoescape=lambda name: name is not None and name.startswith(PAGE),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write(facts: Facts, folder: Path) -> Path:
    """Write :data:`PAGE` and :data:`FIGURES` into ``folder``; the page.

    Raises:
        OSError: ``folder`` cannot be written to.
    """
    drawn = {name: _png(figure) for name, figure in _figures(facts).items()}
    (folder / FIGURES).mkdir(exist_ok=True)
    for name, png in drawn.items():
        (folder / FIGURES / f"{name}.png").write_bytes(png)
    is_regression = facts.manifest.target is not None
    limits = {"entropies": facts.ambiguity_threshold, "deviations": facts.deviation_threshold}
    shown = [
        {
            "name": name,
            "title": title,
            "text": words.NO_LIMIT[name] if limits.get(name, 0) is None else text,
            "png": _base64(drawn[name]),
        }
        for name, (title, text) in (words.VALUE_TEXTS if is_regression else words.TEXTS).items()
        if name in drawn
    ]
    page = folder / PAGE
    page.write_text(
        _TEMPLATES.get_template(f"{PAGE}.jinja").render(
            **_values(facts),
            figures=shown,
            gallery=_gallery(facts),
            glossary=words.VALUE_GLOSSARY if is_regression else words.GLOSSARY,
        )
    )
    return page


def write_card(facts: Facts) -> None:
    """Write the model card into the bundle's folder."""
    (facts.folder / CARD).write_text(_TEMPLATES.get_template(f"{CARD}.jinja").render(**_values(facts)))


def remove(folder: Path) -> None:
    """Remove page, figures, content and card from a bundle's folder: after a new fit they describe another one."""
    for file in (folder / PAGE, folder / FILE, folder / CARD, *(folder / FIGURES).glob("*.png")):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # There is none, or it holds files of others, such as an evaluation.
        (folder / FIGURES).rmdir()


def serve_command(folder: Path, manifest: Manifest) -> str:
    """What starts the service with a bundle."""
    return f"psc-serve --bundle {shlex.quote(str(folder))}{_permission(manifest)}"


def _permission(manifest: Manifest) -> str:
    """The flag without which a network of one's own is not imported."""
    recipe = Recipe(**dict(manifest.backbone.network))
    return f" --allow-factories {shlex.quote(recipe.spec)}" if recipe.is_factory else ""


def _values(facts: Facts) -> dict[str, Any]:
    images = "images/test" if facts.manifest.target is None else "images/test.csv"
    return {
        "facts": facts,
        "manifest": facts.manifest,
        "roles": Role,
        "serve": serve_command(_HERE, facts.manifest),
        "evaluate": f"psc-eval --bundle {_HERE} --id {images} --ood NAME=images/others --out report"
        + _permission(facts.manifest),
    }


def _figures(facts: Facts) -> dict[str, Figure]:
    """Every figure that there is something to draw for, by name."""
    manifest, content = facts.manifest, facts.content
    size = (manifest.projection.c_proj, manifest.projection.d_proj)
    found = figures.of_either(content.sets, facts.collapse, manifest.layers, content.sizes, size, facts.ood_threshold)
    if manifest.target is not None and isinstance(facts.calibration, ValueCalibration):
        found |= value_figures.of_regression(
            content.sets, manifest.target, facts.calibration, facts.deviation_threshold
        )
    else:
        found |= figures.of_classifier(content.sets, manifest.classes, facts.ambiguity_threshold)
    return {name: figure for name, figure in found.items() if figure is not None}


def _gallery(facts: Facts) -> list[dict[str, Any]]:
    """Pictures by class, then by the reason why they are shown."""
    classes = facts.manifest.classes
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for picture in facts.content.pictures:
        entry = {
            "png": _base64(_picture(picture.pixels)),
            "predicted": classes[picture.predicted],
            "right": picture.predicted == picture.label,
            "ood_score": picture.ood_score,
            "entropy": picture.entropy,
        }
        found.setdefault(picture.label, {}).setdefault(picture.why, []).append(entry)
    return [{"name": classes[label], "reasons": reasons} for label, reasons in found.items()]


def _picture(pixels: Tensor) -> bytes:
    channels_last = pixels.permute(1, 2, 0).numpy()
    image = Image.fromarray(channels_last.squeeze(2) if channels_last.shape[2] == 1 else channels_last)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
