"""Values of a report."""

from __future__ import annotations

import pytest

from tests.psc_core.evaluation.support import rate


@pytest.mark.parametrize(
    ("count", "assessment"),
    [(19, "lower than promised"), (20, "as promised"), (80, "as promised"), (81, "higher than promised")],
)
def test_assessment_at_the_edges(count: int, assessment: str) -> None:
    assert rate(count).assessment == assessment
