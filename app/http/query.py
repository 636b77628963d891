"""Query parameters declared as a pydantic model: parsed, validated and documented by it."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.errors import MalformedRequest
from psc_core.errors import all_faults

Query = TypeVar("Query", bound=BaseModel)


def parse_query(model: type[Query], request: Request) -> Query:
    """The query parameters of a request.

    FastAPI's own ``Query()`` is slower, and takes the last of a repeated parameter.

    Raises:
        MalformedRequest: An unknown or repeated parameter, or a value out of range.
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
    """The parameters of a model as OpenAPI describes them."""
    return [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]
