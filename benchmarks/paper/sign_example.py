"""Figure "sign example": which layers forget what is irrelevant to the label, at two SN bounds.

    python -m benchmarks.paper.sign_example --scale cpu --data ROOT

The toy example of van Amersfoort et al. (2020) as in the paper: x ~ N(0, 0.3² I₂), y = sign(x₁), flipped with
probability 0.001; 3,000 training and 1,000 validation points.  Leaky-ReLU layers of widths 4, 2, 2, 2, 2 with
residual connections where widths are 2; Adam, 350 epochs, learning rate 3e-2 → 3e-4 by cosine, weight decay
1e-5.  The paper does not give batch size (here all points), leakiness (0.01) or the bounds (0.5 and 3).

The *irrelevant* perturbation flips the sign of x₂, the *relevant* one that of x₁.  The distance d between a point h and
its perturbation h′ after a layer is measured in two ways, with Σ the covariance of that layer's values:

    whitened  d² = (h − h′)ᵀ Σ⁻¹ (h − h′)        what a Gaussian density reads
    RMS       d² = ‖h − h′‖² / tr Σ              what the eye sees in the figure

A layer that forgets x₂ has no direction left for it, or one of so little variance that only whitening shows it.  The
paper draws one network of each; the table has the median over twenty, because single ones differ, and the figure the
one in the middle of them, whitened.  It needs neither data set nor GPU: ``cpu`` and ``full`` are the paper's setting.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import plots, runs
from benchmarks.networks import bound_spectral_norm, fold_spectral_norm
from benchmarks.runs import Json, Run

NAME = "sign_example"

WIDTHS = (2, 4, 2, 2, 2, 2)
SIGMA, FLIP = 0.3, 0.001
BOUNDS = {"small bound": 0.5, "large bound": 3.0}
POINT = (0.3, -0.3)
"""The training point nearest to this one is perturbed: one standard deviation from the middle on both axes."""

PERTURBATIONS = ("irrelevant", "relevant")
KINDS = ("whitened", "RMS")
"""Of distances."""

EPOCHS = {"smoke": 20, "cpu": 350, "full": 350}
SEEDS = {"smoke": 2, "cpu": 20, "full": 20}
"""Networks of each bound."""


class SignNet(nn.Module):
    """Layers of :data:`WIDTHS`, then a linear layer to two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(WIDTHS))
        self.output = nn.Linear(WIDTHS[-1], 2)

    def hidden(self, x: Tensor) -> list[Tensor]:
        """Output of every layer."""
        outputs = []
        for layer in self.layers:
            new = F.leaky_relu(layer(x))
            x = new + x if new.shape == x.shape else new
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.hidden(x)[-1])
        return logits


def main(argv: list[str] | None = None) -> Json:
    """Run and write the figure and the distances."""
    cli = runs.parser(__doc__)
    run = runs.start(NAME, cli.parse_args(argv))
    nets: dict[str, Json] = {}
    drawn: dict[str, list[dict[str, Tensor]]] = {}
    torch.manual_seed(run.seed)
    train, labels = sample(3000)
    val, val_labels = sample(1000)
    for title, bound in BOUNDS.items():
        found, embedded = [], []
        for seed in range(run.seed, run.seed + SEEDS[run.scale]):
            net = fit(train, labels, bound, run.epochs or EPOCHS[run.scale], seed)
            layers = [embed(layer, train, perturbed) for layer, perturbed in layers_of(net, train)]
            embedded.append(layers)
            found.append({"val_accuracy": _accuracy(net, val, val_labels), "layers": [distances(e) for e in layers]})
        nets[title] = {"bound": bound, "seeds": found}
        drawn[title] = sorted(embedded, key=_forgotten)[len(embedded) // 2]
    draw(run, drawn, labels)
    return run.write({"networks": nets}, fragment)


def _forgotten(layers: list[dict[str, Tensor]]) -> float:
    """Whitened distance of the irrelevant perturbation in the last layer."""
    return float(layers[-1]["whitened"][0])


@torch.no_grad()
def _accuracy(net: SignNet, x: Tensor, labels: Tensor) -> float:
    return float((net(x).argmax(1) == labels).double().mean())


def sample(count: int) -> tuple[Tensor, Tensor]:
    """Points and labels."""
    x = SIGMA * torch.randn(count, 2)
    flip = torch.rand(count) < FLIP
    return x, ((x[:, 0] > 0) ^ flip).long()


def fit(x: Tensor, y: Tensor, bound: float, epochs: int, seed: int) -> SignNet:
    """Train one network under a spectral bound, then fold the bound into the weights."""
    torch.manual_seed(seed)
    net = SignNet()
    bound_spectral_norm(net, bound, x[:1])
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-2, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=3e-4)
    net.train()
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    fold_spectral_norm(net)
    return net


