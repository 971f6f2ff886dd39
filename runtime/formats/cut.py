"""Cut of a weight matrix: some of its consecutive rows or columns, and where they lie in the tensors that store it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Along:
    """What a dimension of a stored tensor follows: every `elements` of it hold `span` rows (`axis` 0) or columns (`axis` 1) of the matrix.

    The last ones may hold fewer.
    """

    axis: int
    span: int = 1
    elements: int = 1

    @classmethod
    def words(cls, axis: int, bits: int, per: int = 1) -> Along:
        """Of int32 words, a stream of codes of `bits` bits, each for `per` rows or columns; cut where code and word begin together."""
        common = gcd(32, bits)
        return cls(axis, 32 // common * per, bits // common)


ROWS, COLUMNS = Along(0), Along(1)
#: For each dimension of a tensor what it follows; None: neither rows nor columns, so that every part has it whole.
Axes = tuple[Along | None, ...]


@dataclass(frozen=True)
class Cut:
    """Rows (`axis` 0) or columns (1) `start` .. `stop - 1` of a matrix of shape `whole`, (out, in)."""

    whole: tuple[int, int]
    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the part."""
        size = self.stop - self.start
        return (size, self.whole[1]) if self.axis == 0 else (self.whole[0], size)

    def why_not(self, unit: int) -> str | None:
        """The reason why the part does not begin and end between groups of `unit` rows or columns; None when it does."""
        for place in (self.start, self.stop):
            if place % unit and place != self.whole[self.axis]:
                what = ("rows", "columns")[self.axis]
                return f"{what} {place - place % unit} to {min(place - place % unit + unit, self.whole[self.axis]) - 1} are stored together"
        return None

    def index(self, axes: Sequence[Along | None]) -> Index:
        """Where in a tensor with these axes the part lies, whose cuts `why_not` has passed."""
        return tuple(
            slice(None) if along is None or along.axis != self.axis else self._elements(along) for along in axes
        )

    def _elements(self, along: Along) -> slice:
        first = self.start * along.elements // along.span
        return slice(first, None if self.stop == self.whole[self.axis] else self.stop * along.elements // along.span)
