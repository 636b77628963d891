"""The temperature of the original network's predictions."""

import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from psc_core.errors import NetworkError
from psc_core.heads.base import ClassifierHead, ClassifierOutput
from psc_core.heads.softmax import TemperatureHead, better_of, fit_temperature_head, nll
from psc_core.metrics import LOG_FLOOR
from tests.psc_core.heads.classifiers import fit, images


def test_temperature_undoes_overconfidence() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    own = fit_temperature_head(3 * logits, labels)
    assert (
        abs(own.record["temperature"] - 3) < 0.3 and fit_temperature_head(logits, labels).record["temperature"] == 1.0
    )


@pytest.mark.parametrize(("factor", "said"), [(1e-3, "small"), (1e4, "large")])
def test_logits_beyond_all_temperatures_are_told(factor: float, said: str) -> None:
    random, labels = torch.Generator().manual_seed(0), torch.arange(300) % 3
    logits = torch.randn(300, 3, generator=random) + 2 * torch.eye(3)[labels]
    with pytest.warns(UserWarning, match=f"own logits are too {said} for a temperature of 0.01 to 100"):
        fit_temperature_head(factor * logits, labels)
    guesses = 30 * torch.randn(300, 3, generator=random)  # of which no temperature is large enough
    for usual in (logits, 1e-3 * guesses, guesses):
        fit_temperature_head(usual, labels)


def test_a_temperature_follows_from_the_probabilities() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=random)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=random)[:, 0]
    served = TemperatureHead({"temperature": torch.tensor(0.5)}, record={"temperature": 0.5, "nll_above_own": 0.1})
    new = served.refit_temperature(served(logits).probabilities, labels)
    assert float(new.temperature) == new.record["temperature"] and abs(float(new.temperature) - 2) < 0.2
    assert new.record["nll_above_own"] == 0.1 and new.record["val_nll"] > 0, "why the network itself predicts"
    assert new.refit_temperature(new(logits).probabilities, labels) is new


def test_the_better_one_is_taken() -> None:
    z, labels = images(400, 6, 3, seed=5)
    head = fit("laplace")
    exact, random = 8 * torch.nn.functional.one_hot(labels, 3).float(), torch.randn(400, 3)
    for logits, is_own in ((exact, True), (random, False)):
        own = fit_temperature_head(logits, labels)
        chosen = better_of(head, own, z, logits, labels)
        assert isinstance(chosen, TemperatureHead) == is_own and "nll_above_own" not in own.record | head.record
        expected = -head(z).probabilities[torch.arange(400), labels].double().log().mean() - own.record["val_nll"]
        assert abs(chosen.record["nll_above_own"] - float(expected)) < 1e-5


def test_labels_of_one_image_share_its_error() -> None:
    z, labels = images(400, 6, 3, seed=5)
    logits, head = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)), fit("laplace")
    own = fit_temperature_head(logits, labels)
    difference = nll(head(z).probabilities.log(), labels) - nll(logits / own.temperature, labels)
    error = float(difference.std(correction=0)) / math.sqrt(400)
    shown, repeated = torch.arange(400), torch.arange(400).repeat(10)  # ten equal labels of each image
    for rows, of_images in ((shown, None), (shown, shown), (repeated, repeated)):
        found = better_of(head, own, z[rows], logits[rows], labels[rows], of_images).record
        assert found["nll_above_own_error"] == pytest.approx(error, rel=1e-4)
        assert found["nll_above_own"] == pytest.approx(float(difference.mean()), rel=1e-4)


class Certain(ClassifierHead):
    """Class z[0] with certainty, but what a test gives for the first image."""

    kind, layout, epistemic_unit = "certain", {"classes": ("classes",)}, "nats"
    first = 0.0

    def forward(self, z: Tensor) -> ClassifierOutput:
        probabilities = functional.one_hot(z[:, 0].long(), 3).float()
        probabilities[0] = self.first
        return ClassifierOutput(probabilities, z.new_zeros(len(z)))


@pytest.mark.parametrize("first", [0.0, torch.nan])
def test_a_head_with_an_unusable_probability_loses(first: float) -> None:
    labels = torch.arange(200) % 3
    logits = 30 * functional.one_hot(labels, 3).float()
    own = fit_temperature_head(logits, labels)
    head = Certain({"classes": torch.zeros(3)}, record={})
    head.first = first
    chosen = better_of(head, own, labels[:, None].float(), logits, labels)
    assert isinstance(chosen, TemperatureHead)
    assert chosen.record["nll_above_own"] == pytest.approx(-math.log(LOG_FLOOR) / 200, rel=1e-3)
    json.dumps(chosen.record, allow_nan=False)


def test_a_network_that_gives_nan_loses() -> None:
    z, labels = images(400, 6, 3, seed=5)
    logits = 3 * torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    usable = fit_temperature_head(logits[4:], labels[4:])
    logits[:4] = torch.nan
    own = fit_temperature_head(logits, labels)
    assert own.record["temperature"] == usable.record["temperature"]
    lost = 4 * -math.log(LOG_FLOOR)
    assert own.record["val_nll"] == pytest.approx((396 * usable.record["val_nll"] + lost) / 400)
    chosen = better_of(fit("laplace"), own, z, logits, labels)
    assert not isinstance(chosen, TemperatureHead)
    json.dumps(chosen.record, allow_nan=False)


def test_own_probabilities_are_the_networks_softmax() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    head = TemperatureHead({"temperature": torch.tensor(2.0)}, record={})
    scores, probabilities = head.score(torch.empty(5, 0), logits)
    torch.testing.assert_close(probabilities, (logits / 2).softmax(1))
    others = (logits / 2).softmax(1).sort(1).values[:, :-1]
    torch.testing.assert_close(scores["confidence"], (others**0.2).sum(1))
    assert scores["epistemic"].tolist() == [0.0] * 5 and head.explain(torch.empty(5, 0)) == {}
    with pytest.raises(NetworkError, match="keeps the network's output"):
        head.score(torch.empty(5, 0), None)
