"""A typed client of the service and its command line; imports nothing that needs torch."""

from app.client.client import DEFAULT_URL, AsyncClient, Client, Retry
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
from app.response import ModelRef, PredictResponse
from psc_core.policy import Policy
from psc_core.prediction import ImagePrediction

__all__ = [
    "DEFAULT_URL",
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
    "Unavailable",
]
