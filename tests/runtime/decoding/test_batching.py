"""Continuous batching: many requests at once give what each gives alone, whatever the pool, and every page comes back."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_reference import PagedReference, RowReference, hashed, model_of, of_module
from tiny_models import llama

from runtime.decoding import batch, request
from runtime.decoding.pages import ROOT, Pages
from runtime.decoding.request import groups
from runtime.engines.base import Overhead
from runtime.errors import RequestError


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pages]]:
    """The page tables of all calls of a test; none may have a page left that somebody holds."""
    made: list[Pages] = []

    class Watched(Pages):
        def __init__(self, count: int, size: int, overhead: Overhead) -> None:
            super().__init__(count, size, overhead=overhead)
            made.append(self)

    monkeypatch.setattr(batch, "Pages", Watched)
    yield made
    assert made
    assert [pages.available for pages in made] == [pages.count for pages in made]


def random_prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    """Half of them begin with one of three common beginnings."""
    chance = random.Random(seed)
    common = [[chance.randrange(2, 400) for _ in range(length)] for length in (9, 16, 27)]
    prompts = []
    for _ in range(count):
        start = chance.choice(common) if chance.random() < 0.5 else []
        prompts.append(start + [chance.randrange(2, 400) for _ in range(chance.randint(1, longest - len(start)))])
    return prompts


# -------------------------------------------------------------------- as one by one
@pytest.fixture(scope="module")
def tiny() -> Any:
    return of_module(llama(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))


def test_200_greedy_requests_give_what_each_gives_alone(tiny: Any, pools: list[Pages]) -> None:
    prompts = random_prompts(200, seed=0)
    engine = PagedReference(tiny, page_size=2)
    model = model_of(engine, eos=range(20))
    assert not engine.lockstep
    alone = [model.generate(prompt, max_new_tokens=8) for prompt in prompts]
    assert len({len(output) for output in alone}) > 1, "some should end early"
    engine.steps.clear()
    assert model.generate(prompts, max_new_tokens=8, cache_memory=6000) == alone  # 60 pages of 2 positions
    stats = model.stats
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] > 0
    assert stats["shared_prompt_tokens"] > 500
    assert stats["prompt_tokens"] == sum(len(p) for p in prompts)
    assert stats["new_tokens"] == sum(len(output) for output in alone)
    assert (stats["sequences"], stats["steps"]) == (200, len(engine.steps))
    assert stats["cache_bytes"] == 6000
    computed = sum(len(tokens) for step in engine.steps for _, tokens in step)
    expected = stats["prompt_tokens"] - stats["shared_prompt_tokens"] + stats["new_tokens"] - 200
    assert computed == expected + stats["recomputed_tokens"]
    assert pools[-1].count == 60


def test_a_thousand_requests(pools: list[Pages]) -> None:
    chance = random.Random(2)
    prompts = [[chance.randrange(2, 400) for _ in range(chance.randint(1, 12))] for _ in range(1000)]
    engine = PagedReference(hashed(), page_size=8, most_rows=512)
    model = model_of(engine, eos=range(40))
    together = model.generate(prompts, max_new_tokens=10)
    assert max(len(step) for step in engine.steps) == batch.MOST_SEQUENCES
    for i in range(0, 1000, 10):
        assert model.generate(prompts[i], max_new_tokens=10) == together[i]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 2, 4, 16]),
    most_rows=st.integers(1, 40),
    chunk=st.none() | st.integers(1, 9),
    spare=st.integers(0, 12),
    options=st.sampled_from(
        [
            {},
            {"repetition_penalty": 1.4},
            {"temperature": 1.0},
            {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        ]
    ),
    as_text=st.booleans(),
)
def test_any_pool_gives_the_same(
    seed: int, page_size: int, most_rows: int, chunk: int | None, spare: int, options: dict[str, Any], as_text: bool
) -> None:
    """Sizes of pages, steps and chunks change nothing; no memory beyond the largest request's is needed."""
    prompts: list[Any] = random_prompts(12, seed, 30)
    new = 1 + seed % 12
    smallest = max(-(-(len(p) + new - 1) // page_size) for p in prompts)
    if as_text:
        options = {**options, "stop": ["e", " a"]}
    seeds = [seed + i for i in range(12)]
    logits = hashed()
    plain = model_of(PagedReference(logits))
    alone = [plain.generate(p, max_new_tokens=new, seed=s, **options) for p, s in zip(prompts, seeds, strict=True)]
    engine = PagedReference(logits, page_size, most_rows)
    model = model_of(engine)
    together = model.generate(
        prompts, max_new_tokens=new, seed=seeds, prefill_chunk=chunk, cache_memory=(smallest + spare) * 100, **options
    )
    assert together == alone
    assert model.stats["prompt_tokens"] == sum(len(p) for p in prompts)


def test_rows_and_pages_give_the_same(tiny: Any) -> None:
    """Both kinds of caches, the same options, the same results: text with stop strings, sampling, streams, many prompts."""
    paged, rows = model_of(PagedReference(tiny)), model_of(RowReference(tiny))
    assert rows.engine.lockstep
    prompts = ["Once upon a time", "cat", "def add(a, b):"]
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"stop": ["e", "zz"]}, {"repetition_penalty": 1.3}):
        expected = paged.generate(prompts, max_new_tokens=12, **options)
        assert ["".join(paged.stream(p, max_new_tokens=12, **options)) for p in prompts] == expected
        assert rows.generate(prompts, max_new_tokens=12, **options) == expected
        assert ["".join(rows.stream(p, max_new_tokens=12, **options)) for p in prompts] == expected
    many = random_prompts(90, seed=4)
    assert rows.generate(many, max_new_tokens=8) == paged.generate(many, max_new_tokens=8)
    for name in ("prompt_tokens", "new_tokens", "sequences", "finish_reasons"):
        assert rows.stats[name] == paged.stats[name]
    ids = [list(range(5, 40)), list(range(7, 42))]
    assert torch.equal(rows.logits(ids), paged.logits(ids))
    assert rows.score(ids[0]) == paged.score(ids[0])


