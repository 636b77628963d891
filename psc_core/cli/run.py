"""The stages of ``psc-fit`` in order, with what they say on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from psc_core.collapse.report import NC4, CollapseReport, to_text
from psc_core.data.dataset import ImageDataset
from psc_core.fitting import stages
from psc_core.fitting.checkpoint import Checkpoint
from psc_core.fitting.checks import OWN_IMAGES, own_accuracy, own_error
from psc_core.fitting.options import FitOptions
from psc_core.fitting.parts import FittedProjection
from psc_core.fitting.regression import fit_regressor
from psc_core.fitting.settings import FitSettings
from psc_core.gates.fit.choice import GateChoice
from psc_core.model.load import Model

ACCURACY_GAP: Final = 0.1
"""How much less accurate the network may be on validation than on training images without a warning."""


def first_look(net: nn.Module, train: ImageDataset, val: ImageDataset, options: FitOptions) -> str:
    """The network's own quality before anything is fitted, which shows whether images reach it as in training."""
    if train.target is not None:
        return first_look_at_numbers(net, train, val, options)
    accuracies = [own_accuracy(net, data, options.compute(), options.seed) for data in (train, val)]
    of_train, of_val = accuracies
    if of_train is None or of_val is None:
        return "the network itself does not give one output for each class, so its accuracy is not known"
    text = (
        f"the network itself: accuracy {of_train:.3f} on training and {of_val:.3f} on validation images (at most "
        f"{OWN_IMAGES:,} of each); if it should be higher, check the preprocessing"
    )
    if of_val < of_train - ACCURACY_GAP:
        text += "\nwarning: validation images are much harder for it; are they prepared as the training images?"
    return text


def first_look_at_numbers(net: nn.Module, train: ImageDataset, val: ImageDataset, options: FitOptions) -> str:
    """:func:`first_look` of a regression."""
    assert train.target is not None and train.values is not None
    of_train, of_val = (own_error(net, data, options.compute(), options.seed) for data in (train, val))
    if of_train is None or of_val is None:
        return "the network itself does not give one number, so its error is not known"
    spread, unit = float(train.values.std(correction=0)), f" {train.target.unit}".rstrip()
    text = (
        f"the network itself: RMSE {of_train:.4g} on training and {of_val:.4g}{unit} on validation images (at most "
        f"{OWN_IMAGES:,} of each), the numbers' own deviation is {spread:.4g}; if it should be lower, check the "
        "preprocessing"
    )
    if of_val > spread:
        text += "\nwarning: always predicting the mean would be better; is the network's output in the table's unit?"
    return text


def run_stages(
    settings: FitSettings,
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    name: str,
    provenance: Mapping[str, Any],
    checkpoint: Checkpoint,
    options: FitOptions,
) -> tuple[CollapseReport, FittedProjection, Model]:
    """Fit stage by stage, those in the checkpoint left out; of several processes the first prints."""
    is_first = options.reducer.rank == 0
    report = checkpoint.load_collapse()
    if report is None:
        report = stages.measure_collapse(
            net, train, val, layers=settings.layers, granularity=settings.granularity, options=options
        )
        checkpoint.save_collapse(report)
    candidate = report.candidate(None if settings.layer == "auto" else settings.layer)
    if is_first:
        print(to_text(report, candidate))

    projection = checkpoint.load_projection()
    if projection is None:
        projection = stages.fit_projection(
            net,
            candidate,
            train,
            val,
            c_proj=settings.c_proj,
            d_proj=settings.d_proj,
            minimum_dim=settings.minimum_dim,
            second_scaling=not settings.no_second_scaling,
            density=settings.density,
            options=options,
        )
        checkpoint.save_projection(projection)
    if is_first:
        raw_nc4 = report.nc4_of(candidate) if report.measure == NC4 else None
        print(projection.report.summary(raw_nc4))

    last_stage = stages.fit_psc if train.target is None else fit_regressor
    psc: Model = last_stage(
        net,
        candidate,
        projection,
        train,
        val,
        density=settings.density,
        **settings.late(),
        name=name,
        provenance=provenance,
        options=options,
    )
    if is_first and settings.ood_score == "gates":
        print(GateChoice.from_json(psc.report["metrics"]["gates"]).table())
    return report, projection, psc
