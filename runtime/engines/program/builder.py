"""Operations in order, made of what modules read and gave: the residual stream is whatever the next reader adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from runtime.engines.program.operations import (
    STREAM,
    Add,
    Attend,
    Cap,
    Half,
    Linear,
    Mixture,
    Norm,
    Operation,
    Place,
    UnknownError,
    reads,
    writes,
)

Combination = dict[str, float]


class Builder:
    """Operations of one layer, or of the tail, from the residual stream `start` on, `[2, tokens, hidden]`."""

    def __init__(self, start: torch.Tensor) -> None:
        self.operations: list[Operation] = []
        self.rows: dict[str, torch.Tensor] = {STREAM: start}
        self._content: Combination = {STREAM: 1.0}  # what the stream holds now
        self._old: dict[str, str] = {}

    def add(self, operation: Operation, rows: torch.Tensor) -> None:
        """An operation that gave these rows `[2, tokens, width]` in its target."""
        name = operation.target.buffer  # type: ignore[union-attr]
        if isinstance(operation, Norm) and operation.source.buffer == STREAM and self._content == {STREAM: 1.0}:
            # All norms of the stream as it was come first, so that nobody who adds to it has to wait for them.
            at = next((i for i, each in enumerate(self.operations) if not isinstance(each, Norm)), len(self.operations))
            self.operations.insert(at, operation)
        else:
            self.operations.append(operation)
        self.rows[name] = rows

    def in_place(self, operation: Operation, *gone: str) -> None:
        """An operation that changes buffers, of which some are read by nobody else from then on."""
        self.operations.append(operation)
        for name in gone:
            self.rows.pop(name, None)

    def nodes(self) -> list[tuple[str, torch.Tensor]]:
        """What operations gave, latest first."""
        return [(name, rows) for name, rows in reversed(self.rows.items()) if name != STREAM]

    def source(self, x: torch.Tensor, who: str) -> Place | None:
        """Where `x` `[2, tokens, width]` is to be read: it is a node's rows, or the stream once some have been added to it."""
        for name, rows in self.nodes():
            if rows.shape == x.shape and torch.equal(rows, x):
                return self._settled(name)
        found = self.combination(x)
        if found is not None:
            self.reach(found, who)
            return Place(STREAM)
        return self._slice(x)

    def _slice(self, x: torch.Tensor) -> Place | None:
        """Some columns of a node's rows."""
        for name, rows in self.nodes():
            for at in (rows[0, 0] == x[0, 0, 0]).nonzero().flatten().tolist():
                if torch.equal(rows[..., at : at + x.shape[-1]], x):
                    return Place(name, at)
        return None

    def _settled(self, name: str) -> Place:
        return Place(STREAM if self._content == {name: 1.0} else name)

    def combination(self, x: torch.Tensor) -> Combination | None:
        """The weighted sum of the stream at the beginning and of rows as wide that `x` is; None: it is none."""
        start = self.rows[STREAM]
        if x.shape != start.shape:
            return None
        if torch.equal(x, start):
            return {STREAM: 1.0}
        names = [name for name, rows in self.rows.items() if rows.shape == start.shape]
        columns = torch.linspace(0, x.shape[-1] - 1, min(x.shape[-1], 64)).long()
        basis = torch.stack([self.rows[name][..., columns].flatten() for name in names], -1).double()
        wanted = x[..., columns].flatten().double()
        weights = torch.linalg.lstsq(basis, wanted[:, None]).solution[:, 0]
        weights = torch.where(weights.abs() < 1e-4, torch.zeros_like(weights), weights)
        weights = torch.where((weights - 1).abs() < 1e-4, torch.ones_like(weights), weights)
        made = sum(w * self.rows[name].double() for name, w in zip(names, weights.tolist(), strict=True) if w)
        if isinstance(made, int) or float((made - x.double()).norm() / x.double().norm()) > 1e-5:
            return None
        return {name: round(w, 7) for name, w in zip(names, weights.tolist(), strict=True) if w}

    def reach(self, wanted: Combination, who: str) -> None:
        """Add to the stream until it holds that."""
        if not self._content.items() <= wanted.items():
            self._begin_anew(wanted, who)
        for name, scale in wanted.items():
            if name not in self._content:
                self.operations.append(Add(Place(name), Place(STREAM), self.rows[name].shape[-1], scale))
        self._content = dict(wanted)

    def _begin_anew(self, wanted: Combination, who: str) -> None:
        """The stream is what a norm of it gave, from then on."""
        for at, operation in enumerate(self.operations):
            if not isinstance(operation, Norm) or wanted.get(name := operation.target.buffer) != 1.0:
                continue
            if any(STREAM in (*reads(each), *writes(each)) for each in self.operations[at + 1 :]):
                continue
            self.operations[at] = replace(operation, target=Place(STREAM))
            self.operations[at + 1 :] = [_renamed(each, name) for each in self.operations[at + 1 :]]
            self._content = {name: 1.0}
            return
        raise UnknownError(
            f"{who} reads a sum of {', '.join(wanted)}, from which the residual stream was something else"
        )

    def finish(self) -> tuple[Operation, ...]:
        """The operations, with what is only added to the stream added where it is computed, and each with its half."""
        found = list(self.operations)
        for add in [each for each in found if isinstance(each, Add) and each.scale == 1.0]:
            name, end = add.source.buffer, found.index(add)
            makers = [i for i, each in enumerate(found) if name in writes(each)]
            between = found[makers[0] + 1 : end] if makers else []
            readers = [each for each in found if name in reads(each)]
            maker = found[makers[0]] if makers else None
            if len(makers) != 1 or readers != [add] or not isinstance(maker, Linear | Norm | Mixture):
                continue
            if any(STREAM in (*reads(each), *writes(each)) for each in between):
                continue
            found[makers[0]] = replace(maker, target=Place(STREAM), add=True)
            del found[end]
        return tuple(_halves(found))


def _renamed(operation: Operation, old: str) -> Operation:
    """With the stream in the place of a buffer."""
    changes: dict[str, Any] = {}
    for field in ("source", "target", "other"):
        place = getattr(operation, field, None)
        if isinstance(place, Place) and place.buffer == old:
            changes[field] = replace(place, buffer=STREAM)
    return replace(operation, **changes)


def _halves(operations: list[Operation]) -> list[Operation]:
    """Each with the half of the layer that it alone belongs to: what leads to one sum into the stream."""
    halves: list[set[Half]] = [set() for _ in operations]
    for end, last in enumerate(operations):
        if (
            isinstance(last, Cap)
            or STREAM not in writes(last)
            or not (isinstance(last, Add) or getattr(last, "add", False))
        ):
            continue
        wanted, branch = set(reads(last)) - {STREAM}, [end]
        for at in range(end - 1, -1, -1):
            operation = operations[at]
            if STREAM not in writes(operation) and wanted & set(writes(operation)):
                branch.append(at)
                wanted |= set(reads(operation)) - {STREAM}
        half: Half = "attention" if any(isinstance(operations[at], Attend) for at in branch) else "mlp"
        for at in branch:
            halves[at].add(half)
    return [
        replace(operation, half=next(iter(half))) if len(half) == 1 else operation
        for operation, half in zip(operations, halves, strict=True)
    ]
