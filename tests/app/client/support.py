"""A scripted service for the client."""

from typing import Any

import httpx

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.answers import REGRESSION_SCORES as VALUE_SCORES

PREDICTION = dict.fromkeys(CLASSIFICATION_SCORES, 0.0) | {
    "label": "7", "class_index": 7, "confidence": 0.97, "probabilities": [0.03, 0.97], "prediction_set": ["7"],
    "predictive_entropy": 0.12, "log_density": -41.2, "ood_score": 41.2, "ood_p_value": 0.63, "epistemic": 0.01,
    "is_ood": False, "decision": "accept", "a_later_version_adds_this": 1,
}  # fmt: skip
NUMBER = dict.fromkeys(VALUE_SCORES, 0.5) | {
    "mean": 12.5, "aleatoric": 3.0, "epistemic": 4.0, "lower": 2.0, "upper": 23.0, "is_ood": False, "decision": "accept"
}  # fmt: skip
POLICY = {"alpha": 0.05, "ambiguity_threshold": 1.0, "coverage": 0.95}
MODEL = {"name": "mnist", "version": "abc", "layer": "layer3"}
TRACERESPONSE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
Reply = httpx.Response | Exception


def answer(count: int = 1) -> httpx.Response:
    return httpx.Response(200, json={"model": MODEL, "policy": POLICY, "predictions": [PREDICTION] * count})


def numbers(count: int = 1) -> httpx.Response:
    policy, target = {"alpha": 0.05, "max_width": None, "coverage": 0.9}, {"name": "angle", "unit": "degrees"}
    document = {"model": MODEL, "target": target, "policy": policy, "predictions": [NUMBER] * count}
    return httpx.Response(200, json=document)


def problem(status: int, headers: dict[str, str] | None = None, **extra: Any) -> httpx.Response:
    document = {"type": "urn:x", "title": "Kind", "status": status, "detail": "what was wrong", **extra}
    return httpx.Response(status, json=document, headers=headers)


class Script:
    """A service that gives the next scripted reply to each request, and remembers the requests."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []

    def reply(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.reply)