# -------------------------------------------------------------------- what a step holds
def test_the_batch_stays_full() -> None:
    engine = PagedReference(hashed(), most_rows=16)
    model = model_of(engine, eos=())
    chance = random.Random(1)
    prompts = [[chance.randrange(2, 400) for _ in range(4)] for _ in range(50)]
    model.generate(prompts, max_new_tokens=20)
    sizes = [len(step) for step in engine.steps]
    assert max(sizes) == 8  # half of the rows: the rest is for prompts
    assert sum(sizes) / len(sizes) > 7
    assert model.stats["steps"] < 50 * 20 / 7


def test_long_prompts_are_read_in_chunks_while_others_decode() -> None:
    engine = PagedReference(hashed(), most_rows=100, context=None)
    model = model_of(engine, eos=())
    model.generate([[5], list(range(2, 100))], max_new_tokens=20, prefill_chunk=10)
    assert [sum(len(tokens) for _, tokens in step) for step in engine.steps[:10]] == [11] * 9 + [9]
    assert all(step[0][0] == place for place, step in enumerate(engine.steps[:20]))  # the short one never waits


def test_a_common_beginning_is_computed_once() -> None:
    system = list(range(10, 50))
    prompts = [[*system, 100 + i] for i in range(30)]
    engine = PagedReference(hashed(), most_rows=64)
    model = model_of(engine, eos=())
    model.generate(prompts, max_new_tokens=3)
    computed = [token for step in engine.steps for _, tokens in step for token in tokens]
    stats = model.stats
    assert stats["shared_prompt_tokens"] == 29 * 40
    assert len(computed) == 40 + 30 + 30 * 2
    assert stats["cache_bytes"] == 100 * (10 + 30)  # a page each for what is their own
    model.generate([system, system], max_new_tokens=2)  # full pages only: the last one is computed again for its logits
    assert model.stats["shared_prompt_tokens"] == 36


def test_pages_that_came_to_the_same_content_become_one() -> None:
    engine = PagedReference(hashed(), page_size=2, most_rows=64)
    model = model_of(engine, eos=())
    first, *others = model.generate([[5, 6]] * 4, max_new_tokens=41)
    assert all(other == first for other in others)
    assert model.stats["cache_bytes"] < 100 * (21 + 4 * 3)