@torch.no_grad()
def layers_of(net: SignNet, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For the input and every layer: its value for all points, and for a point and its two perturbations."""
    point = x[(x - torch.tensor(POINT)).square().sum(1).argmin()]
    triple = torch.stack([point, point * torch.tensor([1.0, -1.0]), point * torch.tensor([-1.0, 1.0])])
    return list(zip([x, *net.hidden(x)], [triple, *net.hidden(triple)], strict=True))


def embed(values: Tensor, x: Tensor, triple: Tensor) -> dict[str, Tensor]:
    """Two principal components of a layer, whitened, for all points and for the three compared ones."""
    mean = values.mean(0)
    axes = torch.linalg.svd(values - mean, full_matrices=False).Vh[:2].T
    # Signs as in the input: the first component grows with x₁.
    axes = axes * torch.where(((values - mean) @ axes).T @ x[:, 0] < 0, -1.0, 1.0)
    axes = axes / ((values - mean) @ axes).square().mean(0).sqrt()
    return {
        "all": (values - mean) @ axes,
        "triple": (triple - mean) @ axes,
        "whitened": whitened_distances(values, triple),
        "RMS": torch.cdist(triple[:1], triple[1:])[0] / (values - mean).square().sum(1).mean().sqrt(),
    }


def whitened_distances(values: Tensor, triple: Tensor) -> Tensor:
    """Mahalanobis distance of the first of ``triple`` from the others; directions without variance do not count."""
    values, triple = values.double(), triple.double()
    covariance = torch.cov(values.T)
    steps = triple[1:] - triple[0]
    return (steps @ torch.linalg.pinv(covariance, hermitian=True, rtol=1e-10) * steps).sum(1).sqrt()


def distances(layer: dict[str, Tensor]) -> Json:
    """Distances of both perturbations from the point."""
    return {kind: dict(zip(PERTURBATIONS, layer[kind].tolist(), strict=True)) for kind in KINDS}


def draw(run: Run, drawn: dict[str, list[dict[str, Tensor]]], labels: Tensor) -> None:
    """A row for each bound, a column for each layer."""
    columns = len(WIDTHS)
    with plots.figure(run.figure("layers"), len(drawn), columns, width=2.1, height=2.1) as axes:
        for line, (title, layers) in zip(axes, drawn.items(), strict=True):
            for index, (axis, layer) in enumerate(zip(line, layers, strict=True)):
                _scatter(axis, layer, labels)
                axis.set_title("input" if index == 0 else f"layer {index}", fontsize=9)
            line[0].set_ylabel(title)
        axes[0, 0].legend(frameon=False, fontsize=6, loc="upper left")


def _scatter(axis: Any, layer: dict[str, Tensor], labels: Tensor) -> None:
    shown = slice(0, 300)
    for label, colour in ((0, "#9db8d6"), (1, "#e3b7bc")):
        points = layer["all"][shown][labels[shown] == label]
        axis.scatter(points[:, 0], points[:, 1], s=2, color=colour, rasterized=True)
    marks = zip(layer["triple"], ("original", "irrelevant", "relevant"), ("o", "s", "^"), strict=True)
    for point, name, marker in marks:
        axis.scatter(*point.tolist(), s=26, marker=marker, color="black", facecolors="none", label=name)
    axis.set(xticks=[], yticks=[], xlim=(-3, 3), ylim=(-3, 3))


def fragment(record: Json) -> str:
    """The figure and its distances."""
    header = ["network", "distance", "perturbation", "input", *(f"layer {i}" for i in range(1, len(WIDTHS)))]
    lines = []
    for title, found in record["result"]["networks"].items():
        seeds = found["seeds"]
        hits = statistics.median(seed["val_accuracy"] for seed in seeds)
        for kind in KINDS:
            for perturbation in PERTURBATIONS:
                layers = zip(*([layer[kind][perturbation] for layer in seed["layers"]] for seed in seeds), strict=True)
                medians = (f"{statistics.median(values):.3f}" for values in layers)
                lines.append([f"{title} ({found['bound']:g}), accuracy {hits:.3f}", kind, perturbation, *medians])
    return (
        "\n\n".join(
            [
                "## Sign example: which layers forget what is irrelevant to the label",
                "The paper: with the small bound even the penultimate layer separates the irrelevant perturbation, "
                "with the large one only early layers do.",
                runs.markdown_table(header, lines),
                "Distance between a point and its perturbation after each layer, whitened and in root mean squares of "
                f"that layer; median over {len(seeds)} networks. The figure shows the one in the middle.",
                f"![two whitened principal components of every layer]({record['name']}-{record['scale']}-layers.svg)",
                runs.provenance(record),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
