"""The error table covers what can reach a client and nothing else leaks."""

from __future__ import annotations

import pytest

from app import errors
from app.errors import MAX_DETAIL, TABLE, ImageRefused, QueueFull, Unauthorized, problem_of
from psc_core.errors import ImageTooLarge, UndecodableImage, UnsupportedImage

DESIGNED = {
    "MalformedRequest": 400, "Unauthorized": 401, "BodyTooLarge": 413, "TooManyImages": 413, "ImageTooLarge": 413,
    "UnsupportedMedia": 415, "UnsupportedImage": 415, "UndecodableImage": 422, "QueueFull": 429, "NotReady": 503,
    "DeviceError": 503, "DeadlineExceeded": 504,
}  # fmt: skip


def test_statuses_are_the_documented_ones() -> None:
    by_name = {kind.__name__: status for kind, (status, _, _) in TABLE.items()}
    assert by_name.items() >= DESIGNED.items()


def test_every_service_error_is_in_the_table() -> None:
    own = set(errors.ServiceError.__subclasses__()) | set(errors.Overloaded.__subclasses__())
    assert own - {ImageRefused, errors.Overloaded} <= set(TABLE)


@pytest.mark.parametrize(
    ("cause", "status"), [(UnsupportedImage("x"), 415), (ImageTooLarge("x"), 413), (UndecodableImage("x"), 422)]
)
def test_a_refused_image_is_named(cause: errors.ImageError, status: int) -> None:
    document = problem_of(ImageRefused(3, "a.png", cause)).document
    assert (document.status, document.index, document.filename) == (status, 3, "a.png")
    assert document.detail == "image 3 ('a.png'): x"


def test_a_failed_image_is_named() -> None:
    document = problem_of(errors.InferenceFailed(3, "why")).document
    assert (document.status, document.index, document.detail) == (500, 3, "image 3: why")


def test_headers() -> None:
    assert problem_of(QueueFull("x", retry_after=7)).headers == {"retry-after": "7"}
    assert "www-authenticate" in problem_of(Unauthorized("x")).headers


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret"), MemoryError("secret")])
def test_anything_else_is_opaque(error: Exception) -> None:
    problem = problem_of(error)
    assert problem.document.status == 500
    assert "secret" not in str(problem)


def test_details_and_names_are_shortened() -> None:
    error = ImageRefused(3, "n" * 5000, UndecodableImage("x" * 20_000))
    document = problem_of(error).document
    assert len(document.detail) <= MAX_DETAIL + 3 and len(document.filename or "") <= MAX_DETAIL + 3
    assert document.index == 3
