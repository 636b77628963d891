"""The target of a regression: one number for each image, with its name and unit."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from psc_core.errors import UsageError, all_faults
from psc_core.names import composed


def _composed(value: Any) -> Any:
    return composed(value) if isinstance(value, str) else value


_Name = Annotated[str, BeforeValidator(_composed)]


class Target(BaseModel):
    """The name and unit of the number that a regression predicts.

    Example:
        >>> str(Target(name="angle", unit="degrees"))
        'angle, degrees'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: _Name = Field(min_length=1, max_length=200, description="Name of the number, as a person would say it.")
    unit: _Name = Field(default="", max_length=50, description="Unit of the number; empty if it has none.")

    @classmethod
    def of(cls, name: Any, unit: Any = "") -> Target:
        """Return the target of a name and a unit that a caller gave; raises :class:`.UsageError` for other values."""
        try:
            return cls(name=name, unit=unit)
        except ValidationError as error:
            raise UsageError(f"the target cannot be called so: {all_faults(error.errors(), 'field')}") from error

    def __str__(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


UNNAMED: Final = Target(name="value")
"""The target of numbers that nobody named."""
