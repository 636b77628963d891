"""Labelled images from folders, named data sets and factories, streamed in batches."""

from typing import Final

MAX_BAD_IMAGES: Final = 10  # default maximum number of images that are left out because they cannot be decoded
