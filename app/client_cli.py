"""``psc-predict IMAGE...``: ask a running service about images, and print a table or JSON lines.

Each image has a line, with its answer or its error; an error that concerns every image is one line on standard error.
The exit code is 0 if every image was answered, 2 if the caller can mend what went wrong (a file, a flag, the URL, the
key, a busy service), and 1 if the service itself failed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from app.client import DEFAULT_URL, Client, ClientError, InputError, ModelRef, Refused, ServerFailed
from psc_core import __version__
from psc_core.answers import BaseAnswer, Response
from psc_core.errors import DataError, ExitCode
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below
from psc_core.settings import positive, positive_number
from psc_core.text import align, in_one_line, print_any_text

URL_VARIABLE = "PSC_CLIENT_URL"
KEY_VARIABLE = "PSC_CLIENT_API_KEY"


def main(
    arguments: Sequence[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> int:
    """Run the command and return its exit code; arguments and environment are by default those of this process."""
    environment = os.environ if environment is None else environment
    options = parser(environment).parse_args(arguments)
    print_any_text()
    try:
        with Client(
            options.url, api_key=environment.get(KEY_VARIABLE), timeout_s=options.timeout, transport=transport
        ) as client:
            failed = predict(client, options)
    except BrokenPipeError:
        # The reader, such as head, has enough; Python would print an error when it flushes standard output at exit.
        sys.stderr.close()
        return ExitCode.OK
    except ClientError as error:
        print(in_one_line(f"psc-predict: {error}"), file=sys.stderr)
        return ExitCode.FAILURE if isinstance(error, ServerFailed) else ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print("psc-predict: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    if failed:
        print(f"psc-predict: {failed} of the images could not be answered", file=sys.stderr)
    return ExitCode.BAD_INPUT if failed else ExitCode.OK


def parser(environment: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line; the default URL may come from ``environment``."""
    cli = argparse.ArgumentParser(
        prog="psc-predict",
        description="Ask a running PSC service about images and show how far to trust each answer.",
        epilog=f"The API key, if the service wants one, is read from {KEY_VARIABLE}. Exit codes: 0 all images "
        "answered, 2 something you can change (file, flag, URL, key, busy service), 1 the service failed.",
    )
    cli.add_argument("--version", action="version", version=f"psc {__version__}")
    cli.add_argument("images", nargs="+", metavar="IMAGE", help="image file: JPEG, PNG, WebP, BMP, GIF, TIFF")
    cli.add_argument("-r", "--recursive", action="store_true", help="ask about all images below a folder")
    text = f"URL of the service (default: {URL_VARIABLE}, else {DEFAULT_URL})"
    cli.add_argument("--url", default=(environment or {}).get(URL_VARIABLE, DEFAULT_URL), help=text)
    cli.add_argument("--model", metavar="NAME", help="name of the model (default: the service's default model)")
    text = "folder for a grey PNG of each image, NUMBER-FILE.png, brighter where it is more unusual"
    cli.add_argument("--maps", type=Path, metavar="DIR", help=text)
    text = "keep the images out of the service's drift monitor and metrics, for example in a test"
    cli.add_argument("--no-monitor", action="store_true", help=text)
    cli.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    text = "number of images per request (default: 32)"
    cli.add_argument("--batch-size", type=positive, default=32, metavar="N", help=text)
    text = "longest time without progress of an attempt, of which there are at most 4 (default: 60)"
    cli.add_argument("--timeout", type=positive_number, default=60.0, metavar="SECONDS", help=text)
    return cli


def predict(client: Client, options: argparse.Namespace) -> int:
    """Print a line for each image, and return how many could not be answered; an error that concerns all is raised."""
    rows: list[tuple[str, Mapping[str, str] | ClientError]] = []
    failed = 0
    try:
        images = list(files(options.images, options.recursive))
        for number, (image, outcome) in enumerate(outcomes(client, images, options)):
            failed += isinstance(outcome, ClientError)
            if options.maps is not None and isinstance(outcome, Answered):
                _write_map(outcome, options.maps / f"{number:05d}-{Path(image).stem}.png")
            if options.json:
                print(json.dumps({"image": image, **_document(outcome)}, ensure_ascii=False), flush=True)
            else:
                rows.append((image, outcome if isinstance(outcome, ClientError) else outcome.prediction.cells()))
    finally:
        if rows:
            _print_table(rows)
    return failed


