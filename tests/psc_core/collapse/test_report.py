from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from psc_core.collapse import CollapseReport, LayerCollapse, LinearFit, to_csv, to_text
from psc_core.errors import UsageError
from tests.reference import collapse as reference


def report(*numbers: tuple[str, int, float, float], pattern: str | None = None, output: bool = True) -> CollapseReport:
    """Layers of (name, channels, NC1, NC4); the last two are penultimate and output."""
    roles = ["hidden"] * (len(numbers) - 2) + ["penultimate", "output"]
    if not output:
        roles = ["hidden"] * (len(numbers) - 1) + ["penultimate"]
    layers = tuple(
        LayerCollapse(name, index, "map", (channels, 4), (2, 2), role, nc1, nc4)
        for index, ((name, channels, nc1, nc4), role) in enumerate(zip(numbers, roles, strict=True))
    )
    return CollapseReport(layers, 0.2, "operations", pattern, 100, 50)


def test_caller_can_name_layer() -> None:
    table = report(("a", 4, 0.9, 0.5), ("bb", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9))
    chosen = table.candidate("p")
    assert chosen.layers == ("p",) and "named by the caller" in chosen.reason
    assert table.nc4_of(chosen) == 0.99
    with pytest.raises(UsageError, match="measured layers, got 'b'; did you mean bb"):
        table.candidate("b")


def test_json_round_trip() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    assert CollapseReport.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert {"nc4", "nc4_error"} <= {*measured.to_json()["layers"][0]}, "the names of docs/bundle-format.md"


def test_takes_highest_nc4_above_cutoff() -> None:
    chosen = report(
        ("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("c", 8, 0.4, 0.7), ("p", 8, 0.1, 0.99), ("o", 2, 0.9, 1.0)
    ).candidate()
    assert chosen.layers == ("b",)
    assert "b (NC1 0.6000, NC4 0.8000), has the highest NC4 of the 3 layers with NC1 > 0.2" in chosen.reason


def test_takes_deepest_of_equals() -> None:
    assert report(
        ("a", 4, 0.9, 0.8), ("b", 4, 0.6, 0.8), ("c", 4, 0.5, 0.7), ("p", 8, 0.1, 0.9), ("o", 2, 0.1, 0.9)
    ).candidate().layers == ("b",)


def test_nc1_at_cutoff_does_not_pass() -> None:
    assert report(("a", 4, 0.5, 0.3), ("p", 8, 0.2, 0.9), ("o", 2, 0.1, 0.9)).candidate().layers == ("a",)


@pytest.mark.parametrize(
    ("chosen_nc1", "next_nc1", "next_channels", "layers"),
    [
        (0.25, 0.01, 4, ("b", "c")),  # the chosen one is near
        (0.60, 0.15, 4, ("b", "c")),  # the next one is near
        (0.60, 0.14, 4, ("b",)),
        (0.26, 0.14, 4, ("b",)),
        (0.21, 0.19, 8, ("b",)),  # other channel counts cannot be concatenated
        (0.21, 0.22, 4, ("b",)),  # the next one has not collapsed
    ],
)
def test_two_layers_near_the_cutoff(
    chosen_nc1: float, next_nc1: float, next_channels: int, layers: tuple[str, ...]
) -> None:
    chosen = report(
        ("a", 4, 0.9, 0.5),
        ("b", 4, chosen_nc1, 0.9),
        ("c", next_channels, next_nc1, 0.85),
        ("p", 8, 0.1, 0.9),
        ("o", 2, 0.1, 0.9),
    ).candidate()
    assert chosen.layers == layers
    assert ("joins it" in chosen.reason) == (len(layers) == 2)


def with_errors(measured: CollapseReport, *errors: float) -> CollapseReport:
    pairs = zip(measured.layers, errors, strict=True)
    return replace(measured, layers=tuple(replace(layer, quality_error=error) for layer, error in pairs))


def test_takes_deepest_within_one_error() -> None:
    measured = report(
        ("a", 4, 0.9, 0.90), ("b", 4, 0.6, 0.89), ("c", 4, 0.5, 0.88), ("d", 4, 0.4, 0.85), ("p", 8, 0.1, 0.99)
    )
    chosen = with_errors(measured, 0.0, 0.02, 0.021, 0.03, 0.0).candidate()
    assert chosen.layers == ("c",)
    assert "within one standard error (0.0210) of the highest, 0.9000 after a" in chosen.reason
    assert with_errors(measured, 0.0, 0.02, 0.019, 0.049, 0.0).candidate().layers == ("b",)
    assert measured.candidate().layers == ("a",)


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=8))
def test_rule_equals_twin(numbers: list[tuple[float, float, float]]) -> None:
    layers = [(f"layer{i}", i + 1, nc1, nc4) for i, (nc1, nc4, _) in enumerate(numbers)]
    measured = with_errors(report(*layers, output=False), *(error for _, _, error in numbers))
    nc1s, nc4s, errors = zip(*numbers, strict=True)
    assume(max(nc1s) > measured.epsilon)
    assert measured.best is not None
    best = measured.best.index  # whose own error is 0, as it is measured
    errors = tuple(0.0 if i == best else error for i, error in enumerate(errors))
    chosen = with_errors(measured, *errors).candidate()
    assert chosen.layers == (f"layer{reference.candidate(nc1s, nc4s, errors, measured.epsilon)}",)


