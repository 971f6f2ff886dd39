"""Scratch buffers of a program, used again once nobody reads what is in them."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engines.program.operations import (
    LOGITS,
    STREAM,
    Attend,
    Linear,
    Mixture,
    Norm,
    Operation,
    Program,
    reads,
    writes,
)
from runtime.kernels.cpu import decoder


class Buffers:
    """Numbers of the buffers that operations name, and their widths."""

    def __init__(self, program: Program) -> None:
        self._queries, self._values = program.heads * program.head_dim, program.heads * program.value_dim
        self._hidden = program.hidden
        self._widths = [program.hidden, program.vocabulary]

    def place(self, operations: Sequence[Operation]) -> dict[str, int]:
        """Names to numbers, of a layer or the tail."""
        found = {STREAM: decoder.STREAM, LOGITS: decoder.LOGITS}
        ends = {name: at for at, each in enumerate(operations) for name in (*reads(each), *writes(each))}
        free = set(range(len(found), len(self._widths)))
        for at, operation in enumerate(operations):
            for name in writes(operation):
                if name not in found:
                    found[name] = self._take(free, self._width(operation))
            free |= {found[name] for name, end in ends.items() if end == at and name not in (STREAM, LOGITS)}
        return found

    def _take(self, free: set[int], width: int) -> int:
        number = next((each for each in sorted(free) if self._widths[each] == width), None)
        if number is None:
            number = len(self._widths)
            self._widths.append(width)
        free.discard(number)
        return number

    def _width(self, operation: Operation) -> int:
        if isinstance(operation, Linear):
            return operation.outputs
        if isinstance(operation, Norm | Mixture):
            return operation.width
        return self._values if isinstance(operation, Attend) else self._queries

    def widths(self) -> list[int]:
        """Of all buffers, and of one more for the rows whose logits are wanted."""
        return [*self._widths, self._hidden]
