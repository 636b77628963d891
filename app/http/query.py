"""Parse, validate and document query parameters by a pydantic model."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.errors import MalformedRequest
from psc_core.errors import all_faults, hint, shortened

Query = TypeVar("Query", bound=BaseModel)


async def check_parameters(request: Request) -> None:
    """Refuse query parameters that the route does not describe, or that are repeated; a dependency of the routes.

    FastAPI ignores unknown parameters, and silently takes the last value of a repeated one.

    Raises:
        MalformedRequest: If there is such a parameter.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    described = (request.scope["route"].openapi_extra or {}).get("parameters", ())
    known = [each["name"] for each in described if each["in"] == "query"]
    for name in given:
        if name not in known:
            remedy = hint(name, known) if known else "leave it out"
            raise MalformedRequest(f"there is no parameter {shortened(name)}; {remedy}")
    if len(set(given)) < len(given):
        raise MalformedRequest(f"give each parameter once, got {', '.join(given)}")


def parse_query(model: type[Query], request: Request) -> Query:
    """Parse the query parameters of a request, whose names :func:`check_parameters` has checked.

    Raises:
        MalformedRequest: If a value is out of range.
    """
    try:
        return model.model_validate_strings(dict(request.query_params))
    except ValidationError as error:
        raise MalformedRequest(all_faults(error.errors(), "parameter")) from error


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return a model's parameters as OpenAPI describes them."""
    return [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]
