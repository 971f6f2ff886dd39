"""Decode steps with a graph that records what is done to it: once a bucket captured, then only refilled and replayed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cuda_models import build, engine
from fake_graph import Fake

from runtime.engines.base import Chunk
from runtime.engines.cuda.steps import Computation


def test_one_capture_a_bucket_and_a_replay_a_step(truth: Callable[..., torch.Tensor]) -> None:
    fake = Fake()
    which = engine(build("Llama"), buckets=(1, 2, 4, 8), capture=fake)
    assert "graphs" in which.description
    chance = random.Random(0)
    every = [chance.choices(range(101), k=40) for _ in range(5)]
    tables = [[row, row + 5, row + 10] for row in range(5)]
    pool = which.new_pages(15)
    done = [0] * 5
    counts = [1, 3, 2, 5, 4, 1, 3, 5, 5, 2] + [chance.randint(1, 5) for _ in range(30)]
    buckets = []
    for count in counts:
        chosen = [row for row in chance.sample(range(5), count) if done[row] < 40]
        if not chosen:
            continue
        buckets.append(next(size for size in (1, 2, 4, 8) if size >= len(chosen)))
        logits = which.step(pool, [Chunk([every[row][done[row]]], done[row], tables[row]) for row in chosen])
        for row, found in zip(chosen, logits, strict=True):
            torch.testing.assert_close(found, truth("Llama", every[row])[done[row]], rtol=2e-4, atol=2e-4)
            done[row] += 1
    order = list(dict.fromkeys(buckets))
    assert len(fake.captures) == len(order)
    assert fake.replays == [order.index(size) for size in buckets]


def test_graphs_stay_with_the_memory() -> None:
    fake = Fake()
    which = engine(build("Llama"), capture=fake)
    for _ in range(3):
        pool = which.new_pages(2)
        which.step(pool, [Chunk([1], 0, [1])])
        del pool
    assert len(fake.captures) == 1
    assert len(fake.replays) == 3
    which.step(which.new_pages(3), [Chunk([1], 0, [2])])  # larger: other memory, other graphs
    assert len(fake.captures) == 2


def test_padding_touches_no_page_of_anybody() -> None:
    which = engine(build("Llama"), buckets=(1, 4), capture=Fake())
    pool = which.new_pages(6)
    which.step(pool, [Chunk([row + 1], 0, [row]) for row in range(4)])  # all four rows have had real pages
    memory = pool.memory
    before = [tensor.clone() for tensor in memory.tensors]
    which.step(pool, [Chunk([9], 1, [2]), Chunk([8], 1, [0])])
    for old, new in zip(before, memory.tensors, strict=True):
        changed = {tuple(at) for at in (old != new).flatten(2).any(-1).nonzero().tolist()}
        assert changed - {(memory.scratch, 0)} == {(2, 1), (0, 1)}
    assert memory.scratch == 6
    assert memory.steps is not None
    rows = memory.steps._rows(4)
    assert rows.slots.tolist() == [2 * 16 + 1, 1, 6 * 16, 6 * 16]
    assert rows.positions.tolist() == [1, 1, 0, 0]
    assert memory.steps._tables[:4, 0].tolist() == [2, 0, 6, 6]


def test_page_tables_are_sent_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    which = engine(build("Llama"), buckets=(2,), capture=Fake())
    pool = which.new_pages(4)
    assert which.step(pool, [Chunk([1], 0, [3]), Chunk([2], 0, [1])]).shape == (2, 101)
    assert pool.memory.steps is not None
    filled = [list(row) for row in pool.memory.steps._filled]
    lists = list(map(id, pool.memory.steps._filled))
    which.step(pool, [Chunk([1], 1, [3, 2]), Chunk([2], 1, [1])])  # a page taken ahead is not needed yet
    assert pool.memory.steps._filled == filled
    assert list(map(id, pool.memory.steps._filled)) == lists
    which.step(pool, [Chunk([1], 16, [3, 2]), Chunk([2], 2, [1])])
    assert pool.memory.steps._tables[:, :2].tolist() == [[3, 2], [1, 4]]


def test_a_capture_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def fails(compute: Computation) -> Computation:
        tried.append(compute)
        raise RuntimeError("this operation is not permitted when stream is capturing\nand more")

    which = engine(build("Llama"), buckets=(1, 2), capture=fails)
    other = engine(build("Llama"), buckets=(1, 2), capture=None)
    pool, same = which.new_pages(2), other.new_pages(2)
    with caplog.at_level(logging.WARNING):
        for place in range(3):
            pieces = [Chunk([place], place, [0]), Chunk([place + 5], place, [1])][: 1 + place % 2]
            assert torch.equal(which.step(pool, pieces), other.step(same, pieces))
    assert len(tried) == 1
    assert [record.getMessage().count("not permitted when") for record in caplog.records] == [1]


def test_an_embedding_that_cannot_be_captured_runs_before_the_graph(truth: Callable[..., torch.Tensor]) -> None:
    model = build("Llama")

    class Odd(torch.nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.table, self.seen = table, 0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.table[ids.long()]

    odd = Odd(model.model.embed_tokens.weight.detach().clone())
    which = engine(model, capture=Fake(), buckets=(2,))
    which.decoder.parts = which.parts = type(which.parts)(**{**vars(which.parts), "embedding": odd})
    which.decoder.embeds = False
    pool = which.new_pages(1)
    ids = [5, 6, 7]
    for place, token in enumerate(ids):
        logits = which.step(pool, [Chunk([token], place, [0])])[0]
        torch.testing.assert_close(logits, truth("Llama", ids)[place], rtol=2e-4, atol=2e-4)
    assert odd.seen == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_compute_what_plain_calls_do() -> None:
    from runtime.engines.cuda.steps import CudaGraphs

    cuda = torch.device("cuda:0")
    model = build("Mistral, window").to(cuda, torch.bfloat16)
    which, other = (engine(model, capture=capture) for capture in (CudaGraphs(cuda), None))
    for pages in (8, 8, 30):  # the second pool has the memory of the first, the third has other
        pool, same = which.new_pages(pages), other.new_pages(pages)
        for each, memory in ((which, pool), (other, same)):
            each.step(memory, [Chunk(range(20), 0, [5, 2]), Chunk([3, 4], 0, [7])])
        for place in range(9):
            pieces = [Chunk([place], 20 + place, [5, 2]), Chunk([place], 2 + place, [7])][: 1 + place % 2]
            assert torch.equal(which.step(pool, pieces), other.step(same, pieces))
        assert set(pool.memory.steps._captured) == {1, 2}
        assert not any(isinstance(replay, partial) for replay in pool.memory.steps._captured.values())
        del pool, same
