"""Recover from a batch that failed on the device.

If the device is out of memory, the batch runs again in halves.  After any other error, a blank image runs.  If that
works, the batch runs again in halves until the image at fault is alone, and only its request fails.  If that fails
too, the device is dead: :class:`DeviceError` is raised, and the worker ends every request.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from app.errors import InferenceFailed
from app.inference.queue import RequestQueue
from app.inference.request import DeviceBatch
from app.inference.steps.base import Step, is_out_of_memory, run_batch
from psc_core.errors import DeviceError

logger = logging.getLogger("psc.device")


def run_halves(queue: RequestQueue, step: Step, batch: DeviceBatch, error: Exception) -> None:
    """Run a failed batch again in halves; a half that fails is cut in halves again.

    Raises:
        DeviceError: If the device is dead.
    """
    if is_out_of_memory(error):
        logger.warning("out of device memory with %d images; trying halves", batch.size)
        step.release_memory()
    else:
        logger.exception("a batch of %d images failed", batch.size, exc_info=error)
        check_device(step)
    if batch.size == 1:
        alone = batch.slices[0]
        failure: Exception = InferenceFailed(alone.start, "the network failed on this image; it was logged")
        if is_out_of_memory(error):
            failure = DeviceError("the device has no memory for one image; try again")
        with queue as batcher:
            batcher.fail(alone.request, failure)
        return
    for half in batch.halves():
        alive = half.alive()
        if not alive.size:
            continue
        try:
            result = run_batch(step, alive)
        except Exception as next_error:
            run_halves(queue, step, alive, next_error)
        else:
            with queue as batcher:
                batcher.complete(alive, result, now=time.monotonic())


def check_device(step: Step) -> None:
    """Check the device by running one blank image.

    Raises:
        DeviceError: If the device is dead.
    """
    try:
        step.input(0)[:1] = 0
        step.launch(0, 1)
        packed = step.fetch(0, 1)
    except Exception as error:
        if is_out_of_memory(error):  # Having no memory for now does not mean that the device is dead.
            step.release_memory()
            return
        raise DeviceError(f"a blank image failed on the device ({type(error).__name__})") from error
    if not np.isfinite(packed).all():
        raise DeviceError("a blank image gave outputs that are not finite")
