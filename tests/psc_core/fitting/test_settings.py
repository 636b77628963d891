"""The settings of a fit, the flags of ``psc-fit`` and the arguments of the stages agree."""

from __future__ import annotations

import inspect
from dataclasses import asdict

import torch

from psc_core.cli.fit import parser
from psc_core.compute.distributed import Reducer
from psc_core.fitting.options import FitOptions
from psc_core.fitting.settings import LATE, FitSettings
from psc_core.fitting.stages import fit_psc

NEEDED = ["--model", "torchvision:resnet18", "--weights", "w", "--train", "a", "--val", "b", "--out", "c"]


def test_flags_have_the_defaults() -> None:
    flags = vars(parser().parse_args(NEEDED))
    assert flags.items() >= asdict(FitSettings()).items()


def test_late_settings_are_arguments_of_fit_psc_with_the_same_defaults() -> None:
    arguments = {name: each.default for name, each in inspect.signature(fit_psc).parameters.items()}
    late = FitSettings().late()
    assert set(late) == set(LATE) and arguments.items() >= late.items()


def test_options_have_the_defaults() -> None:
    device = torch.device("cpu")
    assert FitSettings().options(device, Reducer()) == FitOptions(device=device)
