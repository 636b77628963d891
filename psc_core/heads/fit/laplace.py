"""Fit :class:`psc_core.heads.laplace.LaplaceHead`: weights, then their KFAC posterior, then τ and a temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from jaxtyping import Float
from torch import Tensor

from psc_core.heads.fit.data import HeadData
from psc_core.heads.fit.kfac import Kfac, fit_kfac
from psc_core.heads.fit.posterior import choose_posterior
from psc_core.heads.fit.softmax import SoftmaxFit, choose_softmax
from psc_core.heads.laplace import LaplaceHead

PRECISIONS: Final = tuple(10.0 ** (k / 4) for k in range(-16, 17))
"""Prior precisions τ tried for the posterior: 10⁻⁴ … 10⁴, four to a decade."""


def fit_laplace(data: HeadData) -> LaplaceHead:
    """Weights, their posterior, then τ and temperature, in the order of laplace-torch's grid search."""
    softmax = choose_softmax(data.train, data.train_labels, data.val, data.val_labels, num_classes=data.num_classes)
    kfac = fit_kfac(softmax.weight, softmax.bias, data.train, data.weights)
    choice = choose_posterior(validation_logits(softmax, kfac, data.val), data.val_labels, PRECISIONS)
    weight_spectrum, bias_spectrum = kfac.spectra(choice.precision)
    return LaplaceHead(
        {
            **data.standardisation._asdict(),
            "weight": softmax.weight / choice.temperature,
            "bias": softmax.bias / choice.temperature,
            "input_vectors": kfac.input_vectors,
            "output_vectors": kfac.output_vectors,
            "weight_spectrum": weight_spectrum,
            "bias_spectrum": bias_spectrum,
        },
        record={
            "map_precision": softmax.precision,
            "map_val_nll": softmax.val_nll,
            "prior_precision": choice.precision,
            "temperature": choice.temperature,
            "val_nll": choice.val_nll,
        },
    )


def validation_logits(softmax: SoftmaxFit, kfac: Kfac, val: Float[Tensor, "m dim"]) -> Callable[[float], Tensor]:
    """Probit logits ``μ_c / √(1 + π s_c² / 8)`` of the validation examples as a function of τ."""
    mean = softmax.logits(val)
    inputs = (val @ kfac.input_vectors.to(val.dtype)).square()
    outputs = kfac.output_vectors.to(val.dtype).square().T

    def logits_with(precision: float) -> Tensor:
        weights, biases = (part.to(val.dtype) for part in kfac.spectra(precision))
        variance = (inputs @ weights + biases) @ outputs
        return mean * (1.0 + (math.pi / 8.0) * variance).rsqrt()

    return logits_with
