"""Drafts on the lean GPU engine: chains are rows of decode steps, and every token gets the numbers that it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_models import FAMILIES, build, engine
from fake_graph import Fake
from speculation_cases import (
    Reading,
    Scripted,
    ScriptedChain,
    answers,
    assert_states_are_read_by,
    model_over,
    prompts,
    speculation,
)

from runtime.drafting.lengths.goodput import Goodput
from runtime.engines.base import Chunk

Truth = Callable[..., torch.Tensor]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(101), k=count)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@torch.inference_mode()
def read(which: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the head makes of hidden states."""
    found: torch.Tensor = which.parts.head(hidden).cpu()
    return found


def lean(**options: Any) -> Any:
    return engine(build("Llama", vocab_size=400, max_position_embeddings=512), **options)


# ---------------------------------------------------------------- the engine
@pytest.mark.sampled(13, 4)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("buckets", [(1, 2, 4, 8, 16, 32), (3,)])
def test_tokens_of_a_chain_are_computed_as_if_alone(name: str, buckets: tuple[int, ...], truth: Truth) -> None:
    """Beside prompts and single tokens, in any order, with pages anywhere; more rows than a step takes go in several."""
    which = engine(build(name), buckets=buckets)
    assert which.why_not_drafts() is None
    assert not which.trees
    draw = random.Random(name)
    every = [tokens(length, length) for length in (40, 17, 33, 25, 1)]
    pages = draw.sample(range(20), 20)
    tables = [[pages.pop() for _ in range(3)] for _ in every]
    pool = which.new_pages(20)
    starts = [31, 14, 20, 0, 0]
    for ids, start, table in zip(every, starts, tables, strict=True):
        if start:
            which.step(pool, [Chunk(ids[:start], start - start, table)])
    # Two chains, one across a page; one token; two prompts, of which one is a token long.
    pieces = [
        Chunk(every[0][31:40], 31, tables[0], outputs=9),
        Chunk(every[3][:25], 0, tables[3]),
        Chunk(every[1][14:17], 14, tables[1], outputs=3),
        Chunk(every[4][:1], 0, tables[4]),
        Chunk(every[2][20:21], 20, tables[2]),
    ]
    for _ in range(4):
        order = draw.sample(range(5), 5)
        logits, hidden = which.verify(pool, [pieces[i] for i in order], hidden=True)
        plain, nothing = which.verify(pool, [pieces[i] for i in order])
        assert nothing is None
        assert torch.equal(plain, logits)
        assert hidden is not None
        assert (logits.dtype, hidden.dtype) == (torch.float32, torch.float32)
        row = state = 0
        for i in order:
            piece, number = pieces[i], [0, 3, 1, 4, 2][i]
            ids, end = every[number], piece.start + len(piece.tokens)
            expected = truth(name, ids)[piece.start : end]
            close(logits[row : row + piece.outputs], expected[-piece.outputs :])
            close(read(which, hidden[state : state + len(piece.tokens)]), expected)
            row += piece.outputs
            state += len(piece.tokens)
        assert (row, state) == (len(logits), len(hidden))


def test_rejected_tokens_are_overwritten(truth: Truth) -> None:
    which = engine(build("Llama"))
    ids, wrong = tokens(40), tokens(40, 9)
    pool, table = which.new_pages(3), [2, 0, 1]
    which.step(pool, [Chunk(ids[:10], 0, table)])
    place, draw = 10, random.Random(0)
    while place < 38:
        right = draw.randint(0, 3)
        chain = [*ids[place : place + 1 + right], *wrong[: draw.randint(0, 4)]][: 40 - place]
        piece = Chunk(chain, place, table, outputs=len(chain))
        logits, _ = which.verify(pool, [piece])
        right = min(right, len(chain) - 1)
        close(logits[: 1 + right], truth("Llama", ids)[place : place + 1 + right])
        which.keep(pool, Chunk((), place + 1, table), list(range(right)))
        place += 1 + right


def test_trees_are_refused() -> None:
    which = engine(build("Llama"))
    pool = which.new_pages(1)
    with pytest.raises(ValueError, match="no trees"):
        which.verify(pool, [Chunk([1, 2, 3], 0, [0], outputs=3, parents=[-1, 0, 0])])
    with pytest.raises(ValueError, match=r"\[1\]"):
        which.keep(pool, Chunk((), 1, [0]), [1])


