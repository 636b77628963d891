"""The camera has changed: a hundred labelled images bring the false alarms back to their rate, without training.

    python examples/new_camera.py

Prints how many images of the new camera are called out of distribution before and after. Behind a service, psc-log
and psc-recalibrate do the same with the images that it has logged.
"""

from __future__ import annotations

from pathlib import Path

from digits import DATA
from PIL import Image

from psc_core import PRESETS, PSC, open_dataset

psc = PSC.load(Path(__file__).parents[1] / "artifacts" / "dirty-mnist-resnet18")

# The new camera: its black is a little grey.  Yours: ImageFolder("new-camera"), with the names of the classes.
digits = open_dataset(f"mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
seen = [Image.fromarray(digits.image(index)[0]).point(lambda v: 8 + v * 247 // 255) for index in range(200)]
labels = digits.first_labels()[:200].tolist()

again = psc.calibrate(list(zip(seen[:100], labels[:100], strict=True)))

for name, model in (("before", psc), ("after", again)):
    rate = model.predict(seen[100:]).is_ood.float().mean()
    print(f"{name}: {rate:.0%} false alarms, nominal {model.policy.alpha:.0%}")
