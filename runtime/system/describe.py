"""Checks of single values that a user gave, each failing with one sentence that names the value."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import RequestError

_LARGEST = 2**63 - 1


def show(value: Any) -> str:
    """`value` as a message names it: short, printable, and something even where Python refuses to print it."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits; a class of the user's own may raise anything here
        return f"this {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."


def reject_unknown(keywords: Mapping[str, Any], allowed: list[str], function: str) -> None:
    """RequestError naming the nearest allowed keyword for the first unknown one."""
    for name in keywords:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(allowed)}"
            raise RequestError(f"{function}() has no option {name!r}: {hint}")


def is_integer(value: Any) -> bool:
    """Python's and numpy's integers; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def integer(minimum: int, maximum: int = _LARGEST) -> Callable[[str, Any], int]:
    """A check (name, value) that returns an `int` between the two or raises RequestError."""

    def check(name: str, value: Any) -> int:
        if not is_integer(value) or not minimum <= value <= maximum:
            upper = f" and <= {maximum}" if is_integer(value) and value > maximum else ""
            raise RequestError(f"{name} must be an integer >= {minimum}{upper}, not {show(value)}")
        return int(value)

    return check


def number(allowed: str, fits: Callable[[float], bool]) -> Callable[[str, Any], float]:
    """A check (name, value) that returns a finite `float` for which `fits` or raises RequestError; `allowed` is its wording."""

    def check(name: str, value: Any) -> float:
        result = math.nan
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            try:
                result = float(value)
            except OverflowError:  # an integer beyond the floats
                result = math.inf
        if not math.isfinite(result) or not fits(result):
            raise RequestError(f"{name} must be {allowed}, not {show(value)}")
        return result

    return check
