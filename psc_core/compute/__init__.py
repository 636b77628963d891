"""Devices, processes, progress, and the one loop that runs a network over a data set."""

from typing import Final

BATCH_IMAGES: Final = 256
"""Default number of images that pass through the network at once."""

MAX_MEMORY: Final = 1 << 30
"""Default budget of one stage's statistics and the features of a batch, bytes."""
