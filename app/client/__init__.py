"""A typed client of the service and its command line; imports nothing that needs torch."""

from app.client.client import DEFAULT_URL, Answer, AsyncClient, Client, Retry
from app.client.errors import (
    BadAnswer,
    ClientError,
    ConnectionFailed,
    InputError,
    NotAllowed,
    Overloaded,
    ProblemError,
    Refused,
    ServerFailed,
    Unavailable,
)
from app.response import ModelRef, PredictResponse, ValueResponse
from psc_core.policy import Policy, ValuePolicy
from psc_core.prediction import ImagePrediction
from psc_core.target import Target
from psc_core.value_prediction import ValuePrediction

__all__ = [
    "DEFAULT_URL",
    "Answer",
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "ImagePrediction",
    "InputError",
    "ModelRef",
    "NotAllowed",
    "Overloaded",
    "Policy",
    "PredictResponse",
    "ProblemError",
    "Refused",
    "Retry",
    "ServerFailed",
    "Target",
    "Unavailable",
    "ValuePolicy",
    "ValuePrediction",
    "ValueResponse",
]
