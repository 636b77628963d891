"""A typed client of the service; needs httpx and pydantic, and nothing that needs torch.

::

    with Client("http://localhost:8000") as client:
        for prediction in client.predict(["cat.jpg", image_bytes]).predictions:
            print(prediction.label, prediction.ood_p_value, prediction.decision)

:class:`AsyncClient` has the same methods as coroutines.  A request is sent again, a bounded number of times, if the
queue is full (429), the service is not ready (503) or there is no connection; the wait is the one that ``Retry-After``
asks for.  Every other error raises at once, see :class:`ClientError`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack, get_type_hints
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx
from pydantic import ValidationError

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
    response_type,
)
from psc_core.errors import fault

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
DEFAULT_URL: Final = "http://127.0.0.1:8000"
# The answers that have a method of their own; :meth:`Client.ask` returns any answer.
_METHODS: Final = {ClassificationResponse: "predict", RegressionResponse: "predict_values"}
AnyResponse = TypeVar("AnyResponse", bound=Response)
_BYTES: Final = (bytes, bytearray, memoryview)
ImageInput = str | Path | bytes | bytearray | memoryview  # the path of a file, or the bytes of one
_CONNECTIONS: Final = 100  # of a client at most, as in httpx
_RETRIED_STATUS: Final = frozenset({429, 503})
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_REASONS: Final = {each.value: each.phrase for each in HTTPStatus}


class ClientError(Exception):
    """The base of the errors that the client raises.

    Attributes:
        index: The position of the image at fault, or None if no single image is.
    """

    index: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Exception.__new__, (type(self), *self.args), self.__dict__  # Not by __init__, which takes no text.


class InputError(ClientError):
    """An image cannot be read here, or the model's name, the URL or the API key cannot be used; nothing was sent."""

    def __init__(self, message: str, index: int | None = None) -> None:
        self.index = index
        super().__init__(message)


class ConnectionFailed(ClientError):
    """The service could not be reached, or did not answer in time."""


class BadAnswer(ClientError):
    """The client does not understand the answer; the URL may be another service's."""


