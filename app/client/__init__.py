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
from psc_core.answers import (
    ClassificationAnswer,
    ClassificationPolicy,
    ClassificationResponse,
    ModelRef,
    RegressionAnswer,
    RegressionPolicy,
    RegressionResponse,
    Response,
    Target,
)

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
