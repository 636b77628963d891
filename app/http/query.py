"""Parse, validate and document query parameters by a pydantic model."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.errors import MalformedRequest
from psc_core.errors import all_faults

Query = TypeVar("Query", bound=BaseModel)


def parse_query(model: type[Query], request: Request) -> Query:
    """Parse the query parameters of a request.

    FastAPI's own ``Query()`` is slower, and silently takes the last value of a repeated parameter.

    Raises:
        MalformedRequest: If a parameter is unknown or repeated, or its value is out of range.
    """
    items = request.query_params.multi_items()
    values = dict(items)
    if len(values) < len(items):
        raise MalformedRequest(f"give each parameter once, got {', '.join(name for name, _ in items)}")
    try:
        return model.model_validate_strings(values)
    except ValidationError as error:
        raise MalformedRequest(all_faults(error.errors(), "parameter")) from error


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return a model's parameters as OpenAPI describes them."""
    return [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]
