"""``psc-predict IMAGE...``: ask a running service, print a table or JSON lines.

Ends with 0 when every image was answered, 2 when something the caller can change was wrong (a file, a flag, the
URL, the key, a busy service) in one line on standard error, 1 when the service itself failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

import httpx

from app.client import DEFAULT_URL, Client, ClientError, ImagePrediction, ModelRef, ServerFailed
from psc_core import exit_codes

URL_VARIABLE = "PSC_CLIENT_URL"
KEY_VARIABLE = "PSC_CLIENT_API_KEY"
_COLUMNS = ("image", "label", "confidence", "entropy", "log density", "p-value", "decision")


def main(
    arguments: Sequence[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> int:
    """Run the command; returns the exit code.

    Args:
        arguments: Defaults to the command line.
        environment: Defaults to the process's.
        transport: Replaces the network in tests.
    """
    environment = os.environ if environment is None else environment
    options = parser(environment).parse_args(arguments)
    try:
        with Client(
            options.url,
            api_key=environment.get(KEY_VARIABLE),
            timeout_s=options.timeout,
            transport=transport,
        ) as client:
            _predict(client, options)
    except BrokenPipeError:
        sys.stderr.close()  # The reader has enough; Python would complain while closing standard output.
    except ClientError as error:
        print(f"psc-predict: {error}", file=sys.stderr)
        return exit_codes.FAILURE if isinstance(error, ServerFailed) else exit_codes.BAD_INPUT
    return exit_codes.OK


def parser(environment: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """The command line of ``psc-predict``; the default URL may come from ``environment``."""
    cli = argparse.ArgumentParser(
        prog="psc-predict",
        description="Classify images with a running PSC service and show how far to trust each answer.",
        epilog=f"The API key, where the service wants one, is read from {KEY_VARIABLE}. Exit codes: 0 "
        "all images answered, 2 something you can change (file, flag, URL, key, busy service), 1 the service "
        "failed.",
    )
    cli.add_argument("images", nargs="+", metavar="IMAGE", help="image file: JPEG, PNG, WebP, BMP, GIF, TIFF")
    cli.add_argument(
        "--url",
        default=(environment or {}).get(URL_VARIABLE, DEFAULT_URL),
        help=f"where the service is (default: {URL_VARIABLE}, else {DEFAULT_URL})",
    )
    cli.add_argument("--model", metavar="NAME", help="name of the model (default: the service's default)")
    cli.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    cli.add_argument(
        "--batch-size", type=_positive_int, default=32, metavar="N", help="images per request (default: 32)"
    )
    cli.add_argument(
        "--timeout",
        type=_positive_float,
        default=60.0,
        metavar="SECONDS",
        help="longest time without an answer (default: 60)",
    )
    return cli


def _predict(client: Client, options: argparse.Namespace) -> None:
    rows: list[tuple[str, ...]] = []
    for image, model, prediction in _predictions(client, options):
        if options.json:
            document = {"image": image, "model": model.model_dump(), **prediction.model_dump(exclude_none=True)}
            print(json.dumps(document, ensure_ascii=False), flush=True)
        else:
            rows.append(_row(image, prediction))
    if rows:
        _print_table(rows)


def _predictions(client: Client, options: argparse.Namespace) -> Iterator[tuple[str, ModelRef, ImagePrediction]]:
    for start in range(0, len(options.images), options.batch_size):
        images = options.images[start : start + options.batch_size]
        result = client.predict(images, model=options.model)
        for image, prediction in zip(images, result.predictions, strict=True):
            yield image, result.model, prediction


def _row(image: str, prediction: ImagePrediction) -> tuple[str, ...]:
    return (
        image,
        prediction.label,
        f"{prediction.confidence:.3f}",
        f"{prediction.predictive_entropy:.3f}",
        f"{prediction.log_density:.2f}",
        f"{prediction.ood_p_value:.4f}",
        prediction.decision,
    )


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    text = {0, 1, len(_COLUMNS) - 1}
    for row in (_COLUMNS, *rows):
        cells = [
            cell.ljust(width) if number in text else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
