"""What the heads of every task must do."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from psc_core.errors import BundleError
from psc_core.fitted import restore
from psc_core.heads.base import Head


def check_round_trip(heads: Mapping[str, type[Head]], head: Head, z: Tensor) -> None:
    """A head restored from JSON and tensors is the same one; with a tensor less it is refused."""
    again = restore(heads, json.loads(json.dumps(head.config())), head.state_dict())
    assert type(again) is type(head)
    assert again.config() == head.config()
    assert all(torch.equal(one, other) for one, other in zip(head(z), again(z), strict=True))
    state = dict(head.state_dict())
    state.popitem()
    with pytest.raises(BundleError, match="expected tensors"):
        restore(heads, head.config(), state)
