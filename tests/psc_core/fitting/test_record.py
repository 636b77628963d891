"""The numbers that a bundle keeps of its fit."""

from __future__ import annotations

from psc_core.fit_parts import rounded


def test_numbers_of_a_report_have_nine_digits() -> None:
    assert rounded({"a": [1 / 3, (2, "x")]}) == {"a": [0.333333333, [2, "x"]]}
