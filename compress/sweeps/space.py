"""The values that a sweep tries for one key: a list, or a range of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from compress.recipe.origin import Origin
from compress.recipe.problems import problems_of
from compress.recipe.yaml_source import Path
from runtime.config.messages import show
from runtime.errors import RequestError

MOST = 10_000
"""Largest number of values of one key, and of points of a grid."""
_EXACT = 2**53
"""Integers up to this one are exact as floating-point numbers, in which searches compute."""


def _exact(value: float) -> float:
    if isinstance(value, int) and abs(value) > _EXACT:
        raise ValueError(f"expected an integer between -2^53 and 2^53, got {show(value)}")
    return value


Number = Annotated[int | float, AfterValidator(_exact)]


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def plain(self) -> dict[str, Any]:
        """The mapping that `read_values` reads, without defaults."""
        return self.model_dump(exclude_defaults=True)


class Choices(_Values):
    """A list of values of any kind."""

    choices: list[Any]

    @field_validator("choices")
    @classmethod
    def _differ(cls, values: list[Any]) -> list[Any]:
        if not values:
            raise ValueError("the list is empty; give the values to try")
        seen: set[str] = set()
        for value in values:
            if text_of(value) in seen:
                raise ValueError(f"{show(value)} is given twice")
            seen.add(text_of(value))
        return values

    def grid(self) -> list[Any]:
        """All values, in the order given."""
        return self.choices

    def count(self) -> int | None:
        """Number of values."""
        return len(self.choices)

    def covers(self, older: Values) -> bool:
        """Whether every value of `older` is one of these."""
        return isinstance(older, Choices) and {*map(text_of, older.choices)} <= {*map(text_of, self.choices)}


class Range(_Values):
    """Numbers from `low` to `high`, both included; integers where both and the step are.

    Attributes:
        step: between neighbours; None: 1 for integers, any number between for others.
        log: drawn evenly over their logarithms.
    """

    low: Number
    high: Number
    step: Annotated[Number, Field(gt=0)] | None = None
    log: bool = False

    @model_validator(mode="after")
    def _fit_together(self) -> Range:
        low, high, step = self.low, self.high, self.step
        if high < low:
            raise ValueError(f"low is {low} and high is {high}; expected low to be the smaller one")
        if self.log and (step is not None or low <= 0):
            raise ValueError("log: a logarithmic range has no step and starts above 0")
        if high - low == math.inf:
            raise ValueError("high - low is larger than the largest number; expected a narrower range")
        if step is not None and (high - low) / step >= MOST:
            many = f"{self.count():,}" if (high - low) / step < _EXACT else "more than 2^53"
            raise ValueError(f"{many} values; at most {MOST:,} are allowed")
        if self.integers or all(isinstance(value, float) for value in (low, high, step or 1.0)):
            return self
        floats = {"low": float(low), "high": float(high), "step": None if step is None else float(step)}
        return self.model_copy(update=floats)

    @property
    def integers(self) -> bool:
        """Whether bounds and step are integers, so that all values are."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step or 1))

    @property
    def last(self) -> float:
        """The largest value that is reached."""
        if self.step is None:
            return self.high
        return self.low + self.step * math.floor((self.high - self.low) / self.step + 1e-9)

    def grid(self) -> list[Any] | None:
        """All values; None where they cannot be counted."""
        count = self.count()
        return None if count is None else [self.at(number) for number in range(count)]

    def at(self, number: int) -> Any:
        """The value after `number` steps."""
        value = self.low + number * (self.step or 1)
        return value if self.integers else tidy(value)

    def count(self) -> int | None:
        """Number of values; None for a continuous range."""
        if self.step is None and not self.integers:
            return None
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def covers(self, older: Values) -> bool:
        """Whether `older` is this range, or lies in it on the same steps."""
        if not isinstance(older, Range) or not (self.low <= older.low and older.high <= self.high):
            return False
        if (self.log, self.step, self.integers) != (older.log, older.step, older.integers):
            return False
        apart = (older.low - self.low) / self.step if self.step else 0.0
        return abs(apart - round(apart)) < 1e-9


Values = Choices | Range


def text_of(value: Any) -> str:
    """A value as text that is the same for equal values only: 1, 1.0 and true are three."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def read_values(written: Any, origin: Origin | None = None, path: Path = ()) -> Values:
    """The values written at a key of `vary`.

    Args:
        origin: names the place of the key, whose path is `path`.

    Raises:
        RequestError: anything else than a list, `{choices: [...]}` or `{low, high, step or log}`.
    """
    origin = origin or Origin()
    if not isinstance(written, (list, Mapping)) or written == {}:
        expected = "a list of values, {choices: [...]} or {low: ..., high: ...}"
        raise RequestError(origin.at(path, f"expected {expected}, got {show(written)}"))
    given: Mapping[str, Any] = {"choices": written} if isinstance(written, list) else written
    ranged = len(given) > 1 or Range.model_fields.keys() & given.keys()
    kind = Range if ranged and "choices" not in given else Choices
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        if given is not written:  # the list is empty, or has a value twice
            raise RequestError(origin.at(path, str(error.errors()[0]["ctx"]["error"]))) from None
        raise RequestError("\n".join(problems_of(error, kind, path, origin, given))) from None


def tidy(value: float) -> float:
    """0.1 + 2 * 0.1 as a person writes it."""
    return float(f"{value:.12g}")
