"""The fields of a prediction agree with each other and with the calibration."""

from __future__ import annotations

import torch

from psc_core import PSC
from psc_core.heads.base import entropy


def test_fields_of_a_prediction_agree(psc: PSC, digits: torch.Tensor) -> None:
    prediction = psc.predict(digits)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(len(digits)))
    torch.testing.assert_close(prediction.predictive_entropy, entropy(prediction.probabilities))
    assert tuple(prediction.checks) == psc.checks == ("texture", "content")
    assert torch.equal(prediction.is_ood, prediction.ood_p_value <= psc.policy.alpha)
    assert prediction.labels == tuple(psc.classes[i] for i in prediction.class_index.tolist())
    best = prediction.probabilities.max(1)
    assert torch.equal(prediction.confidence, best.values)
    threshold = psc.calibration.quantile(psc.policy.coverage)
    assert prediction.prediction_set == tuple(
        tuple(name for k, name in enumerate(psc.classes) if p[k] >= threshold or k == top)
        for p, top in zip(prediction.probabilities.tolist(), best.indices.tolist(), strict=True)
    )
    scores = psc.calibration.ood_scores.double()
    expected = [(1 + int((scores >= float(s)).sum())) / (1 + len(scores)) for s in prediction.ood_score]
    torch.testing.assert_close(prediction.ood_p_value.double(), torch.tensor(expected).double(), atol=1e-6, rtol=0)
