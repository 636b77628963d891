"""Least regret over kinds of made-up images."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from psc_core.gates import GateChoice, best_of, regret

CHOICE = GateChoice(
    {
        "near": {"mixed": 0.9, "binary": 0.5},
        "far": {"mixed": 0.5, "binary": 1.0},
        "both": {"mixed": 0.8, "binary": 0.95},
        "best": {"mixed": 0.9, "binary": 1.0},
    },
    ("near", "far", "both"),
    "no image has several labels",
)


def test_least_regret_wins() -> None:
    assert best_of(CHOICE.aurocs) == {"mixed": 0.9, "binary": 1.0}
    assert CHOICE.chosen == "both"
    assert [round(regret(CHOICE.aurocs, name), 6) for name in CHOICE.aurocs] == [0.5, 0.4, 0.1, 0.0]


def test_table_says_what_and_why() -> None:
    lines = CHOICE.table().splitlines()
    assert [line.split()[0] for line in lines] == ["gates", "best", "both", "far", "near", "gates:"]
    assert [line for line in lines if "◀ chosen" in line] == [lines[2]]
    assert lines[-1] == (
        "gates: both has the least regret over made-up images of those that may be chosen; no image has several labels"
    )
    lines = replace(CHOICE, selectable=tuple(CHOICE.aurocs)).table().splitlines()
    assert lines[-1] == "gates: best has the least regret over made-up images; no image has several labels"


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6).map(
        lambda rows: {f"option {i}": dict(zip(("near", "far"), row, strict=True)) for i, row in enumerate(rows)}
    )
)
def test_choice_and_its_json_against_a_loop(aurocs: dict[str, dict[str, float]]) -> None:
    choice = GateChoice(aurocs, tuple(aurocs), "")
    best = {kind: max(auroc[kind] for auroc in aurocs.values()) for kind in ("near", "far")}
    worst = {name: max(best[kind] - own[kind] for kind in own) for name, own in aurocs.items()}
    assert worst[choice.chosen] == min(worst.values())
    told = json.loads(json.dumps(choice.to_json()))
    options = {each["gates"]: dict(zip(told["kinds"], each["auroc"], strict=True)) for each in told["options"]}
    assert (told["chosen"], told["regret"], options) == (choice.chosen, worst[choice.chosen], aurocs)
