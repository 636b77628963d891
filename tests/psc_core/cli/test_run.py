"""The first look at a network, before anything is fitted."""

from __future__ import annotations

from pathlib import Path

import torch

from psc_core.cli.run import first_look
from psc_core.data.dataset import labelled
from psc_core.data.sources import ArraySource
from psc_core.data.spec import open_dataset
from psc_core.fitting.options import FitOptions
from psc_core.images.preprocess import PRESETS


def test_warns_of_validation_images_that_are_prepared_otherwise(tiny_job, data_root: Path) -> None:  # type: ignore[no-untyped-def]
    train, val = (
        open_dataset(f"mnist:{data_root}", split=split, preprocess=PRESETS["mnist"]) for split in ("train", "val")
    )
    turned = torch.cat([batch.images for batch in val.batches(256)])[:, 0].flip(1).numpy()
    others = labelled("turned", val.classes, ArraySource(turned), val.labels, val.preprocess)
    said = first_look(tiny_job.net, train, others, FitOptions(device="cpu"))
    assert "warning: validation images are much harder for it" in said
