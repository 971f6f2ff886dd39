"""Batches in pages, over an engine that remembers tokens and answers with what it finds in its pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from runtime.engines.base import Chunk
from runtime.engines.batch import Batch

SIZE = 4


class Memory:
    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors = [torch.full((count, SIZE), -1, dtype=torch.int64)]


class Engine:
    """Logits of a token: sum of the tokens up to it, and how many they are."""

    page_size, most_rows, logits_width = SIZE, 5, 2

    def __init__(self) -> None:
        self.steps = 0

    def make_memory(self, count: int) -> Memory:
        return Memory(count)

    def read(self, memory: Memory, pieces: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        self.steps += 1
        assert sum(len(piece.tokens) for piece in pieces) <= self.most_rows
        found = []
        for piece in pieces:
            rows = []
            for place, token in enumerate(piece.tokens, piece.start):
                memory.tensors[0][piece.pages[place // SIZE], place % SIZE] = token
                cached = torch.cat([memory.tensors[0][page] for page in piece.pages])[: place + 1]
                assert (cached >= 0).all(), "a token that nobody wrote"
                rows.append([float(cached.sum()), float(place + 1)])
            found += rows if every else rows[-1:]
        return torch.tensor(found)


def expected(texts: list[list[int]], counts: list[int], width: int) -> torch.Tensor:
    """Of the last `counts` tokens of each text, padded on the left."""
    out = torch.zeros(len(texts), width, 2)
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        for back in range(count):
            end = len(text) - back
            out[row, width - 1 - back] = torch.tensor([float(sum(text[:end])), float(end)])
    return out


def padded(parts: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[0] * (width - len(part)) + part for part in parts])
    return ids, torch.tensor([[0] * (width - len(part)) + [1] * len(part) for part in parts])


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    engine, batch = Engine(), Batch()
    texts: list[list[int]] = [[] for _ in range(number(1, 5))]
    for _ in range(6):
        width = number(1, 14)
        counts = [number(0, width + 1) for _ in texts]
        parts = [[number(1, 9) for _ in range(count)] for count in counts]
        for text, part in zip(texts, parts, strict=True):
            text += part
        last_only = bool(number(0, 2))
        logits = batch.forward(engine, *padded(parts, width), last_only)
        every = expected(texts, counts, width)
        assert torch.equal(logits, every[:, -1:] if last_only else every)
        if number(0, 3) == 0:  # drop, repeat and reorder
            rows = [number(0, len(texts)) for _ in range(number(1, 4))]
            batch.keep(engine, rows)
            texts = [list(texts[row]) for row in rows]


def test_without_a_mask_and_in_one_pass() -> None:
    engine, batch = Engine(), Batch()
    logits = batch.forward(engine, torch.tensor([[1, 2], [3, 4]]), None, True)
    assert torch.equal(logits, torch.tensor([[[3.0, 2.0]], [[7.0, 2.0]]]))
    assert engine.steps == 1
    batch.keep(engine, [1])
    assert torch.equal(batch.forward(engine, torch.tensor([[5]]), None, False), torch.tensor([[[12.0, 3.0]]]))


def test_dropping_rows_before_anything_is_cached() -> None:
    batch = Batch()
    batch.pages, batch.lengths = [[], []], [0, 0]
    batch.keep(Engine(), [1])
    assert (batch.memory, batch.lengths) == (None, [0])
