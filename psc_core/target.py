"""The target of a regression: one number for each image, with its name and unit."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field


class Target(BaseModel):
    """The name and unit of the number that a regression predicts.

    Example:
        >>> str(Target(name="angle", unit="degrees"))
        'angle, degrees'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=200, description="Name of the number, as a person would say it.")
    unit: str = Field(default="", max_length=50, description="Unit of the number; empty if it has none.")

    def __str__(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


UNNAMED: Final = Target(name="value")
"""The target of numbers that nobody named."""
