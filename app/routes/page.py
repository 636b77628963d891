"""The page at ``/``: four static files and headers that let the browser run nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request, Response

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Sent with every file: nothing inline, nothing from elsewhere, no framing, revalidate always."""


@dataclass(frozen=True)
class _Asset:
    """A file of the page, read once."""

    content: bytes
    media_type: str
    etag: str


@cache
def _asset(name: str, media_type: str) -> _Asset:
    content = (resources.files("app") / "page" / name).read_bytes()
    return _Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _respond(request: Request, asset: _Asset) -> Response:
    headers = {**SECURITY_HEADERS, "ETag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return _respond(request, _asset("index.html", "text/html"))


@router.get("/page/page.css")
async def style(request: Request) -> Response:
    """Its style."""
    return _respond(request, _asset("page.css", "text/css"))


@router.get("/page/page.js")
async def script(request: Request) -> Response:
    """Its script."""
    return _respond(request, _asset("page.js", "text/javascript"))


@router.get("/page/icon.svg")
async def icon(request: Request) -> Response:
    """Its icon."""
    return _respond(request, _asset("icon.svg", "image/svg+xml"))
