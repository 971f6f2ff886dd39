"""Where the rows of a step stand whose pieces may be trees, as decoder.h reads it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from runtime.engines.base import Piece


class Branches:
    """For each row of the pieces, one after another:

    Attributes:
        position: int64 `[rows]`, in its text.
        slot: int64 `[rows]`, where its keys and values are put.
        base, path: int64 `[rows]`: positions from `base` on are at `slots[path]`, `slots[path + 1]`, ...; `path` -1: all are in order.
        slots: int32, of all branches one after another.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        position: list[int] = []
        base: list[int] = []
        path: list[int] = []
        slots: list[int] = []
        slot: list[int] = []
        for piece in pieces:
            count, start = len(piece.tokens), piece.start
            slot += range(start + piece.cached, start + piece.cached + count)
            base += [start] * count
            if piece.parents is None:
                position += range(start, start + count)
                path += [-1] * count
                continue
            branches: list[list[int]] = []
            for index, parent in enumerate(piece.parents):
                branches.append([*(branches[parent] if parent >= 0 else ()), start + index])
            branches = branches[piece.cached :]
            lengths = [len(branch) for branch in branches]
            position += [start + length - 1 for length in lengths]
            path += accumulate(lengths[:-1], initial=len(slots))
            slots += [place for branch in branches for place in branch]
        self.position, self.slot = torch.tensor(position), torch.tensor(slot)
        self.base, self.path = torch.tensor(base), torch.tensor(path)
        self.slots = torch.tensor(slots, dtype=torch.int32)
