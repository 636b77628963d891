"""What a fit computes with."""

from __future__ import annotations

import pytest

from psc_core import FitOptions
from psc_core.errors import UsageError


@pytest.mark.parametrize("options", [FitOptions(device="cpu", precision="fp8"), FitOptions(device="tpu")])
def test_unknown_options(options: FitOptions) -> None:
    with pytest.raises(UsageError, match=r"expected a (precision|device)"):
        options.compute()
