"""Shares as recipes write them."""

from __future__ import annotations

import re
from typing import Any

_PERCENT = re.compile(r"\s*([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*%\s*\Z")


def fraction(value: Any) -> Any:
    """`"10%"` and `0.1` are both 0.1; a bare 10 is more likely a forgotten % than a factor, so it is refused.

    Raises:
        ValueError: a text that is no percentage, or a number above 5.
    """
    if isinstance(value, str):
        match = _PERCENT.match(value)
        if match is None:
            raise ValueError(f"expected a percentage such as 10% or a fraction such as 0.1, got {value!r}")
        return float(match.group(1)) / 100
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 5:
        meant = f"; did you mean {value}%?" if value <= 100 else ""
        raise ValueError(f"expected a percentage such as 10% or a fraction such as 0.1, got {value}{meant}")
    return value
