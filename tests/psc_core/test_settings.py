from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from psc_core import FitSettings, settings
from psc_core.cli.fit import parser
from psc_core.collapse import ChosenLayer, CollapseReport
from psc_core.density import DENSITIES
from psc_core.errors import UsageError
from psc_core.fit import settings_for
from psc_core.settings import DEFAULTS, HEAD_KINDS, OWNERS, FitOptions, choices_of
from psc_core.tasks import TASKS

NEEDED = ["--model", "torchvision:resnet18", "--weights", "w", "--train", "a", "--val", "b", "--out", "c"]
REPORT = CollapseReport((), epsilon=0.1, granularity="blocks", pattern=None, train_examples=1, val_examples=1, seed=3)


def test_flags_have_the_defaults() -> None:
    given = {**vars(parser().parse_args(NEEDED)), "task": DEFAULTS.task}  # None lets the columns of a table decide.
    for name, value in FitSettings().recorded().items():
        assert given[name] == value, name


def test_a_bundle_records_what_no_machine_decides() -> None:
    recorded = FitSettings(device="cpu", seed=5).recorded()
    assert recorded["seed"] == 5 and "device" not in recorded


def test_the_last_stage_alone_reads_what_a_checkpoint_does_not_know() -> None:
    settings = FitSettings()
    last = {"pca", "head", "predictions", "alpha", "coverage", "risk", "max_width", "ood_score", "stored_images"}
    assert set(settings.recorded()) - set(settings.of_stages()) == last


def test_numbers_of_numpy_are_numbers() -> None:
    changed = FitSettings().changed({"seed": np.int64(7), "alpha": np.float32(0.5), "max_width": np.int32(3)})
    assert [changed.seed, changed.alpha, changed.max_width] == [7, 0.5, 3.0]
    assert [type(changed.seed), type(changed.alpha), type(changed.max_width)] == [int, float, float]


def test_settings_are_changed_by_name() -> None:
    changed = FitSettings(seed=7).changed({"layers": "^4$", "no_second_scaling": True, "max_width": 3, "device": "cpu"})
    assert changed == FitSettings(seed=7, layers="^4$", no_second_scaling=True, max_width=3.0, device="cpu")
    assert isinstance(changed.max_width, float)
    defaults = {name: value for name, value in FitSettings().recorded().items() if name != "task"}
    assert FitSettings(seed=7).changed(defaults) == FitSettings(), "each annotation is read"


def test_a_task_has_a_default_head() -> None:
    assert FitSettings().of_task("regression", ["blr", "dve"]).head == "blr"
    assert FitSettings(head="dve").of_task("regression", ["blr", "dve"]) == FitSettings(task="regression", head="dve")


def test_later_stages_take_the_seed_and_the_epsilon_of_the_candidate() -> None:
    chosen, by_hand = ChosenLayer(("4",), "", (), REPORT), ChosenLayer(("4",), "by hand")
    assert settings_for(chosen, None, {"alpha": 0.1}) == FitSettings(seed=3, epsilon=0.1, alpha=0.1)
    assert settings_for(by_hand, FitSettings(seed=7), {"head": "duq"}) == FitSettings(seed=7, head="duq")
    with pytest.raises(UsageError, match=r"expected seed=3, with which 4 was chosen, got 0"):
        settings_for(chosen, FitSettings(epsilon=0.1), {})
    with pytest.raises(UsageError, match=r"expected epsilon=0\.1, .* got 0\.2"):
        settings_for(chosen, None, {"epsilon": 0.2})
    with pytest.raises(UsageError, match="expected a setting of a fit, got 'hat'"):
        settings_for(chosen, None, {"hat": 1})


def test_every_setting_is_a_keyword_of_python_functions() -> None:
    declared = get_type_hints(FitSettings)
    options = get_type_hints(FitOptions, localns={"torch": torch})
    assert [*options] == [name for name in FitSettings.model_fields if name != "task"]
    assert {name: options[name] for name in options if name != "device"} == {
        name: declared[name] for name in options if name != "device"
    }


def test_the_command_line_knows_every_kind() -> None:
    assert {name: tuple(task.heads) for name, task in TASKS.items()} == HEAD_KINDS
    assert {*choices_of("density")} == {*DENSITIES}


def test_a_setting_that_some_tasks_alone_read_says_so() -> None:
    assert {*OWNERS} == {name for task in TASKS.values() for name in task.own_settings}


VALUES: dict[Callable[[str], Any], dict[str, Any]] = {
    settings.by_commas: {"a, b,,c": ["a", "b", "c"], "": []},
    settings.day: {"2026-02-28": "2026-02-28"},
    settings.positive: {"1": 1, "007": 7},
    settings.whole: {"0": 0, "3": 3},
    settings.POSITIVE.parse_or_auto: {"auto": None, "3": 3},
    settings.SEED.parse: {"0": 0, str(2**63 - 1): 2**63 - 1},
    settings.DAYS.parse: {"1": 1, "36500": 36500},
    settings.byte_count: {"5": 5, "512M": 512 << 20, "2gib": 2 << 30, "1kb": 1 << 10},
    settings.positive_number: {"1e3": 1000.0, "0.5": 0.5},
    settings.open_unit_interval: {"0.05": 0.05},
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, values in VALUES.items() for text in values])
def test_values(kind: Callable[[str], Any], text: str) -> None:
    assert kind(text) == VALUES[kind][text]


def test_key_values_are_json_where_they_parse() -> None:
    assert settings.key_values(["a=1", "b=x", "c=[true]", "d="]) == {"a": 1, "b": "x", "c": [True], "d": ""}
    for pair in ("novalue", "=1"):
        with pytest.raises(UsageError, match="expected key=value"):
            settings.key_values([pair])


REFUSED = {
    settings.day: ["2026-02-30", "20260228", "today"],
    settings.positive: ["0", "-1", "1.5", "many", ""],
    settings.whole: ["-1", "1.5", "x", "00", " 5", "1_0"],
    settings.POSITIVE.parse_or_auto: ["0", "none"],
    settings.SEED.parse: ["-1", str(2**63), "x"],
    settings.DAYS.parse: ["0", "36501", "1000000"],
    settings.byte_count: ["0", "1.5G", "lots", "1T"],
    settings.positive_number: ["0", "-1", "nan", "inf", "x"],
    settings.open_unit_interval: ["0", "1", "-0.1", "nan", "x"],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in REFUSED.items() for text in texts])
def test_other_text_is_refused(kind: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^expected .*, got "):
        kind(text)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("max_images", 0), ("minimum_dim", -3), ("max_memory", -5), ("seed", 2**70), ("epsilon", 1.0),
        ("alpha", 0.0), ("coverage", 95.0), ("risk", float("nan")), ("max_width", float("inf")), ("epsilon", "a"),
        ("precision", "fp8"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_at_both_doors(name: str, wrong: Any) -> None:
    for door in (lambda: FitSettings(**{name: wrong}), lambda: FitSettings().changed({name: wrong})):
        with pytest.raises(UsageError, match=f"expected {name} "):
            door()
    with pytest.raises(SystemExit):
        parser().parse_args([*NEEDED, f"--{name.replace('_', '-')}={wrong}"])
