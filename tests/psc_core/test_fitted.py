from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from psc_core.errors import BundleError, FitError
from psc_core.fitted import Fitted, restore


class Line(Fitted):
    """One axis shared by two tensors."""

    kind = "line"
    layout: ClassVar = {"slope": ("dim",), "offset": ("dim",)}
    offset: Tensor


GOOD = {"slope": torch.ones(3), "offset": torch.zeros(3)}


def test_round_trip() -> None:
    line = Line(GOOD, record={"tau": 2.0})
    again = restore({"line": Line}, line.config(), line.state_dict())
    assert again.config() == {"kind": "line", "sizes": {"dim": 3}, "record": {"tau": 2.0}}
    assert all(torch.equal(tensor, GOOD[name]) for name, tensor in again.state_dict().items())


def test_more_in_a_record_leaves_the_model_as_it_is() -> None:
    line = Line(GOOD, record={"tau": 2.0})
    more = line.recording({"loss": 1})
    assert (line.record, more.record) == ({"tau": 2.0}, {"tau": 2.0, "loss": 1})
    assert type(more) is Line and torch.equal(more.offset, line.offset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.ones(3)}, "expected tensors"),
        ({"slope": torch.ones(4)}, "with axes"),
        ({"slope": torch.ones(3, 1)}, "with axes"),
        ({"slope": torch.full((3,), torch.nan)}, "finite"),
    ],
)
def test_rejects_other_tensors(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(FitError, match=message):
        Line({**GOOD, **change}, record={})
    with pytest.raises(BundleError, match=message):
        restore({"line": Line}, Line(GOOD, record={}).config(), {**GOOD, **change})
