"""Why an image was rejected, and where it is unusual: the checks and the map.

    python examples/why_rejected.py                       (the shipped bundle on its four examples)
    python examples/why_rejected.py bundle a.jpg b.jpg    (any bundle of psc-fit)

Prints for each image the decision and the p-value of each check, and of a rejected one its most unusual region.  A
bundle may lack checks or the map.
"""

from __future__ import annotations

import sys
from pathlib import Path

from psc_core import PSC
from psc_core.maps import box_of

SHIPPED = Path(__file__).parents[1] / "artifacts" / "dirty-mnist-resnet18"
bundle = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
images = [Path(name) for name in sys.argv[2:]] or sorted((bundle / "examples").glob("*.png"))

MEANING = {
    "texture": "unusual texture",
    "content": "unknown content",
    "confidence": "no class stands out",
    "reviewed": "like images reviewed as none of the classes",
}

psc = PSC.load(bundle)
prediction = psc.predict(images, maps=psc.pipeline.map is not None)
for index, (image, decision) in enumerate(zip(images, prediction.decision, strict=True)):
    checks = {name: float(p_values[index]) for name, p_values in prediction.checks.items()}
    print(", ".join([f"{image.name}: {decision}", *(f"{name} p={p:.3f}" for name, p in checks.items())]))
    if decision == "abstain_ood":
        reasons = [MEANING[min(checks, key=checks.__getitem__)] if checks else "unlike the training images"]
        if prediction.maps is not None:
            left, top, right, bottom = box_of(prediction.maps[index].numpy())  # Fractions of width and height.
            reasons.append(f"most unusual {left:.0%} to {right:.0%} across, {top:.0%} to {bottom:.0%} down")
        print("   ", ", ".join(reasons))
