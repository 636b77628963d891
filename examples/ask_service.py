"""A running service, asked in Python.

    psc-serve --demo                                              (in another terminal)
    python examples/ask_service.py                                (the shipped images, of http://127.0.0.1:8000)
    python examples/ask_service.py http://host:8000 a.png b.png

The client needs httpx and pydantic, and no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from app.client import DEFAULT_URL, ClassificationAnswer, Client, ClientError, Overloaded

SHIPPED = Path(__file__).parents[1] / "artifacts" / "dirty-mnist-resnet18" / "examples"


def what_to_do(prediction: ClassificationAnswer) -> str:
    """What a program does with each decision."""
    if prediction.decision == "accept":
        return f"take {prediction.label}"
    if prediction.decision == "abstain_ambiguous":
        return f"let a person choose among {', '.join(prediction.prediction_set)}"
    return f"do not use the label, the image is like none seen (p-value {prediction.ood_p_value:.3f})"


def main(url: str, images: list[Path]) -> int:
    try:
        with Client(url) as client:  # It waits and tries again where the service is busy.
            answer = client.predict(images)
            bolder = client.predict(images, ambiguity_threshold=1.0)  # A threshold of this request, in nats.
    except Overloaded as error:
        print(f"busy, try again in {error.retry_after_s} s", file=sys.stderr)
        return 1
    except ClientError as error:  # An unreadable image, no service, no key: the message says which.
        print(error, file=sys.stderr)
        return 2
    print(f"{answer.model.name} {answer.model.version}, false alarms at most {answer.policy.alpha:.0%}")
    for image, prediction in zip(images, answer.predictions, strict=True):
        print(f"{image.name}: {what_to_do(prediction)}")
    accepted = [sum(prediction.decision == "accept" for prediction in each.predictions) for each in (answer, bolder)]
    print(f"accepted: {accepted[0]}; with an ambiguity threshold of 1: {accepted[1]}")
    return 0


if __name__ == "__main__":
    given = sys.argv[1:] or [DEFAULT_URL]
    sys.exit(main(given[0], [Path(name) for name in given[1:]] or sorted(SHIPPED.glob("*.png"))))
