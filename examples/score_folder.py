"""A folder of images scored without a service, as psc-score does it: a JSON line for each image.

    python examples/score_folder.py                  (the shipped bundle on its four examples)
    python examples/score_folder.py bundle images    (any bundle; an unreadable image is a row with its error)

Prints the class, the p-value and the decision of each image.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from digits import scratch

from psc_core import load_model
from psc_core.scoring import PartWriter, in_parts, named_images, write_parts

SHIPPED = Path(__file__).parents[1] / "artifacts" / "dirty-mnist-resnet18"
bundle, images = map(Path, sys.argv[1:3]) if len(sys.argv) > 2 else (SHIPPED, SHIPPED / "examples")

scores = scratch()  # Yours to keep: a run that was interrupted goes on where it stopped.
writer = PartWriter(load_model(bundle), scores, "jsonl")  # or "parquet"
for part in write_parts(writer, in_parts(named_images(images), 1024)):
    print(f"{part.images} images, {part.errors} with an error")

for file in sorted(scores.glob("*.jsonl")):
    for row in map(json.loads, file.read_text().splitlines()):
        print(row["item"], row["error"] or f"{row['label']} p={row['ood_p_value']:.3f} {row['decision']}")