def test_takes_the_trunk_where_nothing_has_collapsed() -> None:
    layers = (("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("t", 4, 0.4, 0.6), ("p", 8, 0.3, 0.7), ("o", 2, 0.1, 0.9))
    plain = report(*layers)
    assert plain.candidate().layers == ("b",)
    trunk = replace(plain, layers=tuple(replace(e, role="trunk") if e.name == "t" else e for e in plain.layers))
    assert trunk.candidate().layers == ("t",)
    assert "nothing has collapsed, NC1 > 0.2 after every layer" in trunk.candidate().reason
    assert trunk.candidate("a").layers == ("a",) and replace(trunk, pattern="[ab]").candidate().layers == ("b",)
    assert replace(trunk, measure=LinearFit).candidate().layers == ("b",)  # Shown for classes alone.
    assert replace(trunk, epsilon=0.35).candidate().layers == ("b",)  # "p" has collapsed.


def test_notes_say_that_candidate_is_early() -> None:
    deeper = [(f"l{i}", 4, 0.1, 0.9) for i in range(6)]
    measured = report(("a", 4, 0.9, 0.5), ("b", 8, 0.6, 0.4), *deeper)
    (note,) = measured.candidate().notes
    assert "among the first 1 of 7 layers" in note and "--layer l4" in note
    assert measured.candidate("a").notes == (note,)
    assert measured.candidate("b").notes == () == measured.candidate("l4").notes


def test_never_takes_output() -> None:
    assert report(("a", 4, 0.5, 0.3), ("p", 2, 0.21, 0.9), ("o", 2, 0.2, 1.0)).candidate().layers == ("p",)


def test_takes_least_collapsed_when_none_passes() -> None:
    chosen = report(("a", 4, 0.19, 0.3), ("p", 8, 0.1, 0.9), ("o", 2, 0.9, 0.9)).candidate()
    assert chosen.layers == ("a",)
    assert "no layer has NC1 > 0.2" in chosen.reason


def test_nc4_breaks_ties_of_collapsed_layers() -> None:
    chosen = report(("a", 4, 0.1, 0.9), ("b", 4, 0.1, 0.5), ("p", 8, 0.05, 0.9), ("o", 2, 0.1, 0.9)).candidate()
    assert chosen.layers == ("a",)


def test_pattern_limits_choice() -> None:
    limited = report(("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("p", 8, 0.7, 0.99), ("o", 2, 0.1, 0.9), pattern="^a$")
    assert limited.candidate().layers == ("a",)
    assert limited.penultimate == "p"
    with pytest.raises(UsageError, match="no layer before the output"):
        replace(limited, pattern="^o$").candidate()


def test_table_marks_candidate_and_explains() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("layer1.conv", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9))
    lines = to_text(measured, measured.candidate()).splitlines()
    assert lines[0].split() == ["#", "layer", "form", "channels×spatial", "NC1", "NC4"]
    assert lines[2].split() == ["1", "layer1.conv", "map", "4×4", "0.6000", "0.8000", "◀", "candidate"]
    assert lines[3].endswith("penultimate") and lines[4].endswith("output")
    assert lines[5].startswith("candidate: layer1.conv") and lines[6].startswith("penultimate: p")
    assert len(lines) == 7
    assert lines[1].index("0.9000") == lines[2].index("0.6000")
    named = to_text(measured, measured.candidate("p")).splitlines()
    assert named[3].endswith("◀ candidate  penultimate") and not any(line.startswith("penultimate:") for line in named)


def test_csv() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    lines = list(csv.DictReader(to_csv(measured).splitlines()))
    assert lines[1] == {
        "index": "1",
        "layer": "p",
        "kind": "map",
        "channels": "8",
        "spatial": "4",
        "role": "penultimate",
        "nc1": "0.1",
        "nc4": "0.99",
    }
