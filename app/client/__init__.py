"""A typed client of the service, and its command line; neither needs torch."""

from app.client.client import DEFAULT_URL, AsyncClient, ClassOptions, Client, Options, ValueOptions
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
from app.client.retry import Retry
from psc_core.target import Target
from psc_core.tasks.answer import ModelRef, Response
from psc_core.tasks.classification.answer import ImagePrediction, PredictResponse
from psc_core.tasks.classification.policy import Policy
from psc_core.tasks.regression.answer import ValuePrediction, ValueResponse
from psc_core.tasks.regression.policy import RegressionPolicy

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "BadAnswer",
    "ClassOptions",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "ImagePrediction",
    "InputError",
    "ModelRef",
    "NotAllowed",
    "Options",
    "Overloaded",
    "Policy",
    "PredictResponse",
    "ProblemError",
    "Refused",
    "RegressionPolicy",
    "Response",
    "Retry",
    "ServerFailed",
    "Target",
    "Unavailable",
    "ValueOptions",
    "ValuePrediction",
    "ValueResponse",
]
