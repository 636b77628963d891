"""Images of a built-in data set side by side, so that its ten classes give a hundred or a thousand.

A strip of two or three images has as its class the sequence of their classes, such as "07".  Four fifths of the classes
of digits are known (``pairs_known``, ``triples_known``), the others are near OOD (``…_unknown``), and strips of another
source are far OOD (``fashion_pairs``, ``cifar10_pairs``, …).  A split has strips of images of that split of the source,
so no digit of a training strip occurs in a validation or test strip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.data import Factory, data_root, keep_classes
from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess

PLACES: Mapping[str, int] = {"pairs": 2, "triples": 3}  # The images of a strip.

# The images of each class by split: 40,000 known training strips, 4,000 known test strips.
PER_CLASS: Mapping[str, Mapping[str, int]] = {
    "pairs": {"train": 500, "val": 50, "test": 50},
    "triples": {"train": 50, "val": 5, "test": 5},
}

KNOWN = 0.8  # The fraction of the classes that a network is trained on.


def known_classes(places: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the known classes of strips of digits, at random, and the others."""
    order = torch.randperm(10**places, generator=torch.Generator().manual_seed(seed))
    known, others = order.split([round(KNOWN * len(order)), len(order) - round(KNOWN * len(order))])
    return known.sort().values.tolist(), others.sort().values.tolist()


def strips(source: ImageDataset, places: int, per_class: int, preprocess: Preprocess, seed: int = 0) -> ImageDataset:
    """Return ``per_class`` strips of every sequence of classes, of random images of each class."""
    images = torch.cat([batch.images[:, 0] for batch in source.batches(4096)])
    labels, generator = source.first_labels(), torch.Generator().manual_seed(seed)
    by_class, sizes = labels.argsort(stable=True), labels.bincount(minlength=len(source.classes))
    numbers = torch.arange(len(source.classes) ** places).repeat_interleave(per_class)
    columns: list[Tensor] = []
    for place in reversed(range(places)):
        of_class = numbers // len(source.classes) ** place % len(source.classes)
        drawn = (torch.rand(len(numbers), generator=generator) * sizes[of_class]).long()
        columns.append(images[by_class[sizes.cumsum(0)[of_class] - sizes[of_class] + drawn]])
    names = [f"{number:0{places}d}" for number in range(len(source.classes) ** places)]
    return label_images(
        f"{source.name}-{places}", names, ArraySource(torch.cat(columns, 2).numpy()), numbers, preprocess
    )


def preprocess_of(data: str) -> Preprocess:
    """Return the preset of digits, as wide as the strips of a data set that is named after them."""
    preset = PRESETS["mnist"]
    return replace(preset, width=preset.width * next((PLACES[word] for word in PLACES if word in data), 1))


def _factory(source: str, kind: str, *, known: bool | None = None) -> Factory:
    def factory(*, split: str, preprocess: Preprocess) -> ImageDataset:
        parts = open_dataset(f"{source}:{data_root()}", split=split, preprocess=PRESETS["mnist"])
        whole = strips(parts, PLACES[kind], PER_CLASS[kind][split], preprocess)
        if known is None:
            return whole
        return keep_classes(whole, known_classes(PLACES[kind])[not known], f"{kind}-{'' if known else 'un'}known")

    return factory


pairs, pairs_known, pairs_unknown = (_factory("mnist", "pairs", known=known) for known in (None, True, False))
triples, triples_known, triples_unknown = (_factory("mnist", "triples", known=known) for known in (None, True, False))
fashion_pairs, cifar10_pairs = (_factory(source, "pairs") for source in ("fashion-mnist", "cifar10"))
fashion_triples, cifar10_triples = (_factory(source, "triples") for source in ("fashion-mnist", "cifar10"))
