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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack, get_type_hints
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from app.client.errors import (
    BadAnswer,
    InputError,
    NotAllowed,
    Overloaded,
    ProblemError,
    Refused,
    ServerFailed,
    Unavailable,
)
from app.client.retry import DEFAULT_RETRY, Retry, attempts
from psc_core.answers import ClassificationResponse, RegressionResponse, Response, response_type
from psc_core.errors import fault

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_METHODS: Final = {ClassificationResponse: "predict", RegressionResponse: "predict_values"}
"""The answers that have a method of their own; :meth:`Client.ask` returns any answer."""

AnyResponse = TypeVar("AnyResponse", bound=Response)

ImageInput = str | Path | bytes
"""An image: the path of a file, or the bytes of one."""


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
class _Call:
    """One request, which can be sent any number of times."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[tuple[str, tuple[str, bytes, str]]] = ()

    def build(self, client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        files = list(self.files) or None
        return client.build_request(self.method, self.path, params=dict(self.params), files=files)


def _known(options: Options, kind: type[Options]) -> dict[str, Any]:
    """Return options as keyword arguments; raises ``TypeError`` for an unknown one."""
    names = get_type_hints(kind)
    if unknown := sorted(options.keys() - names.keys()):
        raise TypeError(f"unexpected options {', '.join(unknown)}; expected some of {', '.join(names)}")
    return {**options}


def _predict_call(
    images: Sequence[ImageInput],
    *,
    model: str | None = None,
    explain: bool = False,
    map: bool = False,
    monitor: bool = True,
    **thresholds: float | None,
) -> _Call:
    """Read the images and build the request for them."""
    if isinstance(images, (str, bytes, Path)):
        raise InputError("expected a list of images, got one image; put it into a list")
    if not images:
        raise InputError("expected at least one image, got none")
    flags = {"explain": "true" if explain else None, "map": "true" if map else None}
    flags["monitor"] = None if monitor else "false"
    query = {name: str(value) for name, value in {**thresholds, **flags}.items() if value is not None}
    path = "predict" if model is None else f"models/{quote(model, safe='')}/predict"
    return _Call("POST", path, query, [_part(image, index) for index, image in enumerate(images)])


def _model_call(name: str | None) -> _Call:
    return _Call("GET", "model" if name is None else f"models/{quote(name, safe='')}")


def _part(image: ImageInput, index: int) -> tuple[str, tuple[str, bytes, str]]:
    if isinstance(image, bytes):
        return ("images", (f"image-{index}", image, "application/octet-stream"))
    path = Path(image)
    try:
        data = path.read_bytes()
    except OSError as error:
        is_folder = isinstance(error, IsADirectoryError)
        remedy = "name the images in it, or give psc-predict --recursive" if is_folder else "check the path"
        raise InputError(f"cannot read {path}: {error.strerror}; {remedy}", index) from error
    name = path.name.encode("utf-8", "replace").decode()
    return ("images", (name, data, "application/octet-stream"))


def _problem(response: httpx.Response) -> ProblemError:
    try:
        document = response.json()
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        document = {"detail": response.text[:200]}
    status = response.status_code
    kind: type[ProblemError] = Refused
    if status in (401, 403):
        kind = NotAllowed
    elif status == 429:
        kind = Overloaded
    elif status in (503, 504):
        kind = Unavailable
    elif status >= 500:
        kind = ServerFailed
    return kind(document, status, response.headers)


def _document(response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise _problem(response)
    try:
        document = response.json()
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"expected JSON from {response.url}, got something else; check the URL") from error
    if not isinstance(document, dict):
        raise BadAnswer(f"expected a JSON object from {response.url}, got something else; check the URL")
    return document


def _response(document: Mapping[str, Any]) -> Response:
    try:
        return response_type(document).model_validate(document, extra="ignore")  # A newer service may say more.
    except ValidationError as error:
        raise BadAnswer(f"the answer is not a prediction ({fault(error.errors()[0])}); check the URL") from error


def _expect(kind: type[AnyResponse], response: Response) -> AnyResponse:
    if not isinstance(response, kind):
        method = _METHODS.get(type(response), "ask")
        raise BadAnswer(f"model {response.model.name!r} predicts {response.noun}, not {kind.noun}; use {method}")
    return response


class _Base:
    """The base of both clients: the options of httpx, and when to try again."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, retry: Retry) -> None:
        self._retry = retry
        self._options: dict[str, Any] = {
            "base_url": url.rstrip("/") + "/",
            "timeout": timeout_s,
            "headers": {} if api_key is None else {"X-API-Key": api_key},
        }
        try:
            scheme = httpx.URL(url).scheme
        except httpx.InvalidURL:
            scheme = ""
        if scheme not in ("http", "https"):
            raise InputError(f"expected a URL such as {DEFAULT_URL}, got {url!r}; give http:// or https://")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InputError("expected an API key of printable ASCII, got one that no header can carry; check it")


class Client(_Base):
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
        self._http = httpx.Client(**self._options, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        return _response(_document(self._send(_predict_call(images, **options))))

    def model(self, name: str | None = None) -> dict[str, Any]:
        """Return the service's description of a model, by default of the default model, as ``GET /model`` does."""
        return _document(self._send(_model_call(name)))

    def _send(self, call: _Call) -> httpx.Response:
        for attempt in attempts(self._retry):
            time.sleep(attempt.wait_s)
            with attempt:
                attempt.response = self._http.send(call.build(self._http))
        return attempt.response


class AsyncClient(_Base):
    """An asynchronous client; use it as an asynchronous context manager.  Its arguments are :class:`Client`'s."""

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
        self._http = httpx.AsyncClient(**self._options, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        call = await asyncio.to_thread(_predict_call, images, **options)
        return _response(_document(await self._send(call)))

    async def model(self, name: str | None = None) -> dict[str, Any]:
        """Describe a model as :meth:`Client.model` does."""
        return _document(await self._send(_model_call(name)))

    async def _send(self, call: _Call) -> httpx.Response:
        for attempt in attempts(self._retry):
            await asyncio.sleep(attempt.wait_s)
            with attempt:
                attempt.response = await self._http.send(call.build(self._http))
        return attempt.response
