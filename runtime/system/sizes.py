"""Byte counts: read as users write them, and put into words."""

from __future__ import annotations

import re
from typing import Any

from runtime.errors import RequestError
from runtime.system.describe import is_integer, show

_LARGEST = 2**63 - 1
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def byte_count(name: str, value: Any) -> int:
    """Bytes of the option `name`: 2_000_000_000, "2GB" or "1.5 GiB".

    Raises:
        RequestError: it is none, less than a byte, or more than there is.
    """
    amount: float = 0
    if is_integer(value):
        amount = int(value)
    elif isinstance(value, str) and (match := _TEXT.fullmatch(value)) and match[2].upper() in _UNITS:
        amount = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= amount <= _LARGEST:
        raise RequestError(f"{name} must be a number of bytes or a text like '2GB' or '1.5GiB', not {show(value)}")
    return int(amount)


def size(count: float) -> str:
    """Bytes in words: `12.3 MB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
