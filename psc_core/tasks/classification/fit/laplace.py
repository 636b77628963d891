"""Fit :class:`.heads.laplace.LaplaceHead`: weights and τ, their KFAC posterior, a temperature."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from psc_core.tasks.classification.fit.data import ClassifierData
from psc_core.tasks.classification.fit.kfac import Kfac, fit_kfac
from psc_core.tasks.classification.fit.posterior import choose_posterior
from psc_core.tasks.classification.fit.softmax import choose_softmax
from psc_core.tasks.classification.heads.laplace import LaplaceHead


def fit_laplace(data: ClassifierData) -> LaplaceHead:
    """Fit weights, their posterior and its temperature; the posterior of the logits divided by T is stored."""
    softmax = choose_softmax(
        data.train, data.train_labels, data.selection, data.selection_labels, num_classes=data.num_classes
    )
    kfac = fit_kfac(softmax.weight, softmax.bias, data.train, data.weights)
    choice = choose_posterior(
        softmax.logits(data.selection),
        logit_variance(kfac, data.selection),
        data.selection_labels,
        prior_precision=softmax.prior_precision,
    )
    weight_spectrum, bias_spectrum = (part / choice.temperature**2 for part in kfac.spectra(choice.prior_precision))
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
            "map_precision": softmax.prior_precision,
            "map_val_nll": softmax.selection_nll,
            "prior_precision": choice.prior_precision,
            "temperature": choice.temperature,
            "val_nll": choice.selection_nll,
        },
    )


def logit_variance(kfac: Kfac, phi: Float[Tensor, "m dim"]) -> Callable[[float], Tensor]:
    """Return ``s_c²`` of the selection examples, (m, classes), as a function of τ."""
    inputs = (phi @ kfac.input_vectors.to(phi.dtype)).square()
    outputs = kfac.output_vectors.to(phi.dtype).square().T

    def variance_with(prior_precision: float) -> Tensor:
        weights, biases = (part.to(phi.dtype) for part in kfac.spectra(prior_precision))
        return (inputs @ weights + biases) @ outputs

    return variance_with
