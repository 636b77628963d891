"""The page of a report, its card, and figures that draw the numbers that they are given."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core.answers import ACCEPTS_NOTHING, BETTER_THAN_GUESSING
from psc_core.bundle import read_bundle
from psc_core.collapse import CollapseReport, LayerCollapse, LinearFit, NearestMean
from psc_core.report import FIGURE_FILES, FIGURES, page
from psc_core.report import page as figures
from psc_core.report.content import Content, Facts, Role, facts_of
from psc_core.report.tasks import ClassificationTaskReport as words
from psc_core.report.tasks import RegressionTaskReport as regression_words
from tests.psc_core.report.support import content, image_set, value_content


@pytest.fixture
def shipped(shipped_bundle: Path) -> Facts:
    """The shipped bundle with images of known scores."""
    return facts_of(read_bundle(shipped_bundle), content(read_bundle(shipped_bundle).manifest.version))


@pytest.fixture
def angles(angle_bundle: Path) -> Facts:
    """A regression with images of known numbers."""
    return facts_of(read_bundle(angle_bundle), value_content(read_bundle(angle_bundle).manifest.version))


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_self_contained_and_replaces_another(shipped: Facts, tmp_path: Path) -> None:
    (tmp_path / FIGURES).mkdir()
    for name in ("deviations.png", "0001.png", "notes.txt"):
        (tmp_path / FIGURES / name).write_text("of another report")
    written = Page(page.write(shipped, tmp_path).read_text())
    images = [attributes for tag, attributes in written.tags if tag == "img"]
    assert len(images) == 8 + 1  # Every figure and one picture.
    assert all(str(image["src"]).startswith("data:image/png;base64,") and image["alt"] for image in images)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in written.tags}
    kept, drawn = {"0001.png", "notes.txt"}, {f"{name}.png" for name in words.texts}
    assert {path.name for path in (tmp_path / FIGURES).iterdir()} == kept | drawn
    assert drawn | {f"{name}.png" for name in regression_words.texts} == FIGURE_FILES
    assert all(word in written.text for word in ("turned", "psc-serve --bundle", *words.glossary))
    assert re.search(r"clothes\s*out-of-distribution images\s*3\s*\d+\.\d %", written.text)


def test_page_and_card_of_a_regression(angles: Facts, tmp_path: Path) -> None:
    written = Page(page.write(angles, tmp_path).read_text())
    images = [attributes for tag, attributes in written.tags if tag == "img"]
    titles = [title for title, _ in regression_words.texts.values()]
    assert sorted(str(image["alt"]).split(". ")[0] for image in images) == sorted(titles)
    assert {path.stem for path in (tmp_path / FIGURES).iterdir()} == set(regression_words.texts)
    assert re.search(r"with PSC\s*1\s*0\.5\s*1\.25\s*0\.75", written.text)
    assert all(word in written.text for word in (*regression_words.glossary, *angles.policy_lines))
    page.write_card(replace(angles, folder=tmp_path))
    card = (tmp_path / page.CARD).read_text()
    assert "| the original network | 2 | – | – | – |\n| with PSC | 1 | 0.5 |" in card
    assert all(f"* {line}\n" in card for line in angles.policy_lines)
    assert all("ambiguous" not in text for text in (written.text, card))


@pytest.mark.filterwarnings("ignore:Glyph")  # No font draws an escape code.
def test_names_are_plain_text(shipped: Facts, tmp_path: Path) -> None:
    name = r"$\frac{1}{0$ <script>alert(1)</script>" + "\n# Heading\x1b[31m"
    manifest = shipped.manifest.model_copy(update={"classes": (name, *shipped.manifest.classes[1:]), "layers": (name,)})
    sets = tuple(replace(images, name=name) for images in shipped.content.sets)
    hostile = replace(shipped, folder=tmp_path, manifest=manifest, content=replace(shipped.content, sets=sets))
    written = page.write(hostile, tmp_path).read_text()
    page.write_card(hostile)
    card = (tmp_path / page.CARD).read_text()
    assert r"$\frac{1}{0$ &lt;script>alert(1)&lt;/script> # Heading [31m, " in card
    assert all("<script>" not in text and "\x1b" not in text for text in (written, card))
    assert "\n# Heading" not in card


def test_page_without_images(shipped: Facts, tmp_path: Path) -> None:
    policy = shipped.manifest.policy.model_copy(update={"ambiguity_threshold": 5.0})
    manifest = shipped.manifest.model_copy(update={"policy": policy})
    bare = replace(shipped, content=Content(manifest.version), manifest=manifest)
    written = Page(page.write(bare, tmp_path).read_text())
    (image,) = (attributes for tag, attributes in written.tags if tag == "img")
    assert image["alt"] == "{}. {}".format(*words.texts["collapse"])


def test_page_and_card_open_with_what_is_accepted(shipped: Facts, tmp_path: Path) -> None:
    policy = shipped.manifest.policy.model_copy(update={"ambiguity_threshold": ACCEPTS_NOTHING, "risk": None})
    metrics = {**shipped.manifest.metrics, BETTER_THAN_GUESSING: False}
    manifest = shipped.manifest.model_copy(update={"policy": policy, "metrics": metrics})
    nothing = replace(shipped, folder=tmp_path, manifest=manifest, content=Content(manifest.version))
    page.write_card(nothing)
    for text in (Page(page.write(nothing, tmp_path).read_text()).text, (tmp_path / page.CARD).read_text()):
        assert "NO BETTER THAN GUESSING" in text and "NOTHING IS ACCEPTED" in text and "order of the classes" in text


def test_card_has_the_numbers_of_the_facts(shipped: Facts, tmp_path: Path) -> None:
    page.write_card(replace(shipped, folder=tmp_path))
    card = (tmp_path / page.CARD).read_text()
    quality = shipped.quality["with PSC"]
    assert "| with PSC | {accuracy:.4f} | {nll:.4f} | {ece:.4f} |".format(**quality) in card
    assert "psc-serve --bundle ." in card and f"{shipped.ood_threshold:.4g} nats" in card


def test_sizes_of_which_one_is_fixed_are_lines() -> None:
    nc1, nc4 = torch.rand(2, 1, 6, dtype=torch.float64)
    lines = figures.sizes(nc1, nc4, (1, 4)).axes[0].lines
    assert [line.get_ydata().tolist() for line in lines[:2]] == [nc1.flatten().tolist(), nc4.flatten().tolist()]  # type: ignore[union-attr]
    assert lines[2].get_xydata().tolist() == [[4, float(nc1[0, 3])], [4, float(nc4[0, 3])]]  # type: ignore[union-attr]
    assert len(figures.sizes(torch.rand(2, 6), torch.rand(2, 6), (1, 4)).axes) == 4  # Two maps and their scales.


def test_roc_is_the_curve_of_the_auroc() -> None:
    inside = image_set("validation", Role.VALIDATION, [0.0, 1.0, 1.0, 3.0])
    outside = image_set("clothes", Role.OOD, [1.0, 2.0, 4.0])
    drawn = figures.roc(inside, [outside])
    assert drawn is not None
    x, y = drawn.axes[0].lines[0].get_data()
    pairs = [(a, b) for a in inside.ood_score.tolist() for b in outside.ood_score.tolist()]
    expected = sum((b > a) + 0.5 * (b == a) for a, b in pairs) / len(pairs)
    assert np.trapezoid(y, x) == pytest.approx(expected)


def test_scores_say_how_much_lies_above_the_limit() -> None:
    sets = [
        image_set("validation", Role.VALIDATION, [0.0, 1.0, 2.0, 3.0]),
        image_set("odd", Role.SYNTHETIC, [5.0, 1.0]),
    ]
    drawn = figures.scores(sets, "ood_score", "OOD score", 1.5)
    assert drawn is not None
    assert [text.get_text() for text in drawn.axes[0].texts] == ["50.0% above", "50.0% above"]


def test_collapse_names_what_was_measured() -> None:
    layer = LayerCollapse("2", 0, "map", (8, 196), (14, 14), "", 0.5, 0.25)
    for measure in (NearestMean, LinearFit):
        report = CollapseReport((layer,), 0.2, "modules", None, 10, 10, measure=measure)
        lines = figures.collapse(report, ["2"]).axes[0].lines
        assert [list(line.get_ydata()) for line in lines[:2]] == [[0.5], [0.25]]  # type: ignore[arg-type]
        assert str(lines[1].get_label()).startswith(measure.name)


def test_ticks_are_apart_and_inside() -> None:
    """However far images are from the ordinary ones, among which the axis is nearly linear."""
    sets = [
        image_set("validation", Role.VALIDATION, torch.linspace(0, 3, 40).tolist()),
        image_set("far", Role.OOD, torch.logspace(0, 4, 40).tolist()),
    ]
    drawn = figures.scores(sets, "ood_score", "", 2.5)
    assert drawn is not None
    (axis,) = drawn.axes
    places = axis.transAxes.inverted().transform(axis.transData.transform([(tick, 0) for tick in axis.get_xticks()]))
    assert len(places) == figures.TICKS and np.diff(places[:, 0]).min() > 0.05
    assert len({label.get_text() for label in axis.get_xticklabels()}) == figures.TICKS


@pytest.mark.parametrize("limit", [None, 1.0, 2.0, 3.0])
def test_constant_scores_are_drawn(limit: float | None) -> None:
    drawn = figures.scores([image_set("validation", Role.VALIDATION, [2.0] * 5)], "ood_score", "", limit)
    assert drawn is not None
    edges = drawn.axes[0].patches[0].get_data().edges  # type: ignore[attr-defined]
    assert edges[0] < edges[-1] and edges[0] <= 2 <= edges[-1]


@pytest.mark.parametrize("bundle", ["shipped_bundle", "angle_bundle"])
def test_nothing_to_draw_is_no_figure(bundle: str, request: pytest.FixtureRequest) -> None:
    read = read_bundle(request.getfixturevalue(bundle))
    assert set(figures.draw(facts_of(read, Content(read.manifest.version)))) == {"collapse"}
