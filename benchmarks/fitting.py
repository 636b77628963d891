"""Fit PSC and the baselines on a trained network; all scripts share the results of the slow stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.checkpoints import Trained, scale_of
from benchmarks.data import random_images
from benchmarks.runs import Run, data_digest
from psc_core import FitSettings, fit
from psc_core.collapse import ChosenLayer, CollapseReport
from psc_core.compute import Compute, passes
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.evaluation.baselines import Baselines, fit_baselines, penultimate_and_logits
from psc_core.fit_data import Checkpoint
from psc_core.model import PSC
from psc_core.network.cut import trial_input, truncate
from psc_core.network.layers import list_layers
from psc_core.projection import FittedProjection


@dataclass(frozen=True)
class Stages:
    report: CollapseReport  # The collapse of every layer.
    chosen: ChosenLayer  # The selected layer(s).
    projection: FittedProjection  # The projection with NC1 and NC4 of every size.


Pair = tuple[ImageDataset, ImageDataset]  # The training images to fit on, and the validation images.


def pair_of(run: Run, trained: Trained, data: str) -> Pair:
    """Open a data set for the network: its own, or another one."""
    if data == trained.job.data:
        return trained.fit_on, trained.val
    train, val = (
        open_dataset(run.spec(data), split=split, preprocess=trained.preprocess) for split in ("train", "val")
    )
    return random_images(train, scale_of(run).fit_images, run.seed), val


def compute_of(run: Run) -> Compute:
    return Compute(run.device, batch_images=1024 if run.device.type == "cuda" else 256)


def settings_of(run: Run) -> FitSettings:
    """Return the settings of the fitting stages: device, batch size and seed of the run."""
    return FitSettings(device=run.device, batch_images=compute_of(run).batch_images, seed=run.seed)


def measure(run: Run, trained: Trained, data: Pair | None = None) -> CollapseReport:
    """Measure the collapse of every layer, once for a checkpoint; by default on the network's own images."""
    train, val = data or (trained.fit_on, trained.val)
    store = _store(run, trained, train)
    report = store.load_collapse()
    if report is None:
        report = fit.measure_collapse(trained.net, train, val, settings=settings_of(run))
        store.save_collapse(report)
    return report


def stages(
    run: Run,
    trained: Trained,
    *,
    density: Any = "gda",
    data: Pair | None = None,
    collapse_on: Pair | None = None,
) -> Stages:
    """Measure collapse, select the chosen layer and fit the projection, once for a checkpoint."""
    train, val = data or (trained.fit_on, trained.val)
    report = measure(run, trained, collapse_on or data)
    chosen = report.choose()
    store = _store(run, trained, train, density=density, collapse_on=collapse_on[0].name if collapse_on else "")
    projection = store.load_projection()
    if projection is None:
        projection = fit.fit_projection(trained.net, chosen, train, val, density=density, settings=settings_of(run))
        store.save_projection(projection)
    return Stages(report, chosen, projection)


def _store(run: Run, trained: Trained, train: ImageDataset, **settings: str) -> Checkpoint:
    job = {
        "checkpoint": trained.job.name,
        "classes": train.classes,
        "data": train.name,
        "data_digest": data_digest(run.data),
        "images": len(train),
        "seed": run.seed,
        "device": run.device.type,
        **settings,
    }
    words = [trained.job.name, train.name, *settings.values(), str(len(train)), f"s{run.seed}.stages"]
    kept = Checkpoint(run.checkpoints / "-".join(filter(None, words)), job)
    if not kept.is_resumed:
        kept.clear()
    return kept


def psc_of(run: Run, trained: Trained, parts: Stages, **changes: Any) -> PSC:
    """Fit a PSC with the Laplace head; by default with the paper's density, which alone is the OOD score."""
    return fit.fit_psc(
        trained.net,
        parts.chosen,
        parts.projection,
        trained.fit_on,
        trained.val,
        settings=settings_of(run),
        **{"density": "gda", "ood_score": "density", **changes},
    )


def baselines_of(run: Run, trained: Trained) -> Baselines:
    return fit_baselines(
        trained.net,
        penultimate_layer(trained),
        trained.fit_on,
        trained.val,
        compute=compute_of(run),
        seed=run.seed,
    )


def penultimate_layer(trained: Trained) -> str:
    device = next(trained.net.parameters()).device
    trial = trial_input(trained.preprocess).to(device)
    return next(layer.name for layer in list_layers(trained.net, trial) if layer.role == "penultimate")


def linear_output(net: nn.Module) -> nn.Linear:
    return [module for module in net.modules() if isinstance(module, nn.Linear)][-1]


@dataclass(frozen=True)
class Penultimate:
    """The penultimate features of a data set, on the CPU."""

    features: Float[Tensor, "n dim"]  # ``float32 (n, D)``, one row per image or per labelled example
    logits: Float[Tensor, "n classes"]  # ``float64 (n, K)``
    labels: Int[Tensor, " n"]  # ``int64 (n,)``


def penultimate_features(run: Run, trained: Trained, data: ImageDataset, *, per_example: bool) -> Penultimate:
    """Run the whole network over a data set; return one entry per labelled example, or per image."""
    trial = trial_input(data.preprocess).to(run.device)
    backbone = truncate(trained.net, [penultimate_layer(trained)], keep_output=True, trial=trial)
    features, logits, labels = [], [], []
    for (h, f), batch in passes(
        data, compute_of(run), f"features of {data.name}", lambda x: penultimate_and_logits(backbone, x)
    ):
        features.append((batch.per_example(h) if per_example else h).cpu())
        logits.append((batch.per_example(f) if per_example else f).cpu())
        labels.append(batch.labels if per_example else torch.empty(0, dtype=torch.int64))
    return Penultimate(
        torch.cat(features), torch.cat(logits), torch.cat(labels) if per_example else data.first_labels()
    )
