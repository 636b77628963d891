"""Upper bounds for every server: the device step alone, decoding alone.  Each runs in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

SIZES = (1, 2, 4, 8, 16, 32, 64)


def bare_step(bundle: Path, seconds: float, device: str) -> dict[str, Any]:
    """Milliseconds of a device step by batch size, as the service runs it; sizes take turns.

    Args:
        bundle: The model.
        seconds: Duration of the measurement.
        device: cpu or cuda.
    """
    import torch

    from app.inference.steps import make_step
    from benchmarks.serving.adapters.settings import FACTORY, MAX_BATCH
    from psc_core.compute.allocator import keep_freed_memory
    from psc_core.model.predictor import PSC

    keep_freed_memory()
    psc = PSC.load(bundle, device=device, allow_factories=[FACTORY])
    size = psc.preprocess
    step = make_step(
        psc.pipeline,
        (size.channels, size.height, size.width),
        max_batch=MAX_BATCH,
        device=psc.device,
        compiled=False,
    )
    step.input(0)[:] = torch.randint(0, 256, step.input(0).shape, dtype=torch.uint8).numpy()
    step.warm_up()
    times: dict[int, list[float]] = {count: [] for count in SIZES}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not times[SIZES[-1]]:
        for count in SIZES:
            began = time.perf_counter()
            step.launch(0, count)
            step.fetch(0, count)
            times[count].append(time.perf_counter() - began)
    return {
        "threads": torch.get_num_threads(),
        "step_ms": {str(count): round(1000 * statistics.median(found), 4) for count, found in times.items()},
        "steps_of_each": len(times[1]),
    }


def images_per_s(step_ms: Mapping[str, float], size: float) -> float:
    """Images/s of the bare step at a mean batch size; step times are interpolated linearly between measured sizes."""
    points = sorted((int(count), value) for count, value in step_ms.items())
    size = min(max(size, points[0][0]), points[-1][0])
    for (low, low_ms), (high, high_ms) in pairwise(points):
        if size <= high:
            return 1000 * size / (low_ms + (high_ms - low_ms) * (size - low) / (high - low))
    raise AssertionError("unreachable: size is clipped to the largest")


def best_images_per_s(step_ms: Mapping[str, float]) -> float:
    """Images/s of the bare step at its best batch size."""
    return max(1000 * int(count) / value for count, value in step_ms.items())


def decode_only(bundle: Path, images: Sequence[bytes], seconds: float) -> float:
    """Images/s of the service's decoder with single images, on one core."""
    from app.inference.decoder import Decoder, EncodedImage
    from app.settings import Settings
    from benchmarks.serving.adapters.settings import FACTORY
    from psc_core.model.predictor import PSC

    settings = Settings()
    preprocess = PSC.load(bundle, device="cpu", allow_factories=[FACTORY]).preprocess
    with ThreadPoolExecutor(1) as pool:
        decoder = Decoder(
            pool,
            threads=1,
            preprocess=preprocess,
            max_pixels=settings.max_pixels,
            inline_bytes=settings.inline_decode_bytes,
        )
        uploads = [[EncodedImage(image)] for image in images]
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for upload in uploads:
                decoder.decode_now(upload)
            count += len(uploads)
        return round(count / (time.perf_counter() - began), 1)
