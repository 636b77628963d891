"""Predict the angle of rotated digits: the network alone, a deep ensemble of five, MC dropout, PSC and DVE.

    python -m benchmarks.regression.run --scale cpu --data ROOT

The true angle is known.  Fashion-MNIST and digits upside down are out of distribution (0, 1 and 8 look the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import runs
from benchmarks.data import random_images
from benchmarks.fitting import settings_of
from benchmarks.regression.networks import AngleNet, trained
from benchmarks.runs import Json, Run
from benchmarks.train import load_images
from psc_core import PSCRegressor, fit_projection, fit_regressor, measure_collapse, metrics
from psc_core.data.dataset import ArraySource, ImageDataset, split_validation
from psc_core.data.open import open_dataset
from psc_core.evaluation.regression import RegressionEvaluator
from psc_core.images.preprocess import PRESETS
from psc_core.network.load import load_network

NAME = "regression"
MEMBERS: Final = 5
PASSES: Final = 30  # The number of passes of MC dropout.

DROPOUT: Final = 0.2
COVERAGE: Final = 0.95
EPOCHS: Final = {"smoke": 1, "cpu": 4, "full": 30}
TRAINING_IMAGES: Final = {"smoke": 400, "cpu": 20_000, "full": None}
MODELS: Final[Mapping[str, Mapping[str, str]]] = {  # How each is fitted: its head and predictions.
    "PSC": {},
    "PSC, the network's mean": {"predictions": "original"},
    "PSC, head dve": {"head": "dve"},
}
FACTORY: Final = "benchmarks.regression.networks:network"


@dataclass(frozen=True)
class Forecast:
    """The predictions for n images, float64."""

    mean: Tensor
    deviation: Tensor
    half_width: Tensor  # Half of the width of the interval with coverage COVERAGE.
    strangeness: Tensor  # Higher is more unusual.


Method = Callable[[ImageDataset], Forecast]


def main(argv: list[str] | None = None) -> Json:
    run = runs.start(NAME, runs.parser(__doc__).parse_args(argv))
    epochs = run.epochs or EPOCHS[run.scale]
    numbers = {"members": MEMBERS, "passes": PASSES, "dropout": DROPOUT, "coverage": COVERAGE, "models": MODELS}
    settings = {"seed": run.seed, "job": f"{TRAINING_IMAGES[run.scale]}-e{epochs}", **numbers}
    run.part(f"rotated-mnist-s{run.seed}", settings, partial(compare, run, epochs))
    return run.write(fragment)


def compare(run: Run, epochs: int) -> Json:
    opened = partial(open_dataset, run.spec("rotated-mnist"), preprocess=PRESETS["mnist"])
    train, val, test = (opened(split=split) for split in ("train", "val", "test"))
    fashion = open_dataset(run.spec("fashion-mnist"), split="test", preprocess=PRESETS["mnist"])
    test, fashion = (random_images(data, run.test_images, run.seed) for data in (test, fashion))
    train = random_images(train, run.fit_images or TRAINING_IMAGES[run.scale], run.seed)

    def file_of(name: str) -> Path:  # The run's seed draws the images, so that no seed takes another's networks.
        return run.checkpoints / f"angle-{name}-{len(train)}-e{epochs}-s{run.seed}.safetensors"

    def get(name: str, seed: int, outputs: int, dropout: float = 0.0) -> AngleNet:
        return trained(train, file_of(name), epochs=epochs, seed=seed, outputs=outputs, dropout=dropout)

    plain = get("plain", run.seed, 1)
    members = [get(f"member-{number}", MEMBERS * run.seed + number, 2) for number in range(MEMBERS)]
    dropout = get("dropout", run.seed, 1, DROPOUT)
    selection = split_validation(val, run.seed)[0]
    methods: dict[str, tuple[Method, int]] = {
        "the network alone": (network_alone(plain, selection), 1),
        f"deep ensemble of {MEMBERS}": (ensemble(members), MEMBERS),
        "MC dropout": (mc_dropout(dropout, selection), PASSES),
    }
    models = {name: fit(run, file_of("plain"), train, val, **how) for name, how in MODELS.items()}
    methods |= {name: (of_psc(model), 1) for name, model in models.items()}
    rows = {}
    for name, (method, passes) in methods.items():
        print(name, flush=True)
        inside, outside = method(test), {"fashion-mnist": method(fashion), "upside down": method(upside_down(test))}
        rows[name] = {"passes": passes, **measured(inside, test), "auroc": separation(inside, outside)}
        if name in models:
            rows[name]["coverage_calibrated_on_test"] = coverage_of_other_half(inside, test, run.seed)
            rows[name]["flagged"] = flagged(models[name], {"test": inside, **outside})
    psc = models["PSC"]
    return {
        "images": {"train": len(train), "val": len(val), "test": len(test)},
        "layer": psc.layer,
        "deviation": float(test.values.std()) if test.values is not None else 0.0,
        "rows": rows,
        "alpha": psc.policy.alpha,
    }


def fit(run: Run, weights: Path, train: ImageDataset, val: ImageDataset, **how: Any) -> PSCRegressor:
    """Run the three stages on a network as ``psc-fit`` loads it; ``how`` names head and predictions."""
    settings = settings_of(run)
    loaded = load_network(FACTORY, num_classes=1, model_args={"in_channels": 1}, weights=weights)
    chosen = measure_collapse(loaded, train, val, settings=settings).choose()
    projection = fit_projection(loaded, chosen, train, val, settings=settings)
    return fit_regressor(loaded, chosen, projection, train, val, coverage=COVERAGE, settings=settings, **how)


def upside_down(data: ImageDataset) -> ImageDataset:
    pixels = torch.rot90(load_images(data), 2, (2, 3))[:, 0].numpy().copy()
    return replace(data, source=ArraySource(pixels), indices=torch.arange(len(data)))


@torch.inference_mode()
def outputs_of(net: nn.Module, data: ImageDataset) -> Tensor:
    return torch.cat([net(data.preprocess.standardise(batch.images)) for batch in data.batches(500)]).double()


def normal(mean: Tensor, deviation: Tensor, strangeness: Tensor) -> Forecast:
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(COVERAGE, dtype=torch.float64)))
    return Forecast(mean, deviation, z * deviation, strangeness)


def network_alone(net: nn.Module, selection: ImageDataset) -> Method:
    """Forecast the network's mean, with one deviation for all images from validation images."""
    assert selection.values is not None
    rmse = metrics.rmse(outputs_of(net, selection)[:, 0], selection.values)

    def forecast(data: ImageDataset) -> Forecast:
        mean = outputs_of(net, data)[:, 0]
        return normal(mean, torch.full_like(mean, rmse), torch.zeros_like(mean))

    return forecast


