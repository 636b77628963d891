"""Adapt Starlette's allow-lists of hosts and origins to this service."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.http.middleware.limits import is_probe
from app.http.problems import MEDIA_TYPE, make_problem


class HostAllowList(TrustedHostMiddleware):
    """The allow-list of hosts; probes, which name an address, and gRPC, which no web page speaks, are exempt."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope.get("scheme") == "grpc" or is_probe(scope["path"])):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class ProblemCORS(CORSMiddleware):
    """Starlette's CORS, except that a refused preflight request is answered with a problem document."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != HTTPStatus.BAD_REQUEST:
            return response
        detail = f"{bytes(response.body).decode()}; allow it with the setting cors_origins"
        problem = make_problem((response.status_code, "cors", "Cross-origin request refused"), detail)
        del response.headers["content-length"], response.headers["content-type"]
        body = problem.document.model_dump_json(exclude_none=True).encode()
        return Response(body, response.status_code, dict(response.headers), media_type=MEDIA_TYPE)
