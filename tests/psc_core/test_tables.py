"""Columns of text."""

from psc_core.tables import aligned


def test_columns_begin_or_end_below_each_other() -> None:
    rows = [["name", "x", "why"], ["a", "1.0"], ["longer", "12.0", "so"]]
    assert aligned(rows, left={0, 2}) == ["name       x  why", "a        1.0", "longer  12.0  so"]
    assert aligned(rows[1:], left=()) == ["     a   1.0", "longer  12.0  so"]
    assert aligned([]) == []
