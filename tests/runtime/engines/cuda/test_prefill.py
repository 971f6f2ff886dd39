"""Attention of chunks of prompts in plain torch, the reference of the kernel, and the tiles that the kernel's programs work on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from prefill_cases import CASES, ChunkCase, attention

from runtime.engines.cuda import ops
from runtime.engines.cuda.cache import Chunks


@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("window", [0, 1, 7, 500])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("most", [1 << 25, 64])
def test_a_chunk(start: int, window: int, heads: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engines.cuda.stored_pages.MOST_SCORES", most)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(10, heads[0], 8), torch.randn(2, start + 10, heads[1], 8)
    found = ops.causal_attention(q, k, v, start, 0.3, window)
    torch.testing.assert_close(found.double(), attention(q, k, v, start, 0.3, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_in_pages(case: ChunkCase) -> None:
    """Side by side, over pages that hold NaN wherever nothing was written."""
    made = case.make()
    found = ops.chunk_attention(made.q, made.layer, made.chunks, made.scale, case.window)
    torch.testing.assert_close(found.double(), made.wanted, rtol=case.limit, atol=case.limit)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_tiles_are_all_queries_the_longest_first(group: int) -> None:
    starts, counts, rows, page = [0, 130, 7], [70, 1, 33], 16, 64
    chunks = Chunks(starts, counts, torch.arange(6, dtype=torch.int32), page)
    tiles = chunks.tiles(rows, group)
    assert tiles.dtype == torch.int32
    assert chunks.tiles(rows, group) is tiles, "once a step, not once a layer"
    queries, seen = Counter[tuple[int, int]](), []
    firsts = {row: i for i, row in enumerate([0, 70, 71])}
    for row, start, count, pages, query in tiles.tolist():
        i = firsts[row]
        assert (start, count, pages) == (starts[i], counts[i], [0, 2, 5][i])
        mine = range(query, min(query + rows, count * group))
        queries.update((i, each) for each in mine)
        seen.append(start + mine[-1] // group)
    assert queries == Counter((i, each) for i in range(3) for each in range(counts[i] * group))
    assert seen == sorted(seen, reverse=True)