def test_the_oldest_goes_on_when_memory_is_short() -> None:
    engine = PagedReference(hashed(), page_size=1)
    model = model_of(engine, eos=())
    model.generate([[5, 6], [7, 8], [9, 10]], max_new_tokens=9, cache_memory=10 * 100)
    assert model.stats["preemptions"] > 0
    first = [tokens for step in engine.steps for start, tokens in step[:1]]
    assert len(first[:9]) == 9
    assert [step[0][0] for step in engine.steps[:9]] == [0, *range(2, 10)]


def test_what_never_fits_is_refused_before_any_work() -> None:
    engine = PagedReference(hashed(), context=None)
    model = model_of(engine)
    for call in (model.generate, model.stream):
        with pytest.raises(RequestError, match="cache_memory"):
            call([5] * 50, max_new_tokens=8, cache_memory=1400)
        with pytest.raises(RequestError, match="max_new_tokens"):
            call([5], max_new_tokens=10**12)
    assert not engine.steps
    assert model.generate([5] * 50, max_new_tokens=7, cache_memory="1.4kB", ignore_eos=True)


def test_the_default_bound_grows_for_a_single_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.decoding import memory

    monkeypatch.setattr(memory, "available_bytes", lambda device: 4000)
    engine = PagedReference(hashed())
    assert memory.pool_pages(engine, [8] * 100, None) == 10  # a quarter of 40 pages
    assert memory.pool_pages(engine, [4 * 25, 8], None) == 25
    assert memory.pool_pages(engine, [8, 4], None) == 3  # no more than all of them use
    with pytest.raises(RequestError, match="free memory"):
        memory.pool_pages(engine, [4 * 31], None)


