"""The report as files: one self-contained HTML page, its figures as PNG, and the model card of the bundle."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from psc_core.bundle.manifest import Manifest
from psc_core.network.load import Recipe
from psc_core.report import figures
from psc_core.report.content import Role
from psc_core.report.facts import COLUMNS, Facts

PAGE: Final = "report.html"
CARD: Final = "README.md"
FIGURES: Final = "report"
"""Folder of the figures."""

TEXTS: Final[Mapping[str, tuple[str, str]]] = {
    "collapse": (
        "Where the network collapses",
        "Deep layers forget how images of a class differ (NC1 falls). PSC reads the shaded layer: it still varies, "
        "NC1 > ε, and tells the classes apart, high NC4.",
    ),
    "sizes": ("Size of the projection", "Squares mark the chosen number of components: the fewest that keep both."),
    "ood-scores": (
        "How unusual images are",
        "Right of the dashed line an image counts as out of distribution. Blue images belong left of it, orange ones "
        "right.",
    ),
    "entropies": (
        "How ambiguous images are",
        "Right of the dashed line an image that is not out of distribution counts as ambiguous.",
    ),
    "roc": ("Detection against false alarms", "How much is found at each rate of false alarms; up and left is better."),
    "reliability": (
        "Is the confidence honest?",
        "On the diagonal, of the images with confidence 80 %, 80 % are right.",
    ),
    "risk-coverage": (
        "What abstaining gains",
        "Error rate when the least confident images are left to a person; lower is better.",
    ),
    "confusion": ("What is taken for what", "A row is a class, a column what was predicted for it."),
}
"""Title and explanation of each figure."""

GLOSSARY: Final[Mapping[str, str]] = {
    "NC1": "Variability within classes as a fraction of all variability: 1 without classes, 0 when a class is a point.",
    "NC4": "How often the nearest class mean is that of the label, on validation images.",
    "ε": "NC1 from which down a layer counts as collapsed.",
    "OOD score": "How unlike the training images an image is; higher is more unusual. Nats.",
    "alpha": "The rate of false alarms that the OOD threshold keeps on images like the validation images.",
    "predictive entropy": "How undecided the probabilities are: 0 when sure, log(classes) when all are equal.",
    "ambiguous": "In distribution, but with a predictive entropy above the threshold.",
    "NLL": "Mean of −log(probability of the label); lower is better. Nats.",
    "ECE": "Mean gap between confidence and accuracy; 0 is honest.",
    "made-up images": "Validation images turned, binarised, framed …, to see what happens without OOD images.",
    "gate": "A reading with its own p-value: texture (early layer), kind (candidate layer), confidence (entropy).",
}
"""Words of the page."""

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
    texts = dict(TEXTS)
    if facts.ambiguity_threshold is None:
        texts["entropies"] = (texts["entropies"][0], "No threshold keeps the error rate, so no image is ambiguous.")
    shown = [{"name": name, "title": texts[name][0], "text": texts[name][1], "png": _base64(png)}
             for name, png in drawn.items()]  # fmt: skip
    page = folder / PAGE
    page.write_text(
        _TEMPLATES.get_template(f"{PAGE}.jinja").render(
            **_values(facts), figures=shown, gallery=_gallery(facts), glossary=GLOSSARY
        )
    )
    return page


def write_card(facts: Facts) -> None:
    """Write the model card into the bundle's folder."""
    (facts.folder / CARD).write_text(_TEMPLATES.get_template(f"{CARD}.jinja").render(**_values(facts)))


def serve_command(folder: Path, manifest: Manifest) -> str:
    """What starts the service with a bundle."""
    return f"psc-serve --bundle {shlex.quote(str(folder))}{_permission(manifest)}"


def _permission(manifest: Manifest) -> str:
    """The flag without which a network of one's own is not imported."""
    recipe = Recipe(**dict(manifest.backbone.network))
    return f" --allow-factories {shlex.quote(recipe.spec)}" if recipe.is_factory else ""


def _values(facts: Facts) -> dict[str, Any]:
    return {
        "facts": facts,
        "manifest": facts.manifest,
        "columns": COLUMNS,
        "roles": Role,
        "serve": serve_command(_HERE, facts.manifest),
        "evaluate": f"psc-eval --bundle {_HERE} --id images/test --ood NAME=images/others --out report"
        + _permission(facts.manifest),
    }


def _figures(facts: Facts) -> dict[str, Figure]:
    projection = facts.manifest.projection
    return figures.all_of(
        facts.content.sets,
        facts.manifest.classes,
        facts.collapse,
        facts.manifest.layers,
        facts.content.sizes,
        (projection.c_proj, projection.d_proj),
        (facts.ood_threshold, facts.ambiguity_threshold),
    )


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
