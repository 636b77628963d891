"""The content of a report with known numbers."""

import torch

from psc_core.report.content import Content, Picture, Role
from psc_core.report.tasks import ClassificationSet, RegressionSet

NONE = torch.empty(0, dtype=torch.int64)


def image_set(name: str, role: Role, scores: list[float], *, classes: int = 10) -> ClassificationSet:
    """A set of which every second image is predicted right, with confidence 0.9."""
    n = len(scores)
    labels = torch.arange(n) % classes if role.is_known else NONE
    predicted = torch.where(torch.arange(n) % 2 == 0, torch.arange(n), torch.arange(n) + 1) % classes
    correct = {"psc": predicted == labels, "original": predicted != labels} if role.is_known else {}
    return ClassificationSet(
        name,
        role,
        torch.tensor(scores),
        torch.tensor(scores).abs(),
        predicted,
        labels,
        {who: torch.full((n,), 0.9) for who in correct},
        correct,
        quality={
            who: {"accuracy": float(hits.double().mean()), "nll": 0.5, "ece": 0.1} for who, hits in correct.items()
        },
    )


def value_set(name: str, role: Role, scores: list[float], *, own_rmse: float = 2.0) -> RegressionSet:
    """A set of which image i has the number i, the prediction i + 1 and the deviation 1 + i / 2."""
    values = torch.arange(len(scores), dtype=torch.float64)
    psc = {"rmse": 1.0, "r2": 0.5, "nll": 1.25, "crps": 0.75}
    return RegressionSet(
        name,
        role,
        torch.tensor(scores),
        values.float() + 1,
        1 + values.float() / 2,
        values if role.is_known else values[:0],
        quality={"original": {"rmse": own_rmse}, "psc": psc} if role.is_known else {},
    )


def value_content(version: str = "0123456789ab") -> Content:
    """:func:`content` of a regression."""
    return Content(
        version,
        (
            value_set("validation", Role.VALIDATION, [0.0, 1.0, 2.0, 3.0]),
            value_set("turned", Role.SYNTHETIC, [0.0, 9.0]),
            value_set("clothes", Role.OOD, [7.0, 8.0, 9.0]),
        ),
        sizes=content().sizes,
    )


def content(version: str = "0123456789ab") -> Content:
    """Validation, test, synthetic and OOD images."""
    return Content(
        version,
        (
            image_set("validation", Role.VALIDATION, [0.0, 1.0, 2.0, 3.0]),
            image_set("turned", Role.SYNTHETIC, [0.0, 9.0]),
            image_set("clothes", Role.OOD, [7.0, 8.0, 9.0]),
        ),
        (Picture("most typical", 1, 2, 0.5, 0.25, torch.zeros(1, 4, 5, dtype=torch.uint8)),),
        {"nc1": torch.rand(3, 2, dtype=torch.float64), "nc4": torch.rand(3, 2, dtype=torch.float64)},
    )
