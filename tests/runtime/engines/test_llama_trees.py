"""Trees of tokens in one step of the decoder in C: every branch gets the bits that it would get alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from llama_engines import SHAPES, engines, model_of

from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
CPU = torch.device("cpu")


def random_parents(count: int, draw: random.Random) -> list[int]:
    """Node 0 follows the text; the others anything before them."""
    return [-1, *(draw.randrange(index) for index in range(1, count))]


def branch(parents: list[int], node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def alone(engine: NativeEngine, text: list[int]) -> torch.Tensor:
    """Logits after the last token, in a pool of its own."""
    pages = list(range(-(-len(text) // engine.page_size)))
    return engine.read(engine.new_pages(len(pages)), [Chunk(text, 0, pages)])[0]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_are_computed_as_if_alone(name: str, dtype: torch.dtype) -> None:
    engine = engines(model_of(name).to(dtype))[1]
    assert engine.trees
    draw = random.Random(name)
    for length, count in ((1, 5), (60, 9), (63, 3), (64, 20), (127, 70)):
        text = [draw.randrange(400) for _ in range(length)]
        tokens = [draw.randrange(400) for _ in range(count)]
        parents = random_parents(count, draw)
        pages = list(range(-(-(length + count) // engine.page_size)))
        draw.shuffle(pages)
        pool = engine.new_pages(len(pages))
        engine.step(pool, [Chunk(text, 0, pages)])
        piece = Chunk(tokens, length, pages, outputs=count, parents=parents)
        logits, hidden = engine.verify(pool, [piece], hidden=True)
        assert logits.shape[0] == count
        assert hidden is not None
        for node in draw.sample(range(count), min(count, 6)):
            path = branch(parents, node)
            assert torch.equal(logits[node], alone(engine, text + [tokens[index] for index in path]))
        # The head reads what `hidden` says.
        head = engine.module.get_output_embeddings()
        torch.testing.assert_close(
            head(hidden.to(dtype)).float(), logits, atol=2e-2 if dtype == torch.bfloat16 else 2e-4, rtol=2e-2
        )
        # A branch that is kept goes on as if nothing had been beside it.
        path = branch(parents, count - 1)
        engine.keep(pool, piece, path)
        kept = text + [tokens[index] for index in path]
        after = engine.step(pool, [Chunk([7], len(kept), pages)])[0]
        assert torch.equal(after, alone(engine, [*kept, 7]))


def test_trees_chains_and_prompts_share_a_step() -> None:
    engine = engines(model_of("grouped"))[1]
    draw = random.Random(0)
    texts = [[draw.randrange(400) for _ in range(length)] for length in (70, 3, 20)]
    pool = engine.new_pages(9)
    pages = [[3, 1, 8], [0, 2], [5, 4]]
    engine.step(pool, [Chunk(text, 0, mine) for text, mine in zip(texts, pages, strict=True)])
    tree, parents = [5, 6, 7, 8], [-1, 0, 0, 2]
    prompt = [draw.randrange(400) for _ in range(12)]
    pieces: list[Any] = [
        Chunk(tree, 70, pages[0], outputs=4, parents=parents),
        Chunk([9, 10, 11], 3, pages[1], outputs=2),
        Chunk(prompt, 20, pages[2]),
    ]
    logits, hidden = engine.verify(pool, pieces)
    assert hidden is None
    expected = [texts[0] + [tree[index] for index in branch(parents, node)] for node in range(4)]
    expected += [texts[1] + [9, 10], texts[1] + [9, 10, 11], texts[2] + prompt]
    assert logits.shape == (7, 400)
    for row, text in zip(logits, expected, strict=True):
        assert torch.equal(row, alone(engine, text))
