"""What the last stage of either task fits before it calibrates (density, head, gates), and what a bundle says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from psc_core.bundle.manifest import layers_of
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.errors import UsageError
from psc_core.fitting.checks import check_own_output
from psc_core.fitting.gates import ChosenGates, choose_gates
from psc_core.fitting.options import FitOptions
from psc_core.fitting.scorer import cut, fit_scorer
from psc_core.model.pipeline import Scorer
from psc_core.network.backbone import Backbone
from psc_core.projection.fit.report import ProjectionReport
from psc_core.projection.module import Projection


@dataclass(frozen=True)
class FittedProjection:
    """A projection, what choosing it measured, and the layers that it reads."""

    projection: Projection
    report: ProjectionReport
    layers: tuple[str, ...]


@dataclass(frozen=True)
class FittedParts:
    """A scorer and what it was cut from, before calibration."""

    backbone: Backbone  # as a bundle stores it; the scorer runs a fused copy
    scorer: Scorer
    gates: ChosenGates | None

    @property
    def gate_names(self) -> tuple[str, ...]:
        """Names of the gates; none without."""
        return () if self.gates is None else self.gates.names

    def report(
        self,
        candidate: Candidate,
        projection: FittedProjection,
        metrics: Mapping[str, Any],
        provenance: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """What a bundle records of its fit; ``metrics`` are those of the calibration split."""
        gates = {} if self.gates is None else {"gates": self.gates.choice.to_json()}
        report = {
            "collapse": candidate.report and {**candidate.report.to_json(), "notes": list(candidate.notes)},
            "metrics": {**metrics, "projection": projection_metrics(projection.report), **gates},
            "provenance": dict(provenance or {}),
        }
        recorded: dict[str, Any] = rounded(report)
        return recorded


def fit_parts(
    net: nn.Module,
    candidate: Candidate,
    projection: FittedProjection,
    train: ImageDataset,
    val: ImageDataset,
    *,
    head: str | None,
    density: str,
    pca: int | None,
    keep_output: bool,
    with_gates: bool,
    options: FitOptions,
    head_layers: Sequence[str] = (),
) -> FittedParts:
    """Density and head on ``train``, with free numbers chosen on the selection split of ``val``, and the gates.

    Args:
        net: The whole network.
        candidate: The layer(s) it is cut behind.
        projection: Of the candidate.
        train: Training images.
        val: Validation images.
        head: Its kind; None for base predictions of a classifier.
        density: Its kind.
        pca: Dimension that it works in; None to choose.
        keep_output: Whether the network's own output is served.
        with_gates: Whether gates make the OOD score.
        options: Shared options.
        head_layers: Layers that the head reads beside z.

    Raises:
        FitError: Features that cannot be fitted; the message says why.
        NetworkError: The network cannot be cut.
    """
    compute = options.compute()
    selection, _ = split_validation(val, options.seed)
    backbone = cut(net, (*candidate.layers, *head_layers), train, compute, keep_output=keep_output)
    if keep_output:
        check_own_output(backbone, train, compute)
    scorer = fit_scorer(
        backbone, projection.projection, train, selection, density=density, pca=pca, head=head, options=options
    )
    if not with_gates:
        return FittedParts(backbone, scorer, None)
    gates = choose_gates(net, candidate.layers, scorer, train, val, selection, options)
    if gates.texture is not None:
        layers = layers_of(candidate.layers, head_layers, gates.texture.layer)
        backbone = cut(net, layers, train, compute, keep_output=keep_output)
        positions = [layers.index(name) for name in head_layers]
        scorer = scorer.with_backbone(backbone.fused(compute.precision), gates.texture.density, positions)
    return FittedParts(backbone, scorer, gates)


def check_same_layers(candidate: Candidate, projection: FittedProjection) -> None:
    """Reject a projection of other layers than the candidate's, by :class:`UsageError`."""
    if projection.layers != candidate.layers:
        raise UsageError(
            f"expected a projection of the candidate {'+'.join(candidate.layers)}, got one of "
            f"{'+'.join(projection.layers)}; fit the projection for this candidate"
        )


def projection_metrics(report: ProjectionReport) -> dict[str, Any]:
    """What a bundle records of its projection."""
    choice = report.choice
    return {
        "nc1": choice.nc1,
        "nc4": choice.nc4,
        "scaled_nc1": report.scaled_nc1,
        "scaled_nc4": report.scaled_nc4,
        "warning": choice.warning,
        "pooled": report.note,
        "positions": [{"d_proj": d, "made_up_auroc": value} for d, value in report.positions],
    }


def rounded(value: Any) -> Any:
    """Numbers of a report to 9 digits: the version hashes them, and the last ones depend on how sums were split."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
