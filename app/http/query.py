"""Parse, validate and document query parameters by a pydantic model."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.errors import MalformedRequest
from psc_core.errors import fault, shortened

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
        raise MalformedRequest("; ".join(_fault(item, model.model_fields) for item in error.errors())) from error


def _fault(item: Any, known: Iterable[str]) -> str:
    """Format an error that pydantic found; of an unknown parameter it names the nearest one."""
    if item["type"] != "extra_forbidden":
        return fault(item, "parameter")
    name = str(item["loc"][0])
    nearest = get_close_matches(name, known, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"they are {', '.join(known)}"
    return f"there is no parameter {shortened(name)}; {remedy}"


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return a model's parameters as OpenAPI describes them."""
    return [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]