def test_progress_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of(PagedReference(hashed()))
    seen: list[tuple[int, int]] = []
    model.generate(
        [[i] for i in range(2, 32)], max_new_tokens=4, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[0] == (0, 30)
    assert seen[-1] == (30, 30)
    assert seen == sorted(set(seen))
    model.generate([5, 6], max_new_tokens=2, progress=True)
    out, err = capfd.readouterr()
    assert not out
    assert "1/1" in err
    with pytest.raises(RequestError, match="progress"):
        model.stream([5], progress=True)


# -------------------------------------------------------------------- every page comes back
def test_pages_come_back_after_errors_and_abandoned_streams(pools: list[Pages]) -> None:
    engine = PagedReference(hashed())
    model = model_of(engine, eos=())
    prompts = random_prompts(20, seed=3)
    expected = model.generate(prompts, max_new_tokens=10)
    total = len(engine.steps)
    for fail_at in (0, 1, 5, total - 1):
        engine.steps.clear()
        engine.fail_at = fail_at
        with pytest.raises(OSError, match="broke"):
            model.generate(prompts, max_new_tokens=10)
        assert model.stats["steps"] == fail_at
        assert "stopped by the caller" in model.stats["finish_reasons"]
    engine.fail_at = None
    for taken in (0, 1, 4):
        stream = model.stream(prompts[0], max_new_tokens=10)
        assert [next(stream) for _ in range(taken)] == expected[0][:taken]
        del stream
        gc.collect()
        assert not taken or model.stats["new_tokens"] == taken

    def stop(done: int, total: int) -> None:
        if done > 3:
            raise LookupError("enough")

    with pytest.raises(LookupError):
        model.generate(prompts, max_new_tokens=10, progress=stop)
    assert model.generate(prompts, max_new_tokens=10) == expected


def test_the_pool_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PagedReference(hashed())
    alive: list[Any] = []
    new_pages = engine.new_pages

    def watched(count: int, drafts: bool) -> torch.Tensor:
        pool = new_pages(count, drafts)
        alive.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(engine, "new_pages", watched)
    model = model_of(engine)
    model.generate([[5, 6], [7]], max_new_tokens=3)
    list(model.stream([5], max_new_tokens=3))
    gc.collect()
    assert [pool() for pool in alive] == [None, None]


# -------------------------------------------------------------------- the allocator alone
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pages_against_a_naive_account(data: st.DataObject) -> None:
    """Random sequences come, compute and go: nobody's pages change under them, and what is found is what was computed."""
    size, count = 2, 12
    pages = Pages(count, size)
    content: dict[int, tuple[int, ...] | None] = dict.fromkeys(range(count))  # the whole prefix that a page stands for
    held: list[tuple[list[int], list[int]]] = []  # (tokens, pages)
    for _ in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            _, own = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pages.release(own)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            found = pages.find(tokens)
            for place, entry in enumerate(found):
                assert content[entry.page] == tuple(tokens[: (place + 1) * size])
            needed = -(-len(tokens) // size) - len(found)
            if pages.available - pages.unused(found) < needed:
                continue
            own = [pages.hold(entry) for entry in found] + [pages.take() for _ in range(needed)]
            parent = found[-1].name if found else ROOT
            for place in range(len(found), len(tokens) // size):
                content[own[place]] = tuple(tokens[: (place + 1) * size])
                entry = pages.announce(own[place], parent, tokens[place * size : (place + 1) * size])
                own[place] = pages.settle(own[place], entry)
                parent = entry.name
            if len(tokens) % size:
                content[own[-1]] = None
            held.append((tokens, own))
        users: dict[int, int] = {}
        for tokens, own in held:
            for place, page in enumerate(own):
                users[page] = users.get(page, 0) + 1
                if (place + 1) * size <= len(tokens):
                    assert content[page] == tuple(tokens[: (place + 1) * size])
        assert pages.available == count - len(users)
    for _, own in held:
        pages.release(own)
    assert pages.available == count


def test_freed_pages_are_reused_longest_unused_first() -> None:
    pages = Pages(4, 2)
    kept = []
    for tokens in ([1, 2], [3, 4], [5, 6], [7, 8]):
        page = pages.take()
        pages.settle(page, pages.announce(page, ROOT, tokens))
        kept.append(page)
    for page in kept:
        pages.release([page])
    again = pages.find([1, 2])
    assert pages.hold(again[0]) == kept[0]
    pages.release(kept[:1])  # used last now
    assert pages.take() == kept[1]
    assert not pages.find([3, 4])
    assert [pages.find(t)[0].page for t in ([5, 6], [7, 8], [1, 2])] == [kept[2], kept[3], kept[0]]


def test_hashes_that_collide_are_told_apart() -> None:
    class Same(int):
        def __hash__(self) -> int:
            return 7

    pages = Pages(4, 1)
    for token in (1, 2, 3):
        page = pages.take()
        pages.settle(page, pages.announce(page, ROOT, [Same(token)]))
    assert [pages.find([Same(token)])[0].page for token in (1, 2, 3)] == [0, 1, 2]


# -------------------------------------------------------------------- engines without pages
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.booleans())
def test_groups_hold_every_prompt_once_and_little_padding(lengths: list[int], exact: bool) -> None:
    made = groups(lengths, exact)
    assert sorted(row for group in made for row in group) == list(range(len(lengths)))
    for group in made:
        own = [lengths[row] for row in group]
        assert len(group) <= request.GROUP_ROWS
        padding = max(own) * len(own) - sum(own)
        assert padding <= (max(request.FREE_PADDING, request.PADDING_SHARE * sum(own)) if exact else 0)


# -------------------------------------------------------------------- overhead
def test_the_scheduler_costs_little_per_token() -> None:
    """Overheads the engine's own step, at a vocabulary of 32000. The bound is wide, for busy machines; it is some 40 us."""

    class Free(PagedReference):
        row = torch.randn(1, 32000, generator=torch.Generator().manual_seed(0))

        def step(self, pool: Any, pieces: Any) -> torch.Tensor:
            return self.row

    model = model_of(Free(hashed(), page_size=16, most_rows=512, vocab=32000, context=2048), eos=())
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        model.generate([5, 6], max_new_tokens=1000)
        best = min(best, (time.thread_time() - started) / 1000)
    assert best < 300e-6
