"""The engine's logits are those of transformers, however the tokens come in and wherever the pages lie."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cuda_models import FAMILIES, build, engine

from runtime.engines.base import Chunk
from runtime.engines.cuda import CudaEngine, take_over
from runtime.engines.llama_structure import read_program
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError

Truth = Callable[..., torch.Tensor]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(101), k=count)


def feed(
    which: CudaEngine, pool: Any, ids: Sequence[int], pages: Sequence[int], cuts: Sequence[int], start: int = 0
) -> list[tuple[int, torch.Tensor]]:
    """The tokens in pieces that end at `cuts`: (last token, logits after it)."""
    out = []
    for end in [*cuts, len(ids)]:
        out.append((end - 1, which.step(pool, [Chunk(ids[start:end], start, pages)])[0]))
        start = end
    return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.sampled(31, 9)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cuts", [[], [1], [16], [5, 6, 7, 30], list(range(1, 45))], ids=lambda c: f"{len(c)} cuts")
def test_same_logits_as_transformers(name: str, cuts: list[int], truth: Truth) -> None:
    ids = tokens(45)
    which = engine(build(name))
    for place, logits in feed(which, which.new_pages(3), ids, [0, 1, 2], cuts):
        close(logits, truth(name, ids)[place])


@pytest.mark.parametrize("name", ["Llama", "Mistral, window", "Qwen3"])
def test_unfused_and_fused_agree(name: str, truth: Truth) -> None:
    ids = tokens(20)
    which = engine(build(name), fuse=False)
    close(feed(which, which.new_pages(2), ids, [0, 1], [19])[-1][1], truth(name, ids)[-1])


def test_it_is_a_paged_engine() -> None:
    which = engine(build("Llama"))
    assert not which.lockstep
    assert which.page_bytes == 2 * 2 * 16 * 2 * 16 * 4
    pool = which.new_pages(3)
    assert which.usage(pool, 2).bytes == 2 * which.page_bytes
    assert "plain" in which.description or "torch" in which.description
    assert len(which.explain()) == 15


@pytest.mark.parametrize("name", ["Llama", "Qwen2, windows"])
def test_ragged_steps_with_permuted_pages(name: str, truth: Truth) -> None:
    """Sequences of all lengths decode and read prompts in the same steps, their pages anywhere."""
    which = engine(build(name), buckets=(1, 2, 4))
    chance = random.Random(1)
    pages = list(range(40))
    chance.shuffle(pages)
    every = [tokens(length, length) for length in (1, 2, 15, 16, 17, 40, 33)]
    tables = [[pages.pop() for _ in range(-(-len(ids) // 16))] for ids in every]
    done = [0] * len(every)
    pool = which.new_pages(40)
    while any(done[i] < len(ids) for i, ids in enumerate(every)):
        chosen = [i for i, ids in enumerate(every) if done[i] < len(ids) and chance.random() < 0.8]
        chance.shuffle(chosen)
        pieces, ends = [], []
        for i in chosen:
            count = min(len(every[i]) - done[i], chance.choice([1, 1, 1, 7, 20]))
            pieces.append(Chunk(every[i][done[i] : done[i] + count], done[i], tables[i]))
            done[i] += count
            ends.append(done[i] - 1)
        logits = which.step(pool, pieces)
        assert logits.shape == (len(pieces), 101)
        assert logits.dtype == torch.float32
        for i, end, row in zip(chosen, ends, logits, strict=True):
            close(row, truth(name, every[i])[end])


def test_a_prefix_is_stored_once(truth: Truth) -> None:
    which = engine(build("Llama"))
    pool = which.new_pages(5)
    prefix, a, b = tokens(32), tokens(9, 1), tokens(9, 2)
    which.step(pool, [Chunk(prefix, 0, [3, 1])])
    both = which.step(pool, [Chunk(a, 32, [3, 1, 0]), Chunk(b, 32, [3, 1, 4])])
    close(both[0], truth("Llama", prefix + a)[-1])
    close(both[1], truth("Llama", prefix + b)[-1])
    both = which.step(pool, [Chunk([7], 41, [3, 1, 0]), Chunk([8], 41, [3, 1, 4])])
    close(both[0], truth("Llama", [*prefix, *a, 7])[-1])
    close(both[1], truth("Llama", [*prefix, *b, 8])[-1])


def test_stale_pages_do_no_harm(truth: Truth) -> None:
    """A page that held something else before, even NaN, is only seen as far as it was written."""
    which = engine(build("Mistral, window"))
    pool = which.new_pages(3)
    for tensor in pool.memory.tensors:
        tensor.fill_(float("nan"))
    ids = tokens(21)
    for place, logits in feed(which, pool, ids, [2, 0], [18, 19, 20]):
        close(logits, truth("Mistral, window", ids)[place])


def test_numbers_do_not_depend_on_the_batch() -> None:
    """Bit for bit, when all decode steps have one size."""
    which = engine(build("Qwen3"), buckets=(8,))
    every = [tokens(length, length) for length in (3, 20, 40)]
    tables = [[0], [1, 2], [3, 4, 5]]
    pool = which.new_pages(6)
    for ids, table in zip(every, tables, strict=True):
        which.step(pool, [Chunk(ids[:-1], 0, table)])
    pieces = [Chunk(ids[-1:], len(ids) - 1, table) for ids, table in zip(every, tables, strict=True)]
    together = which.step(pool, pieces)
    for row, piece in zip(together, pieces, strict=True):
        assert torch.equal(which.step(pool, [piece])[0], row)


def test_more_sequences_than_the_largest_bucket_holds_come_back_in_their_order() -> None:
    which = engine(build("Llama"), buckets=(2,))
    pool = which.new_pages(4)
    pieces = [Chunk([3], 0, [1]), Chunk(tokens(5), 0, [0]), Chunk([4], 0, [2]), Chunk([5], 0, [3])]
    logits = which.step(pool, pieces)
    for row, piece in zip(logits, pieces, strict=True):
        assert torch.equal(which.step(pool, [piece])[0], row)
    assert which.step(pool, []).shape == (0, 101)


def test_logits_outlive_the_next_step() -> None:
    which = engine(build("Llama"))
    pool = which.new_pages(1)
    first = which.step(pool, [Chunk([3], 0, [0])])
    kept = first.clone()
    which.step(pool, [Chunk([4], 1, [0])])
    assert torch.equal(first, kept)


def test_more_positions_than_the_model_has() -> None:
    which = engine(build("Llama", max_position_embeddings=32))
    pool = which.new_pages(3)
    with pytest.raises(RequestError, match="32"):
        which.step(pool, [Chunk([1], 32, [0, 1, 2])])
    with pytest.raises(RequestError, match="32"):
        which.step(pool, [Chunk(tokens(33), 0, [0, 1, 2])])


@pytest.mark.parametrize("name", ["Llama", "Mistral, window"])
def test_logits_of_all_tokens(name: str, truth: Truth) -> None:
    which = engine(build(name))
    every = [tokens(20, 1), tokens(20, 2)]
    for row, found in zip(every, which.logits(torch.tensor(every)), strict=True):
        close(found, truth(name, row))
    pool = which.new_pages(2)
    found = [
        which.read(pool, [Chunk(every[0][part], part.start, [1, 0])], every=True)
        for part in (slice(0, 9), slice(9, 20))
    ]
    close(torch.cat(found), truth(name, every[0]))


def test_bfloat16_is_near() -> None:
    model = build("Llama").to(torch.bfloat16)
    ids = tokens(40)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].float()
    which = engine(model)
    for place, logits in feed(which, which.new_pages(3), ids, [0, 1, 2], [38, 39]):
        assert (logits - wanted[place]).norm() < 0.03 * wanted[place].norm()


# ---------------------------------------------------------------- memory
def test_memory_of_a_pool_is_used_again() -> None:
    which = engine(build("Llama"))
    pool = which.new_pages(8)
    first = pool.memory
    second = which.new_pages(2)  # while the first is in use
    assert second.memory is not first
    del pool, second
    gc.collect()
    again = which.new_pages(5)
    assert again.memory is first
    assert again.count == 5
    larger = which.new_pages(9)
    assert larger.memory.count == 9
    del again, larger, first
    which.trim()
    assert which.new_pages(1).memory.count == 1


def test_memory_goes_without_the_garbage_collector() -> None:
    import weakref

    which = engine(build("Llama"))
    pool = which.new_pages(4)
    which.step(pool, [Chunk([1], 0, [0])])
    gone = weakref.ref(pool.memory)
    gc.disable()
    try:
        del pool
        which.trim()
        assert gone() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- what fits
def test_what_is_not_taken_over() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    assert take_over(TorchEngine(build("Llama"), torch.device("cpu"))) is None  # the CPU has an engine of its own
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=32))
    gelu = build("Llama", hidden_act="gelu")
    dynamic = build("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    odd = build("Llama")
    odd.model.layers[1].mlp.extra = torch.nn.Linear(4, 4)
    words = (
        (gpt2, "GPT2LMHeadModel"),
        (gelu, "gelu"),
        (dynamic, "dynamic"),
        (odd, "extra"),
        (build("Llama").double(), "float64"),
    )
    for model, word in words:
        reason = read_program(model)
        assert isinstance(reason, str)
        assert word in reason


def test_pages_of_a_pool_that_was_thrown_away_are_known() -> None:
    """The next pool's size counts on them: they are not free memory any more."""
    which = engine(build("Llama"))
    assert which.spare_pages == 0
    pool = which.new_pages(6)
    assert which.spare_pages == 0
    del pool
    assert which.spare_pages == 6
    smaller = which.new_pages(4)
    assert (smaller.memory.count, which.spare_pages) == (6, 0)
    del smaller
    which.trim()
    assert which.spare_pages == 0
