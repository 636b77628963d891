"""The images that clients send: PNG digits, and JPEG files of the size of photographs."""

from __future__ import annotations

import io
import random
import tarfile

from PIL import Image

from benchmarks.runs import ROOT
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS

DATA = ROOT / "tests" / "data"
SIDE, WIDTH, HEIGHT, QUALITY = 32, 640, 480, 83


def digits(count: int) -> list[bytes]:
    """Return real digits of 28 × 28 pixels as PNG files."""
    data = open_dataset(f"mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
    images = [Image.fromarray(data.image(index)[0]) for index in range(min(count, len(data)))]
    return [_encoded(image, format="PNG") for image in images]


def photographs(count: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> list[bytes]:
    """Return JPEG files of 640 × 480, 4:2:0 and about 100 kB: mosaics of 300 real CIFAR-10 images in random order.

    ``size`` sets another width and height, multiples of :data:`SIDE`.

    They stand for photographs, none of which we have with a licence to ship it: a decoder's time depends on the numbers
    of pixels and bytes, which are those of a photograph.
    """
    with tarfile.open(DATA / "cifar10-jpeg.tar.gz") as archive:
        files = [archive.extractfile(member) for member in archive.getmembers()]
        tiles = [Image.open(io.BytesIO(file.read())).convert("RGB") for file in files if file is not None]
    places = [(left, top) for top in range(0, size[1], SIDE) for left in range(0, size[0], SIDE)]
    order = random.Random(0)
    photos = []
    for _ in range(count):
        mosaic = Image.new("RGB", size)
        for place, tile in zip(places, order.sample(tiles, len(places)), strict=True):
            mosaic.paste(tile, place)
        photos.append(_encoded(mosaic, format="JPEG", quality=QUALITY, subsampling="4:2:0"))
    return photos


def _encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)  # type: ignore[arg-type]
    return buffer.getvalue()
