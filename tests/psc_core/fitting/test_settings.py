"""The settings of a fit, the flags of ``psc-fit`` and the arguments of the stages agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from psc_core.cli.fit import parser
from psc_core.compute.distributed import Reducer
from psc_core.fitting.options import FitOptions
from psc_core.fitting.regression import fit_regressor
from psc_core.fitting.settings import LATE, FitSettings
from psc_core.fitting.stages import fit_psc

NEEDED = ["--model", "torchvision:resnet18", "--weights", "w", "--train", "a", "--val", "b", "--out", "c"]


def test_flags_have_the_defaults() -> None:
    flags = vars(parser().parse_args(NEEDED))
    assert flags["head"] is None  # the first of the task's heads
    assert {**flags, "head": FitSettings.head}.items() >= asdict(FitSettings()).items()


@pytest.mark.parametrize(
    ("task", "fit", "of_the_other_task"),
    [("classification", fit_psc, "max_width"), ("regression", fit_regressor, "risk")],
)
def test_late_settings_are_arguments_of_the_last_stage_with_the_same_defaults(
    task: str, fit: Callable[..., object], of_the_other_task: str
) -> None:
    arguments = {name: each.default for name, each in inspect.signature(fit).parameters.items()}
    late = FitSettings(task=task, head=arguments["head"]).late()
    assert set(late) == set(LATE) - {of_the_other_task} and arguments.items() >= late.items()


def test_options_have_the_defaults() -> None:
    device = torch.device("cpu")
    assert FitSettings().options(device, Reducer()) == FitOptions(device=device)
