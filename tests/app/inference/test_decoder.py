"""Requests take turns in the decode pool: seen with a queue and a clock that the test moves by hand."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from app.errors import ImageRefused, TooManyPixels
from app.inference import decoder as module
from app.inference.decoder import Decoder, EncodedImage, fingerprints
from app.memory import MemoryBudget
from app.settings import load_settings
from psc_core.errors import UndecodableImage
from psc_core.images.preprocess import PRESETS
from tests.app.inference.support import decoder_on
from tests.encoded import encode

pytestmark = pytest.mark.anyio


class Opened(NamedTuple):
    data: bytes
    cost: int = 1

    def memory_bytes(self, mode: str) -> int:
        return 8


class Hands:
    """A pool without threads, a clock, and a preprocessing that says what it decoded: of ``x`` ``x0``, ``x1``, …"""

    shape = 1, 1, 1
    mode = "L"

    def __init__(self, threads: int) -> None:
        self.now = 0.0
        self.seconds = 1.0
        self.seen: list[str] = []
        self.answers: dict[str, Any] = {}
        self.unwanted: set[str] = set()
        self.submitted = 0
        self.closed = False
        self._pieces: deque[Callable[[], Any]] = deque()
        limits = {"max_pixels": 9, "max_pixels_per_request": 1000, "inline_decode_bytes": 0}
        settings = load_settings({"decode_threads": threads, **limits})
        memory = MemoryBudget(1 << 30, 1 << 40, max_pixels=10_000)
        self._decoder = Decoder(self, memory, self, settings)  # type: ignore[arg-type]

    def submit(self, run: Callable[..., Any], *arguments: Any) -> None:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.submitted += 1
        self._pieces.append(lambda: run(*arguments))

    def open(self, data: bytes, *, max_pixels: int) -> Opened:
        return Opened(data)

    def from_file(self, image: Opened) -> npt.NDArray[np.uint8]:
        data = image.data
        self.now += self.seconds
        self.seen.append(data.decode())
        if data.endswith(b"!"):
            raise UndecodableImage("damaged")
        return np.full((1, 1, 1), int(data[1:]) % 256, np.uint8)

    def ask(self, name: str, count: int, *, bad: tuple[int, ...] = ()) -> None:
        def finished(images: npt.NDArray[np.uint8], error: Exception | None) -> None:
            assert name not in self.answers
            self.answers[name] = error or images.ravel().tolist()

        uploads = [EncodedImage(f"{name}{k}{'!' if k in bad else ''}".encode(), f"{k}.png") for k in range(count)]
        self._decoder.decode_later(uploads, is_wanted=lambda: name not in self.unwanted, on_done=finished)

    def step(self) -> None:
        self._pieces.popleft()()

    def run(self) -> None:
        while self._pieces:
            self.step()


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hands]:
    def make(threads: int = 1) -> Hands:
        made = Hands(threads)
        monkeypatch.setattr(module, "perf_counter", lambda: made.now, raising=False)
        monkeypatch.setattr(module, "open_image", made.open)
        return made

    return make


def test_a_single_image_does_not_wait_for_all_of_a_large_request(hands: Callable[..., Hands]) -> None:
    pool = hands()
    pool.ask("a", 4)
    pool.ask("b", 3)
    pool.ask("c", 1)
    pool.run()
    assert pool.seen == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3"]
    assert pool.answers == {"a": [0, 1, 2, 3], "b": [0, 1, 2], "c": [0]}


def test_later_request_waits_for_one_image_of_each_piece(hands: Callable[..., Hands]) -> None:
    pool = hands(threads=2)
    pool.ask("a", 10)
    pool.step()
    pool.ask("b", 1)
    pool.run()
    assert pool.seen[:4] == ["a0", "a5", "a1", "b0"]
    assert pool.answers == {"a": list(range(10)), "b": [0]}


def test_small_images_share_a_turn(hands: Callable[..., Hands]) -> None:
    """Guards against a hop for each of five hundred tiny images."""
    pool = hands(threads=2)
    pool.seconds = module.TURN_SECONDS / 50
    pool.ask("a", 500)
    pool.run()
    assert 10 <= pool.submitted <= 12
    pool.submitted, pool.seconds = 0, 0.0
    pool.ask("b", 500)
    pool.run()
    assert pool.submitted == 2
    assert pool.answers["a"] == pool.answers["b"] == [k % 256 for k in range(500)]


def test_the_first_bad_image_is_named_whatever_the_order_of_decoding(hands: Callable[..., Hands]) -> None:
    pool = hands(threads=2)
    pool.ask("a", 10, bad=(4, 5))
    pool.run()
    assert pool.seen == ["a0", "a5!", "a1", "a2", "a3", "a4!"]
    error = pool.answers["a"]
    assert isinstance(error, ImageRefused)
    assert "image 4" in str(error)


@pytest.mark.parametrize("threads", [1, 2])
def test_decoding_ends_where_a_request_has_too_many_pixels(hands: Callable[..., Hands], threads: int) -> None:
    pool = hands(threads)
    pool.ask("a", 1000)
    pool.ask("b", 2000)
    pool.run()
    assert pool.answers["a"] == [k % 256 for k in range(1000)]
    assert isinstance(pool.answers["b"], TooManyPixels)
    assert "max_pixels_per_request" in str(pool.answers["b"])
    assert sum(name.startswith("b") for name in pool.seen) == 1000


def test_unwanted_request_is_not_decoded(hands: Callable[..., Hands]) -> None:
    pool = hands(threads=2)
    pool.ask("a", 10)
    for _ in range(3):
        pool.step()
    pool.unwanted.add("a")
    pool.run()
    assert pool.seen == ["a0", "a5", "a1"]
    assert "a" in pool.answers


@pytest.mark.parametrize(("background", "level"), [("black", 0), ("white", 255), ("none", 7)])
def test_alpha_is_blended_as_the_model_says(background: str, level: int) -> None:
    image = Image.new("LA", (28, 28), (7, 0))
    image.putpixel((0, 0), (7, 255))
    answered: list[npt.NDArray[np.uint8]] = []
    uploads = [EncodedImage(encode(image))]
    with ThreadPoolExecutor(1) as pool:
        preprocess = replace(PRESETS["mnist"], background=background)
        decoder = decoder_on(pool, threads=1, inline_bytes=1 << 20, preprocess=preprocess)
        at_once = decoder.decode_now(uploads)
        decoder.decode_later(uploads, is_wanted=lambda: True, on_done=lambda images, _: answered.append(images))
    for images in (at_once, *answered):
        assert images is not None and images.ravel()[0] == 7 and (images.ravel()[1:] == level).all()
    assert len(answered) == 1


def test_a_pool_that_is_closed_finishes_what_it_began(hands: Callable[..., Hands]) -> None:
    pool = hands(threads=2)
    pool.ask("a", 6)
    pool.step()
    pool.closed = True
    pool.run()
    assert pool.answers == {"a": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("repeated", [1, 300_000])
async def test_identical_files_and_no_others_are_equal(repeated: int) -> None:
    first, again, other = await fingerprints(
        [EncodedImage(b"abc" * repeated), EncodedImage(b"abc" * repeated, "b.png"), EncodedImage(b"abd" * repeated)]
    )
    assert first == again != other


@pytest.mark.parametrize("size", [8, 800])
async def test_identical_pixels_and_no_others_are_equal(size: int) -> None:
    images = np.zeros((3, 1, size, size), np.uint8)
    images[2, 0, -1, -1] = 1
    first, again, other = await fingerprints(images)
    assert first == again != other
    assert await fingerprints(images[::-1]) == [other, again, first]
