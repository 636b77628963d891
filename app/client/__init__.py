"""A typed client of the service, and its command line; neither needs torch."""

from app.client.client import DEFAULT_URL, AsyncClient, ClassificationOptions, Client, Options, RegressionOptions
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
from psc_core.tasks.classification.answer import ClassificationAnswer, ClassificationResponse
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.regression.answer import RegressionAnswer, RegressionResponse
from psc_core.tasks.regression.policy import RegressionPolicy

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "BadAnswer",
    "ClassificationAnswer",
    "ClassificationOptions",
    "ClassificationPolicy",
    "ClassificationResponse",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "InputError",
    "ModelRef",
    "NotAllowed",
    "Options",
    "Overloaded",
    "ProblemError",
    "Refused",
    "RegressionAnswer",
    "RegressionOptions",
    "RegressionPolicy",
    "RegressionResponse",
    "Response",
    "Retry",
    "ServerFailed",
    "Target",
    "Unavailable",
]