def test_chains_replay_graphs(truth: Truth) -> None:
    """The same graphs as decode steps, whether hidden states are wanted or not."""
    fake = Fake()
    which = engine(build("Qwen3"), buckets=(1, 2, 4, 8), capture=fake)
    ids, pool = tokens(30), which.new_pages(4)
    which.step(pool, [Chunk(ids[:9], 0, [3, 1]), Chunk(ids[:20], 0, [0, 2])])
    assert fake.replays == []
    for count, hidden, replayed in (
        (3, False, 0),
        (4, False, 0),
        (3, True, 0),
        (1, False, 1),
        (9, False, None),
        (3, True, 0),
    ):
        pieces = [Chunk(ids[9 : 9 + count], 9, [3, 1], outputs=count)]
        found, states = which.verify(pool, pieces, hidden)
        close(found, truth("Qwen3", ids)[9 : 9 + count])
        if states is not None:
            close(read(which, states), found)
        if replayed is not None:
            assert fake.replays[-1] == replayed
    assert fake.replays == [0, 0, 0, 1, 2, 1, 0]  # 9 rows are one step of 8 and one of 1
    # Many rows of other sequences than before: their page tables come along.
    pieces = [Chunk(ids[20:24], 20, [0, 2], outputs=4), Chunk(ids[9:13], 9, [3, 1], outputs=4)]
    close(which.verify(pool, pieces)[0], torch.cat([truth("Qwen3", ids)[20:24], truth("Qwen3", ids)[9:13]]))


# ---------------------------------------------------------------- texts
@pytest.fixture(scope="module")
def plain() -> Any:
    return model_over(lean())


@pytest.mark.parametrize("drafter", [Scripted, ScriptedChain])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2}])
def test_texts_are_those_of_plain_decoding(plain: Any, drafter: Any, options: Any) -> None:
    texts = prompts(16, 100)
    options = {**options, "max_new_tokens": 40, "seed": list(range(16))}
    truth = answers(plain, texts, **options)
    drafting = model_over(lean(), speculation(drafter(truth)))
    assert drafting.generate(texts, **options) == list(truth.values())
    assert drafting.stats["accepted_tokens"] > 100
    # Of a tree one branch is verified, which may be the wrong one.
    assert drafting.stats["steps"] < plain.stats["steps"] / (1.8 if drafter is ScriptedChain else 1.1)
    assert list(drafting.stream(texts[3], **{**options, "seed": 3})) == truth[tuple(texts[3])]


def test_texts_end_where_plain_ones_do(plain: Any) -> None:
    texts = prompts(12, 30, seed=7)
    truth = answers(plain, texts, max_new_tokens=60)
    drafting = model_over(lean(), speculation(ScriptedChain(truth, right=1.0)))
    for count in (1, 2, 7):
        assert drafting.generate(texts, max_new_tokens=count) == [new[:count] for new in truth.values()]
    short = build("Llama", vocab_size=400, max_position_embeddings=50)  # pages go up to 64: the context must end it
    full = model_over(engine(short), speculation(ScriptedChain(truth, right=1.0)))
    assert full.generate(texts) == [model_over(engine(short)).generate(text) for text in texts]


def test_little_memory_puts_texts_aside_not_wrong(plain: Any) -> None:
    texts = prompts(9, 60)
    truth = answers(plain, texts, max_new_tokens=100, ignore_eos=True)
    drafting = model_over(lean(), speculation(ScriptedChain(truth)))
    memory = 16 * drafting.engine.page_bytes
    assert drafting.generate(texts, max_new_tokens=100, ignore_eos=True, cache_memory=memory) == list(truth.values())
    assert drafting.stats["preemptions"] > 0


def test_hidden_states_belong_to_their_tokens(plain: Any) -> None:
    texts = prompts(3, 70)
    truth = answers(plain, texts, max_new_tokens=20)
    drafter = Reading(truth)
    drafting = model_over(lean(), speculation(drafter, Goodput()))
    assert drafting.generate(texts, max_new_tokens=20, prefill_chunk=16) == list(truth.values())
    assert_states_are_read_by(drafting.engine.parts.head, plain, drafter)  # type: ignore[attr-defined]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_chains_on_a_gpu(truth: Truth) -> None:
    from runtime.engines.cuda.steps import CudaGraphs

    cuda = torch.device("cuda:0")
    ids = tokens(40)
    for name in ("Llama", "Mistral, window"):
        which = engine(build(name).to(cuda), capture=CudaGraphs(cuda))
        pool = which.new_pages(3)
        which.step(pool, [Chunk(ids[:10], 0, [2, 0, 1])])
        for count in (5, 5, 9):
            logits, hidden = which.verify(
                pool, [Chunk(ids[10 : 10 + count], 10, [2, 0, 1], outputs=count)], hidden=True
            )
            wanted = truth(name, ids)[10 : 10 + count]
            torch.testing.assert_close(logits.cpu(), wanted, rtol=2e-3, atol=2e-3)
            assert hidden is not None
            torch.testing.assert_close(read(which, hidden), wanted, rtol=2e-3, atol=2e-3)