def ensemble(members: list[AngleNet]) -> Method:
    """Forecast the mixture's mean and variance (Lakshminarayanan et al. 2017); unusual where members disagree."""

    def forecast(data: ImageDataset) -> Forecast:
        outputs = torch.stack([outputs_of(net, data) for net in members])
        means, variances = outputs[..., 0], outputs[..., 1].exp()
        disagreement = means.var(0, correction=0)
        return normal(means.mean(0), (variances.mean(0) + disagreement).sqrt(), disagreement.sqrt())

    return forecast


def mc_dropout(net: AngleNet, selection: ImageDataset) -> Method:
    """Forecast by passes with dropout (Gal & Ghahramani 2016), with one noise level from validation images."""

    def passes(data: ImageDataset) -> Tensor:
        torch.manual_seed(0)
        net.dropout.train()
        try:
            return torch.stack([outputs_of(net, data)[:, 0] for _ in range(PASSES)])
        finally:
            net.eval()

    assert selection.values is not None
    known = passes(selection)
    left = (selection.values - known.mean(0)).square() - known.var(0)
    noise = left.mean().clamp(min=0)

    def forecast(data: ImageDataset) -> Forecast:
        drawn = passes(data)
        return normal(drawn.mean(0), (noise + drawn.var(0)).sqrt(), drawn.std(0))

    return forecast


