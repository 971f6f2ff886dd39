"""Which numbers a field of a method may hold: said beside the field, checked when the method is made and when a policy is read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

_RANGE = "range"  # in a field's metadata


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `open_low`, `open_high`: without these themselves; `odd`: only odd ones."""

    low: float = 0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    odd: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and (not self.odd or value % 2 == 1)

    def __str__(self) -> str:
        words = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        if self.high != math.inf:
            words += f" and {'below' if self.open_high else 'at most'} {self.high:g}"
        return words + (" and odd" if self.odd else "")


#: A share that may be all of it, but not nothing.
SHARE = Range(0, 1, open_low=True)
ABOVE_ZERO = Range(0, open_low=True)
COUNT = Range(1)


def bounded(default: Any, within: Range) -> Any:
    """A dataclass's field of this default whose numbers are in this range; other numeric fields hold what is at least 0.

    Args:
        default: of the field; `dataclasses.MISSING` if it must be given.
        within: the range; None is allowed beside it where the field's type says so.
    """
    return dataclasses.field(default=default, metadata={_RANGE: within})


def range_of(field: dataclasses.Field[Any]) -> Range:
    """What numbers this field holds."""
    found: Range = field.metadata.get(_RANGE, Range())
    return found


def check_bounds(method: Any) -> None:
    """For a method's `__post_init__`: every number must be in its field's range.

    Raises:
        ValueError: in one sentence, the first that is not.
    """
    for field in dataclasses.fields(method):
        value, kinds = getattr(method, field.name), {kind.strip() for kind in str(field.type).split("|")}
        if not kinds & {"int", "float"} or (value is None and "None" in kinds):
            continue
        where = f"{getattr(method, 'name', type(method).__name__)}.{field.name}"
        if isinstance(value, bool) or not isinstance(value, (int, float) if "float" in kinds else int):
            raise ValueError(f"{where} must be {'a number' if 'float' in kinds else 'an integer'}, not {value!r}")
        if not range_of(field).holds(value):
            raise ValueError(f"{where} must be {range_of(field)}, not {value}")