def files(names: Sequence[str], recursive: bool) -> Iterator[str]:
    """Yield the named images; with ``recursive``, the images below a folder, at least one, in place of it."""
    for name in names:
        if not (recursive and Path(name).is_dir()):
            yield name
            continue
        try:
            found = sorted(path for path in files_below(name) if path.lower().endswith(SUFFIXES))
        except DataError as error:
            raise InputError(str(error)) from error
        if not found:
            raise InputError(f"{name} has no images ({', '.join(SUFFIXES)}); name another folder")
        yield from found


def outcomes(client: Client, images: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Outcome]]:
    """Yield each image with its prediction, or with the error that concerns it alone."""
    with_map = options.maps is not None
    ask = partial(client.ask, model=options.model, explain=with_map, map=with_map, monitor=not options.no_monitor)
    for start in range(0, len(images), options.batch_size):
        batch = images[start : start + options.batch_size]
        yield from zip(batch, _batch(ask, batch), strict=True)


def _batch(ask: Callable[[Sequence[str]], Response], images: Sequence[str]) -> Iterator[Outcome]:
    """Ask about a batch; ask again without an image at fault, and in halves if the body is too large."""
    left: list[Sequence[str] | ClientError] = [images]  # A stack: the next part is the last.
    while left:
        part = left.pop()
        if isinstance(part, ClientError):
            yield part
        elif part:
            try:
                answer = ask(part)
            except ClientError as error:
                left += reversed(_without_fault(part, error))
            else:
                yield from (Answered(answer.model, prediction) for prediction in answer.predictions)


def _without_fault(images: Sequence[str], error: ClientError) -> list[Sequence[str] | ClientError]:
    """Return the images to send again after an error, with the error in place of the image at fault.

    An error that concerns every image is raised.
    """
    at = error.index
    if at is not None and at < len(images):
        return [images[:at], error, images[at + 1 :]]
    if not (isinstance(error, Refused) and error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        raise error
    half = len(images) // 2
    return [images[:half], images[half:]] if half else [error]


class Answered(NamedTuple):
    """An image's prediction and the model that made it."""

    model: ModelRef
    prediction: BaseAnswer


Outcome = Answered | ClientError


def _write_map(outcome: Answered, file: Path) -> None:
    prediction: Any = outcome.prediction  # The predictions of every task have an explanation, but their base does not.
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(prediction.explanation.map.png))
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}; choose another folder for --maps") from error


def _document(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, ClientError):
        return {"error": _reason(outcome)}
    return {"model": outcome.model.model_dump(), **outcome.prediction.model_dump(exclude_none=True)}


def _reason(error: ClientError) -> str:
    """Return an error without the position of its image in the request, which the user did not see."""
    where, named = f"image {error.index}", f"image {error.index} ({getattr(error, 'filename', None)!r})"
    return str(error).replace(f"{named}: ", "").replace(f"{where}: ", "")


def _print_table(rows: Sequence[tuple[str, Mapping[str, str] | ClientError]]) -> None:
    """Print a line for each image: its cells under their titles, or its error."""
    titles = list(dict.fromkeys(title for _, cells in rows if not isinstance(cells, ClientError) for title in cells))
    table = [["image", *titles]]
    for image, cells in rows:
        table.append([image, *([] if isinstance(cells, ClientError) else (cells.get(title, "") for title in titles))])
    names = max(len(row[0]) for row in table)
    head, *lines = align(table, left={0, 1, len(titles)})  # The other columns are numbers.
    if titles:
        print(in_one_line(head))
    for line, (_, cells) in zip(lines, rows, strict=True):
        shown = f"{line:<{names}}  error: {_reason(cells)}" if isinstance(cells, ClientError) else line
        print(in_one_line(shown))


if __name__ == "__main__":
    sys.exit(main())