class ProblemError(ClientError):
    """The service answered with a problem.

    Attributes:
        status: The HTTP status.
        title: The problem's title, the same for all problems of its type.
        detail: What is wrong with this request.
        type: The URI of the problem's type.
        filename: The file name of the image at fault, or None if there is none.
        trace_id: The id under which the service logged the request, or None if the answer has none.
        retry_after_s: The time after which to try again, seconds, or None if the answer has none.
    """

    def __init__(self, problem: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.title = str(problem.get("title") or _REASONS.get(status, "Error"))
        self.detail = str(problem.get("detail") or "")
        self.type = str(problem.get("type") or "about:blank")
        index = problem.get("index")  # Checked, because the answer may be another service's.
        self.index = index if type(index) is int and index >= 0 else None
        self.filename: str | None = problem.get("filename")
        trace = headers.get("traceresponse", "").split("-")
        self.trace_id = trace[1] if len(trace) == 4 else None
        self.retry_after_s = retry_after_seconds(headers.get("retry-after"))
        super().__init__(f"{status} {self.title}" + (f": {self.detail}" if self.detail else ""))


class Refused(ProblemError):
    """The request or one of its images cannot be used (any other 4xx)."""


class NotAllowed(ProblemError):
    """The API key is missing, unknown or not allowed to do this (401 or 403)."""


class Overloaded(ProblemError):
    """The service had no room for the request at any attempt (429)."""


class Unavailable(ProblemError):
    """The service was not ready at any attempt (503), or did not answer before its deadline (504)."""


class ServerFailed(ProblemError):
    """The service failed (any other 5xx)."""


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, as a number or a date; None if it has neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # The latter of a year that no date can have.
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


class Options(TypedDict, total=False):
    """The options of any request; the service's own values hold for those left out.

    Attributes:
        model: The name of the model; the service's default model if ``None``.
        explain: Whether to ask for explanations.
        map: Whether to ask for maps in the explanations, which show where an image is unusual.
        monitor: False for images that are not part of the usual stream, such as tests: the service leaves them out of
            drift and of the metrics of scores.
        alpha: The false-alarm rate for ``is_ood`` in this request.
    """

    model: str | None
    explain: bool
    map: bool
    monitor: bool
    alpha: float | None


class ClassificationOptions(Options, total=False):
    """The options of a request to a classifier.

    Attributes:
        top_k: The number of most probable classes to return instead of all.
        ambiguity_threshold: The entropy (nats) above which an image is ambiguous in this request.
    """

    top_k: int | None
    ambiguity_threshold: float | None


class RegressionOptions(Options, total=False):
    """The options of a request to a regression.

    Attributes:
        max_width: The width of an interval, in the target's unit, above which a number is uncertain in this request.
    """

    max_width: float | None


@dataclass(frozen=True)
class Retry:
    """A rule for when to try a request again."""

    attempts: int = 4  # the maximum number of times that a request is sent, including the first
    max_wait_s: float = 30.0  # the longest single wait, seconds; a longer ``Retry-After`` raises at once
    base_wait_s: float = 0.25  # the first wait if the service asks for none, seconds; it doubles each time, with jitter

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_wait_s < 0 or self.base_wait_s < 0:
            raise ValueError(f"expected at least 1 attempt and waits of 0 s or more, got {self}")

    def wait_s(self, attempt: int, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        """Return the seconds to wait after attempt number ``attempt`` (from 1), or None if its outcome is the last."""
        retry_after_s, is_retried = None, isinstance(outcome, _NOT_SENT)
        if isinstance(outcome, httpx.Response):
            is_retried = outcome.status_code in _RETRIED_STATUS
            retry_after_s = retry_after_seconds(outcome.headers.get("retry-after"))
        if not is_retried or attempt >= self.attempts:
            return None
        if retry_after_s is not None:
            return retry_after_s if retry_after_s <= self.max_wait_s else None
        return min(self.max_wait_s, self.base_wait_s * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


DEFAULT_RETRY: Final = Retry()


def _known(options: Options, kind: type[Options]) -> dict[str, Any]:
    """Return options as keyword arguments; raises ``TypeError`` for an unknown one."""
    names = get_type_hints(kind)
    if unknown := sorted(options.keys() - names.keys()):
        raise TypeError(f"unexpected options {', '.join(unknown)}; expected some of {', '.join(names)}")
    return {**options}


def _shown(url: object) -> str:
    """Return a URL without its user and password."""
    return re.sub("//.*@", "//", str(url))


def _has_proxy(url: httpx.URL) -> bool:
    """Return whether the environment names a proxy for a URL."""
    proxies = getproxies()
    return bool(proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(url.netloc.decode())


class _Requests:
    """What both clients share: every request, when to send it again, and how its answer is read; they only send it."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, retry: Retry) -> None:
        try:
            parsed = httpx.URL(url)
            scheme = parsed.scheme if parsed.raw_host.decode().encode("idna") else ""  # As the name is looked up.
        except (httpx.InvalidURL, UnicodeError):
            scheme = ""
        if scheme not in ("http", "https"):
            raise InputError(f"expected a URL such as {DEFAULT_URL}, got {_shown(url)!r}; check http:// and the host")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
            raise InputError("expected an API key of printable ASCII with no space around it; check the key")
        self._retry = retry
        self._options: dict[str, Any] = {
            "base_url": url.rstrip("/") + "/",
            "timeout": timeout_s,
            "headers": {} if api_key is None else {"X-API-Key": api_key},
        }

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Refuse what the environment says of proxies and certificates if httpx cannot use it."""
        try:
            yield
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            reason = "not a URL" if isinstance(error, httpx.InvalidURL) else error  # Whose text may have a password.
            raise InputError(
                f"cannot use the proxy or certificates of the environment ({reason}); check ALL_PROXY, HTTP_PROXY, "
                "HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
            ) from error

    def _next(self, attempt: int, outcome: httpx.Response | httpx.HTTPError) -> httpx.Response | float:
        """Return the answer, or the seconds to wait before the request is sent again; raise if no attempt is left."""
        wait_s = self._retry.wait_s(attempt, outcome)
        if wait_s is not None:
            return wait_s
        if isinstance(outcome, httpx.PoolTimeout):
            raise ConnectionFailed("all connections of this client were in use; make fewer calls at once") from outcome
        if isinstance(outcome, httpx.HTTPError):
            reason, url = str(outcome) or type(outcome).__name__, _shown(outcome.request.url)
            remedy = "is the service running there?"
            if _has_proxy(outcome.request.url):
                remedy += " Or check the proxy of the environment: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY"
            raise ConnectionFailed(f"no answer from {url} ({reason}); {remedy}") from outcome
        return outcome


def _predict_request(
    client: httpx.Client | httpx.AsyncClient,
    images: Sequence[ImageInput],
    *,
    model: str | None = None,
    explain: bool = False,
    map: bool = False,
    monitor: bool = True,
    **thresholds: float | None,
) -> httpx.Request:
    """Read the images and build the request for them."""
    if isinstance(images, (str, Path, *_BYTES)) or hasattr(images, "read") or not hasattr(images, "__iter__"):
        raise InputError("expected a list of images, got one image; put it into a list")
    flags = {"explain": explain or None, "map": map or None, "monitor": None if monitor else False}
    query = {name: value for name, value in {**thresholds, **flags}.items() if value is not None}
    path = "predict" if model is None else f"{_model_path(model)}/predict"
    files = [_part(image, index) for index, image in enumerate(images)]
    if not files:
        raise InputError("expected at least one image, got none")
    return client.build_request("POST", path, params=query, files=files)


def _model_path(name: str | None) -> str:
    if name in ("", ".", ".."):  # httpx would take them for parts of a path.
        raise InputError(f"expected the name of a model, got {name!r}; client.model()['models'] lists them")
    return "model" if name is None else f"models/{quote(name, safe='')}"


def _part(image: ImageInput, index: int) -> tuple[str, tuple[str, bytes, str]]:
    if isinstance(image, _BYTES):
        return ("images", (f"image-{index}", bytes(image), "application/octet-stream"))
    try:
        path = Path(image)
        data = path.read_bytes()
    except (TypeError, ValueError) as error:  # The latter of a null character.
        got = repr(image) if isinstance(image, str) else type(image).__name__
        raise InputError(
            f"expected the path of a file or its bytes, got {got}; read a file with .read()", index
        ) from error
    except OSError as error:
        is_folder = isinstance(error, IsADirectoryError)
        remedy = "name the images in it, or give psc-predict --recursive" if is_folder else "check the path"
        raise InputError(f"cannot read {path}: {error.strerror}; {remedy}", index) from error
    name = path.name.encode("utf-8", "replace").decode()
    return ("images", (name, data, "application/octet-stream"))


def _json(response: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object of a response; None if it has none."""
    try:
        document = response.json()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _problem(response: httpx.Response) -> ProblemError:
    document = _json(response)
    if document is None:
        document = {"detail": response.text[:200]}
    status = response.status_code
    kinds = {401: NotAllowed, 403: NotAllowed, 429: Overloaded, 503: Unavailable, 504: Unavailable}
    kind = kinds.get(status, ServerFailed if status >= 500 else Refused)
    return kind(document, status, response.headers)


def _document(response: httpx.Response) -> dict[str, Any]:
    if response.is_redirect:
        target = _shown(response.headers.get("location", "another place"))
        raise BadAnswer(f"{_shown(response.url)} sends to {target!r}; check the URL, and https or http")
    if not response.is_success:
        raise _problem(response)
    document = _json(response)
    if document is None:
        raise BadAnswer(f"expected a JSON object from {_shown(response.url)}, got something else; check the URL")
    return document


def _answer(response: httpx.Response) -> Response:
    document = _document(response)
    try:
        return response_type(document).model_validate(document, extra="ignore")  # A newer service may say more.
    except ValidationError as error:
        raise BadAnswer(f"the answer is not a prediction ({fault(error.errors()[0])}); check the URL") from error


def _expect(kind: type[AnyResponse], response: Response) -> AnyResponse:
    if not isinstance(response, kind):
        method = _METHODS.get(type(response), "ask")
        raise BadAnswer(f"model {response.model.name!r} predicts {response.noun}, not {kind.noun}; use {method}")
    return response


class Client(_Requests):
    """A synchronous client; use it as a context manager, from one or several threads.

    Args:
        url: The URL of the service, including a path prefix if it has one.
        api_key: The key, which is sent as ``X-API-Key``.
        timeout_s: The longest time without progress on a connection, seconds.
        retry: When to try a request again.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retry: Retry = DEFAULT_RETRY,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout_s, retry)
        with self._environment():
            self._http = httpx.Client(**self._options, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def predict(self, images: Sequence[ImageInput], **options: Unpack[ClassificationOptions]) -> ClassificationResponse:
        """Classify images in one request.

        Args:
            images: At least one image: the path of a file, or its bytes.
            options: See :class:`ClassificationOptions` and :class:`Options`.

        Raises:
            ClientError: If the request failed; see the subclasses.
            TypeError: If an option is unknown.
        """
        return _expect(ClassificationResponse, self.ask(images, **_known(options, ClassificationOptions)))

    def predict_values(self, images: Sequence[ImageInput], **options: Unpack[RegressionOptions]) -> RegressionResponse:
        """Predict a number for each image by a regression, in one request.

        Args:
            images: See :meth:`predict`.
            options: See :class:`RegressionOptions` and :class:`Options`.

        Raises:
            ClientError: If the request failed; see the subclasses.
            TypeError: If an option is unknown.
        """
        return _expect(RegressionResponse, self.ask(images, **_known(options, RegressionOptions)))

    def ask(self, images: Sequence[ImageInput], **options: Any) -> Response:
        """Ask a model of any task about images, in one request.

        Args:
            images: See :meth:`predict`.
            options: See :class:`Options`; also the thresholds and options of the model's task, by name.

        Raises:
            ClientError: If the request failed; see the subclasses.
        """
        return _answer(self._send(_predict_request(self._http, images, **options)))

    def model(self, name: str | None = None) -> dict[str, Any]:
        """Return the service's description of a model, by default of the default model, as ``GET /model`` does."""
        return _document(self._send(self._http.build_request("GET", _model_path(name))))

    def _send(self, request: httpx.Request) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.HTTPError
            try:
                outcome = self._http.send(request)
            except httpx.HTTPError as error:
                outcome = error
            step = self._next(attempt, outcome)
            if isinstance(step, httpx.Response):
                return step
            time.sleep(step)


class AsyncClient(_Requests):
    """An asynchronous client of one event loop; use it as an asynchronous context manager.  See :class:`Client`.

    A request that was sent keeps its connection until it is answered, also if its call is cancelled.  Of more than 100
    calls at once, the others wait for a connection.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retry: Retry = DEFAULT_RETRY,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout_s, retry)
        with self._environment():
            self._http = httpx.AsyncClient(**self._options, transport=transport)
        self._connections = asyncio.Semaphore(_CONNECTIONS)
        self._sending: set[asyncio.Task[httpx.Response]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def predict(
        self, images: Sequence[ImageInput], **options: Unpack[ClassificationOptions]
    ) -> ClassificationResponse:
        """Predict as :meth:`Client.predict` does."""
        return _expect(ClassificationResponse, await self.ask(images, **_known(options, ClassificationOptions)))

    async def predict_values(
        self, images: Sequence[ImageInput], **options: Unpack[RegressionOptions]
    ) -> RegressionResponse:
        """Predict as :meth:`Client.predict_values` does."""
        return _expect(RegressionResponse, await self.ask(images, **_known(options, RegressionOptions)))

    async def ask(self, images: Sequence[ImageInput], **options: Any) -> Response:
        """Ask as :meth:`Client.ask` does, reading the files on a thread."""
        request = await asyncio.to_thread(_predict_request, self._http, images, **options)
        return _answer(await self._send(request))

    async def model(self, name: str | None = None) -> dict[str, Any]:
        """Describe a model as :meth:`Client.model` does."""
        return _document(await self._send(self._http.build_request("GET", _model_path(name))))

    async def _send(self, request: httpx.Request) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.HTTPError
            await self._connections.acquire()
            # It ends even if the call is cancelled: httpcore would keep its place in the pool for ever.
            sending = asyncio.create_task(self._http.send(request))
            self._sending.add(sending)
            sending.add_done_callback(self._sent)
            try:
                outcome = await asyncio.shield(sending)
            except httpx.HTTPError as error:
                outcome = error
            step = self._next(attempt, outcome)
            if isinstance(step, httpx.Response):
                return step
            await asyncio.sleep(step)

    def _sent(self, sending: asyncio.Task[httpx.Response]) -> None:
        self._connections.release()
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # Or asyncio would log that nobody has asked for it.
