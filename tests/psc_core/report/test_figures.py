"""The figures draw the numbers that they are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psc_core.bundle import read_bundle
from psc_core.collapse import CollapseReport, LayerCollapse, LinearFit, NearestMean
from psc_core.report import page as figures
from psc_core.report.content import Content, Role, facts_of
from tests.psc_core.report.support import image_set


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


@pytest.mark.parametrize("limit", [None, 1.0, 3.0])
def test_constant_scores_are_drawn(limit: float | None) -> None:
    drawn = figures.scores([image_set("validation", Role.VALIDATION, [2.0] * 5)], "ood_score", "", limit)
    assert drawn is not None
    edges = drawn.axes[0].patches[0].get_data().edges  # type: ignore[attr-defined]
    assert edges[0] < edges[-1] and edges[0] <= 2 <= edges[-1]


@pytest.mark.parametrize("bundle", ["shipped_bundle", "angle_bundle"])
def test_nothing_to_draw_is_no_figure(bundle: str, request: pytest.FixtureRequest) -> None:
    read = read_bundle(request.getfixturevalue(bundle))
    assert set(figures.draw(facts_of(read, Content(read.manifest.version)))) == {"collapse"}
