from __future__ import annotations

import pytest
import torch

from psc_core.errors import NetworkError
from psc_core.heads.softmax import TemperatureHead
from tests.psc_core.tasks.support import check_round_trip


def test_own_probabilities_are_the_networks_softmax() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    head = TemperatureHead({"temperature": torch.tensor(2.0)}, record={})
    scores, probabilities = head.score(torch.empty(5, 0), logits)
    torch.testing.assert_close(probabilities, (logits / 2).softmax(1))
    torch.testing.assert_close(scores["energy"], -(logits / 2).exp().sum(1).log())
    assert scores["epistemic"].tolist() == [0.0] * 5 and head.explain(torch.empty(5, 0)) == {}
    check_round_trip({"own": TemperatureHead}, head, logits)
    with pytest.raises(NetworkError, match="keeps the network's output"):
        head.score(torch.empty(5, 0), None)
