"""The values that a sweep tries for one key: a list, or a range of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.recipe.problems import show
from runtime.config.messages import did_you_mean, listing

MOST = 10_000
"""Largest number of values of one key, and of points of a grid."""
_EXACT = 2**53
"""Integers up to this one are exact as floating-point numbers, in which searches compute."""

_RANGE_KEYS = ("low", "high", "step", "log")


@dataclass(frozen=True)
class Choices:
    """A list of values of any kind."""

    values: tuple[Any, ...]

    def grid(self) -> list[Any]:
        """All values, in the order given."""
        return list(self.values)

    def count(self) -> int | None:
        """Number of values."""
        return len(self.values)

    def covers(self, older: Values) -> bool:
        """Whether every value of `older` is one of these."""
        return isinstance(older, Choices) and {text_of(v) for v in older.values} <= {text_of(v) for v in self.values}

    def plain(self) -> dict[str, Any]:
        """The mapping that `read_values` reads."""
        return {"choices": list(self.values)}


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers where both and the step are.

    Attributes:
        step: between neighbours; None: 1 for integers, any number between for others.
        log: drawn evenly over their logarithms.
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False

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

    def plain(self) -> dict[str, Any]:
        """Bounds, step and scale as in a sweep file, without defaults."""
        given = {"low": self.low, "high": self.high, "step": self.step, "log": self.log or None}
        return {key: value for key, value in given.items() if value is not None}


Values = Choices | Range


def text_of(value: Any) -> str:
    """A value as text that is the same for equal values only: 1, 1.0 and true are three."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def read_values(written: Any) -> Values:
    """The values written at a key of `vary`.

    Raises:
        ValueError: anything else than a list, `{choices: [...]}` or `{low, high, step or log}`, in words that follow the key.
    """
    if isinstance(written, Mapping) and written:
        allowed: tuple[str, ...] = ("choices",) if "choices" in written else _RANGE_KEYS
        if not set(written) & set(allowed):
            allowed = ("choices", *_RANGE_KEYS)
        unknown = next((key for key in written if key not in allowed), None)
        if unknown is not None:
            raise ValueError(
                f"unknown key '{unknown}'{did_you_mean(unknown, allowed) or '.'} Allowed: {listing(allowed)}"
            )
        if "choices" not in written:
            return _range(written)
        written = written["choices"]
    if not isinstance(written, list):
        raise ValueError(
            f"expected a list of values, {{choices: [...]}} or {{low: ..., high: ...}}, got {show(written)}"
        )
    if not written:
        raise ValueError("the list is empty; give the values to try")
    seen: set[str] = set()
    for value in written:
        if text_of(value) in seen:
            raise ValueError(f"{show(value)} is given twice")
        seen.add(text_of(value))
    return Choices(tuple(written))


def _range(written: Mapping[str, Any]) -> Range:
    for key in ("low", "high"):
        if key not in written:
            raise ValueError(f"a range needs low and high, and '{key}' is missing")
    for key in ("low", "high", "step"):
        value = written.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
            raise ValueError(f"{key}: expected a number, got {show(value)}")
        if isinstance(value, int) and abs(value) > _EXACT:
            raise ValueError(f"{key}: expected an integer between -2^53 and 2^53, got {show(value)}")
    low, high, step, log = written["low"], written["high"], written.get("step"), written.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"log: expected true or false, got {show(log)}")
    if high < low:
        raise ValueError(f"low is {low} and high is {high}; expected low to be the smaller one")
    if step is not None and step <= 0:
        raise ValueError(f"step: expected a number above 0, got {step}")
    if log and (step is not None or low <= 0):
        raise ValueError("log: a logarithmic range has no step and starts above 0")
    found = Range(low, high, step, log)
    if not found.integers:
        found = Range(float(low), float(high), None if step is None else float(step), log)
    if found.high - found.low == math.inf:
        raise ValueError("high - low is larger than the largest number; expected a narrower range")
    if found.step is not None and (found.high - found.low) / found.step >= MOST:
        steps = (found.high - found.low) / found.step
        many = f"{found.count():,}" if steps < _EXACT else "more than 2^53"
        raise ValueError(f"{many} values; at most {MOST:,} are allowed")
    return found


def tidy(value: float) -> float:
    """0.1 + 2 * 0.1 as a person writes it."""
    return float(f"{value:.12g}")
