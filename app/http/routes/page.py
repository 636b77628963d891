"""The page at ``/``: static files, and headers that let the browser run nothing else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

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

_FOLDER: Final = Path(str(files("app.http") / "page"))


class PageFiles(StaticFiles):
    """The page's files with :data:`SECURITY_HEADERS`."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(SECURITY_HEADERS)
        return response


def add_to(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files below ``/page``."""
    files_of_page = PageFiles(directory=_FOLDER)
    app.mount("/page", files_of_page)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return await files_of_page.get_response("index.html", request.scope)