def of_psc(model: PSCRegressor) -> Method:

    def forecast(data: ImageDataset) -> Forecast:
        scored = RegressionEvaluator().score_images(model, data)
        half = scored.interval.diff(dim=1)[:, 0].double() / 2
        return Forecast(scored.mean.double(), scored.deviation.double(), half, scored.ood_score.double())

    return forecast


def measured(forecast: Forecast, data: ImageDataset) -> Mapping[str, float]:
    y = data.values
    assert y is not None
    mean, deviation = forecast.mean, forecast.deviation
    inside = (y - mean).abs() <= forecast.half_width
    return {
        "rmse": metrics.rmse(mean, y),
        "nll": metrics.gaussian_nll(mean, deviation, y),
        "crps": metrics.crps(mean, deviation, y),
        "coverage": float(inside.double().mean()),
        "width": float(2 * forecast.half_width.mean()),
    }


def coverage_of_other_half(forecast: Forecast, data: ImageDataset, seed: int) -> float:
    """Return the coverage on one half of ``data`` of the conformal interval from the other half."""
    assert data.values is not None
    ratios = (data.values - forecast.mean).abs() / forecast.deviation
    first, second = ratios[torch.randperm(len(ratios), generator=torch.Generator().manual_seed(seed))].chunk(2)
    rank = math.ceil((len(first) + 1) * COVERAGE)
    return float((second <= first.sort().values[rank - 1]).double().mean())


def flagged(model: PSCRegressor, forecasts: Mapping[str, Forecast]) -> dict[str, float]:
    """Return the fraction of the images whose score is above the model's threshold."""
    threshold = model.calibration.ood_score_threshold(model.policy.alpha)
    return {name: float((forecast.strangeness > threshold).double().mean()) for name, forecast in forecasts.items()}


def separation(inside: Forecast, outside: Mapping[str, Forecast]) -> dict[str, float]:
    return {name: metrics.auroc(inside.strangeness, other.strangeness) for name, other in outside.items()}


def fragment(record: Json) -> str:
    """Return the table of all seeds so far, and that of the alarms."""
    parts = list(runs.results(record).values())
    rows = {name: [part["rows"][name] for part in parts] for name in sorted(parts[0]["rows"])}

    def mean(found: list[Json], pattern: str, *keys: str) -> str:
        values: list[Any] = [reduce(getitem, keys, row) for row in found]
        return pattern.format(sum(values) / len(values))

    columns = {"rmse": "{:.2f}", "nll": "{:.3f}", "crps": "{:.2f}", "coverage": "{:.4f}", "width": "{:.1f}"}
    aurocs = list(rows["PSC"][0]["auroc"])
    methods = [
        [
            name,
            str(found[0]["passes"]),
            *(mean(found, pattern, key) for key, pattern in columns.items()),
            *(mean(found, "{:.4f}", "auroc", kind) for kind in aurocs),
        ]
        for name, found in rows.items()
    ]
    header = ["method", "passes", "RMSE", "NLL", "CRPS", "coverage", "width", *(f"AUROC, {kind}" for kind in aurocs)]
    kinds = list(rows["PSC"][0]["flagged"])
    alarms = [
        [
            name,
            *(mean(found, "{:.2%}", "flagged", kind) for kind in kinds),
            mean(found, "{:.2%}", "coverage_calibrated_on_test"),
        ]
        for name, found in rows.items()
        if "flagged" in found[0]
    ]
    return "\n\n".join(
        [
            runs.markdown_table(header, methods),
            runs.markdown_table(["model", *(f"alarm, {kind}" for kind in kinds), "coverage, other half"], alarms),
            runs.provenance(record),
        ]
    )


if __name__ == "__main__":
    main()
