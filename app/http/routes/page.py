"""Serve the pages at ``/`` and ``/docs``, with headers that let the browser run nothing but their own files.

Swagger UI comes from the package fastapi-offline, so that the browser asks no other host.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from app.http.openapi import get_and_head

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""The headers of every file: nothing inline, nothing from elsewhere, no framing, always revalidate."""

_FOLDER: Final = Path(str(files("app.http") / "page"))
_SWAGGER: Final = Path(str(files("fastapi_offline") / "static"))


class PageFiles(StaticFiles):
    """Static files that are sent with :data:`SECURITY_HEADERS`."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(SECURITY_HEADERS)
        return response


def add_to(app: FastAPI, *, index: bool) -> None:
    """Serve Swagger UI at ``/docs`` and, with ``index``, the page at ``/``.

    The files have routes of their own, because a mount does not find them behind a proxy that strips a prefix.
    """
    page_files, swagger = PageFiles(directory=_FOLDER), PageFiles(directory=_SWAGGER)

    @app.get("/page/{file}", include_in_schema=False)
    async def page_file(request: Request, file: str) -> Response:
        return await page_files.get_response(file, request.scope)

    @app.get("/docs-assets/{file}", include_in_schema=False)
    async def swagger_file(request: Request, file: str) -> Response:
        return await swagger.get_response(file, request.scope)

    @get_and_head(app, "/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return await page_files.get_response("docs.html", request.scope)

    @app.get("/redoc", include_in_schema=False)
    async def redoc() -> Response:
        return RedirectResponse("docs")  # ReDoc needs inline styles, which the headers forbid.

    if index:

        @get_and_head(app, "/", include_in_schema=False)
        async def page(request: Request) -> Response:
            return await page_files.get_response("index.html", request.scope)
