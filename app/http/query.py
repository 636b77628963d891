"""Parse, validate and document query parameters by a pydantic model."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.errors import MalformedRequest
from psc_core.errors import all_faults, hint, shortened

Query = TypeVar("Query", bound=BaseModel)


def parse_query(model: type[Query], request: Request) -> Query:
    """Parse the query parameters of a request to a route that takes some; those that take none ignore them.

    FastAPI would ignore unknown parameters, and silently take the last value of a repeated one.

    Raises:
        MalformedRequest: If a parameter is unknown, repeated or out of range.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in model.model_fields:
            raise MalformedRequest(f"there is no parameter {shortened(name)}; {hint(name, [*model.model_fields])}")
    if len(set(given)) < len(given):
        raise MalformedRequest(f"give each parameter once, got {', '.join(given)}")
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
