"""The settings of a fit agree with the flags of ``psc-fit``, and later stages with the chosen layer's."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from psc_core import FitSettings
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


@pytest.mark.parametrize("settings", [{"precision": "fp8"}, {"device": "tpu"}, {"batch_images": 0}])
def test_unknown_values_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"expected (a )?{next(iter(settings))}"):
        FitSettings(**{"device": "cpu", **settings}).compute()


@pytest.mark.parametrize(
    ("name", "wrong", "wanted"),
    [
        ("max_images", -1, "a positive integer or None"),
        ("max_images", 0, "a positive integer or None"),
        ("c_proj", 0, "a positive integer or None"),
        ("d_proj", -2, "a positive integer or None"),
        ("pca", -3, "a positive integer or None"),
        ("stored_images", 0, "a positive integer or None"),
        ("minimum_dim", -3, "a positive integer"),
        ("max_memory", -5, "a positive integer"),
        ("batch_images", 0, "a positive integer"),
        ("seed", 2**70, "a whole number from 0 to 2**63 - 1"),
        ("seed", -1, "a whole number from 0 to 2**63 - 1"),
        ("epsilon", 1.0, "a number between 0 and 1"),
        ("alpha", 0.0, "a number between 0 and 1"),
        ("coverage", 95.0, "a number between 0 and 1"),
        ("risk", float("nan"), "a number between 0 and 1 or None"),
        ("max_width", -1.0, "a number above 0 or None"),
        ("max_width", float("inf"), "a number above 0 or None"),
    ],
)
def test_values_out_of_range_are_refused_at_both_doors(
    name: str, wrong: float, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for door in (lambda: FitSettings(**{name: wrong}), lambda: FitSettings().changed({name: wrong})):
        with pytest.raises(UsageError) as caught:
            door()
        assert str(caught.value) == f"expected {name} to be {wanted}, got {wrong}"
    with pytest.raises(SystemExit):
        parser().parse_args([*NEEDED, f"--{name.replace('_', '-')}={wrong}"])
    expected = "a size such as" if name == "max_memory" else f"expected {wanted.removesuffix(' or None')}"
    assert expected in capsys.readouterr().err


def test_a_setting_of_another_type_is_refused_before_it_is_compared() -> None:
    with pytest.raises(UsageError, match="expected epsilon of type float, got 'a' of type str"):
        FitSettings().changed({"epsilon": "a"})


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
