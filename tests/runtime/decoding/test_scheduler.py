"""One scheduler a model: calls of all threads share steps and prefixes, and nothing that happens to one of them harms another."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from paged_reference import PagedReference, RowReference, hashed, model_of
from speculation_cases import Scripted, ScriptedChain

import runtime
from runtime.api.model import Model
from runtime.decoding import memory
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.speculation import Speculation
from runtime.errors import CompressError, RequestError

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 8},
    {"temperature": 1.2, "min_p": 0.05, "seed": 4, "prefill_chunk": 3},
    {"ignore_eos": True},
]
PROMPTS = [[*range(20, 33 + 2 * i), 50 + i] for i in range(6)]


class Slow(PagedReference):
    """A step takes a millisecond in which other threads may run, as in C."""

    def read(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        time.sleep(1e-3)
        return super().read(*arguments, **keywords)


def pages_are_back(model: Model) -> None:
    """Nobody holds a page, and nobody is there."""
    scheduler = model._scheduler
    assert scheduler is not None
    assert not scheduler._calls
    assert not scheduler.batch.running
    assert not scheduler.batch.waiting
    pages = scheduler.batch.pages
    assert pages is None or pages.available == pages.count


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What functions give that begin at once, each in a thread of its own; the exception of one that raises."""
    begin = threading.Barrier(len(calls))

    def work(call: Callable[[], Any]) -> Any:
        begin.wait()
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(work, calls))


# -------------------------------------------------------------------- calls share steps
@pytest.mark.parametrize("prefix_cache", [0, 2000])
def test_calls_with_any_options_decode_in_the_same_steps(prefix_cache: int) -> None:
    alone = model_of(PagedReference(hashed()), eos=range(20))
    pairs = list(zip(PROMPTS, OPTIONS, strict=True))
    expected = [alone.generate(prompt, max_new_tokens=25, **options) for prompt, options in pairs]
    engine = Slow(hashed())
    model = model_of(engine, eos=range(20), prefix_cache=prefix_cache)
    counts: dict[int, Any] = {}

    def ask(index: int) -> Any:
        prompt, options = pairs[index]
        if index % 2:
            found = list(model.stream(prompt, max_new_tokens=25, **options))
        else:
            found = model.generate(prompt, max_new_tokens=25, **options)
        counts[index] = model.stats
        return found

    assert together([lambda index=index: ask(index) for index in range(6)]) == expected  # type: ignore[misc]
    for index, stats in counts.items():
        assert stats["new_tokens"] == len(expected[index])
        assert stats["prompt_tokens"] == len(PROMPTS[index])
        assert stats["sequences"] == len(stats["finish_reasons"]) == 1
        assert stats["steps"] >= len(expected[index])
    assert sum(len(step) for step in engine.steps) > 1.5 * len(engine.steps), "steps hold more than one call"
    assert len(engine.steps) < sum(map(len, expected))
    pages_are_back(model)


def test_streams_of_one_thread_share_steps_and_run_ahead_a_little() -> None:
    engine = PagedReference(hashed())
    model = model_of(engine, eos=())
    expected = [model.generate(prompt, max_new_tokens=60) for prompt in PROMPTS[:2]]
    first, second = (model.stream(prompt, max_new_tokens=60) for prompt in PROMPTS[:2])
    begun = [next(first)]
    engine.steps.clear()
    assert list(second) == expected[1]
    longest = [len(step) for step in engine.steps]
    assert longest.count(2) == 15, "the other one goes on for some tokens"
    assert [*begun, *first] == expected[0]
    pages_are_back(model)


def test_a_single_prompt_is_not_behind_a_thousand() -> None:
    engine = Slow(hashed(), most_rows=8)
    model = model_of(engine, eos=())
    expected = model.generate([9, 10], max_new_tokens=4)
    done: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        many = threads.submit(
            model.generate, [[5, i] for i in range(200)], max_new_tokens=4, progress=lambda d, _: done.append(d)
        )
        while not done or not done[-1]:
            time.sleep(1e-3)
        assert model.generate([9, 10], max_new_tokens=4) == expected
        at = done[-1]
        assert len(many.result()) == 200
    assert at < 100
    pages_are_back(model)


def test_a_call_with_memory_of_its_own_takes_turns() -> None:
    model = model_of(Slow(hashed()), eos=())
    expected = model.generate(PROMPTS, max_new_tokens=12)
    calls = [lambda: model.generate(PROMPTS, max_new_tokens=12, cache_memory=4000)] * 2
    calls += [lambda: model.generate(PROMPTS, max_new_tokens=12)] * 2
    assert together(calls) == [expected] * 4
    pages_are_back(model)


# -------------------------------------------------------------------- cancelled, closed, thrown away
@pytest.mark.parametrize("kind", ["pages", "rows"])
def test_any_thread_may_cancel_a_call(kind: str) -> None:
    engine: Any = PagedReference(hashed()) if kind == "pages" else RowReference(hashed())
    model = model_of(engine, eos=())
    expected = [model.generate(prompt, max_new_tokens=40) for prompt in PROMPTS[:2]]
    event = threading.Event()
    other = model.stream(PROMPTS[1], max_new_tokens=40)
    begun = [next(other)]
    stream = model.stream(PROMPTS[0], max_new_tokens=40, cancel=event)
    found = [next(stream) for _ in range(5)]
    threading.Thread(target=event.set).start()
    event.wait()
    found += stream
    assert 5 <= len(found) < 40
    assert found == expected[0][: len(found)]
    assert model.stats["finish_reasons"] == ["cancelled"]
    assert [*begun, *other] == expected[1]
    assert model.generate(PROMPTS[0], cancel=event) == [], "it was set before"
    with pytest.raises(RequestError, match="cancel must be"):
        model.generate([5], cancel=3)
    if kind == "pages":
        pages_are_back(model)


def test_a_cancelled_batch_gives_what_it_has_and_its_withheld_text() -> None:
    model = model_of(PagedReference(hashed()), eos=())
    full = model.generate(["Once upon", "cat"], max_new_tokens=[30, 30][0], stop=["zzzz"])
    event = threading.Event()

    class Counting(PagedReference):
        def read(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            if len(self.steps) == 9:
                event.set()
            return super().read(*arguments, **keywords)

    model = model_of(Counting(hashed()), eos=())
    parts = model.generate(["Once upon", "cat"], max_new_tokens=30, stop=["zzzz"], cancel=event)
    assert all(0 < len(part) < len(whole) for part, whole in zip(parts, full, strict=True))
    assert all(whole.startswith(part.rstrip("\ufffd")) for part, whole in zip(parts, full, strict=True))
    assert model.stats["finish_reasons"] == ["cancelled"] * 2


def test_whoever_waits_for_a_prefix_computes_it_when_its_owner_leaves() -> None:
    system = list(range(20, 80))
    engine = PagedReference(hashed(), most_rows=16)
    model = model_of(engine, eos=())
    expected = [model.generate([*system, i], max_new_tokens=5) for i in (3, 4)]
    event = threading.Event()
    owner = model.stream([*system, 2], max_new_tokens=5, cancel=event)
    others = [model.stream([*system, i], max_new_tokens=5) for i in (3, 4)]
    steps = len(engine.steps)
    read = engine.read

    def cancelling(*arguments: Any) -> torch.Tensor:
        if len(engine.steps) == steps + 2:
            event.set()
        return read(*arguments)

    engine.read = cancelling  # type: ignore[method-assign]
    found = together([lambda: list(owner), *(lambda other=other: list(other) for other in others)])  # type: ignore[misc]
    assert found == [[], *expected]
    pages_are_back(model)


def test_a_stream_that_nobody_reads_gives_its_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 12 * 100)  # a quarter of it: 12 pages
    engine = PagedReference(hashed())
    model = model_of(engine, eos=())
    expected = [model.generate([5 + i] * 20, max_new_tokens=24) for i in range(2)]  # 11 pages each
    held = model.stream([5] * 20, max_new_tokens=24)
    begun = [next(held)]
    assert model.generate([6] * 20, max_new_tokens=24) == expected[1]
    assert [*begun, *held] == expected[0]
    assert model.stats["preemptions"] == 1
    del held
    gc.collect()
    pages_are_back(model)


# -------------------------------------------------------------------- errors and interrupts
def test_an_error_of_the_engine_reaches_all_that_took_part() -> None:
    engine = Slow(hashed())
    model = model_of(engine, eos=(), prefix_cache=10**6)
    expected = [model.generate(prompt, max_new_tokens=30) for prompt in PROMPTS]
    waiting = model.stream(PROMPTS[5], max_new_tokens=30)
    begun = [next(waiting)]
    for _ in range(20):  # until it is ahead of its reader, and takes no part
        model.generate(PROMPTS[0], max_new_tokens=2)
    engine.steps.clear()
    engine.fail_at = 25
    found = together([lambda prompt=prompt: model.generate(prompt, max_new_tokens=30) for prompt in PROMPTS[:5]])  # type: ignore[misc]
    assert [type(each) for each in found] == [OSError] * 5
    engine.fail_at = None
    assert [*begun, *waiting] == expected[5]
    assert model.generate(PROMPTS, max_new_tokens=30) == expected
    pages_are_back(model)


@pytest.mark.parametrize("where", ["engine", "tokens"])
def test_an_interrupt_in_one_thread_changes_nothing_for_the_others(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hits who leads, in the middle of a step or of the tokens that came of it."""
    engine = Slow(hashed())
    model = model_of(engine, eos=())
    options = OPTIONS[1:4]
    texts = ["Once upon a time", "cat", "def add(a, b):"]
    expected = [model.generate(text, max_new_tokens=40, **each) for text, each in zip(texts, options, strict=True)]
    victim: list[int] = []
    hits: list[int] = []

    def hit() -> None:
        if threading.get_ident() in victim and len(hits) < 30 and random.random() < 0.2:
            hits.append(1)
            raise KeyboardInterrupt

    read, push = engine.read, runtime.sampling.output.SequenceOutput.push

    def reading(*arguments: Any) -> torch.Tensor:
        found = read(*arguments)
        hit()
        return found

    def pushing(self: Any, token: int) -> None:
        hit()
        push(self, token)

    if where == "engine":
        engine.read = reading  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(runtime.sampling.output.SequenceOutput, "push", pushing)

    def interrupted() -> int:
        victim.append(threading.get_ident())
        while len(hits) < 4:
            with suppress(KeyboardInterrupt):
                model.generate([5, 6, 7], max_new_tokens=40)
        return len(hits)

    def ask(index: int) -> bool:
        while len(hits) < 4:
            if model.generate(texts[index], max_new_tokens=40, **options[index]) != expected[index]:
                return False
        return True

    found = together([interrupted, *(lambda index=index: ask(index) for index in range(3))])  # type: ignore[misc]
    assert found[0] >= 4
    assert found[1:] == [True] * 3
    pages_are_back(model)


def test_broken_numbers_end_the_calls_and_not_the_model() -> None:
    engine = PagedReference(hashed())
    model = model_of(engine, eos=())
    expected = model.generate(PROMPTS[0], max_new_tokens=9)
    following, engine.following = engine.following, lambda ids: torch.full((400,), float("nan"))
    with pytest.raises(CompressError, match="NaN"):
        model.generate(PROMPTS[0], max_new_tokens=9)
    engine.following = following
    assert model.generate(PROMPTS[0], max_new_tokens=9) == expected


# -------------------------------------------------------------------- prefixes outlive a call
def test_prefixes_outlive_a_call_up_to_a_bound() -> None:
    engine = PagedReference(hashed())
    model = model_of(engine, eos=(), prefix_cache=1000)  # 10 pages of 4
    plain = model_of(PagedReference(hashed()), eos=())
    texts = [[100 + i] * 21 for i in range(4)]
    for text, shared in ((0, 0), (0, 20), (1, 0), (0, 16), (2, 0), (0, 16), (1, 0), (3, 0)):
        prompt = texts[text]
        assert model.generate(prompt, max_new_tokens=3) == plain.generate(prompt, max_new_tokens=3)
        assert model.stats["shared_prompt_tokens"] == shared, (text, shared)
        assert model.stats["prompt_tokens"] == 21
        pages = model._scheduler.batch.pages  # type: ignore[union-attr]
        assert pages is not None
        assert pages.touched <= 10, "the oldest goes where there would be more"
    assert plain.stats["shared_prompt_tokens"] == 0, "0: nothing outlives a call"
    assert plain._scheduler.batch.pages is None  # type: ignore[union-attr]
    # Larger than what may stay: freed with the call.
    model.generate([[7] * 40, [8] * 40], max_new_tokens=3)
    assert model._scheduler.batch.pages is None  # type: ignore[union-attr]


def test_a_session_keeps_more_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(PagedReference(hashed()), eos=(), prefix_cache=500)
    session = model.session()
    prompt = list(range(20, 100))
    session.generate(prompt, max_new_tokens=3)
    model.generate(prompt, max_new_tokens=3)
    assert model.stats["shared_prompt_tokens"] == 76, "what one call computed is there for all"
    del session
    gc.collect()
    assert model._scheduler.batch.pages is None  # type: ignore[union-attr]


def test_a_larger_request_gets_a_larger_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 8 * 100)
    engine = Slow(hashed())
    model = model_of(engine, eos=(), prefix_cache=10**6)
    texts: list[tuple[list[int], int]] = [([5] * 10, 20), ([6] * 60, 20), ([7] * 9, 20), ([8] * 40, 30)]
    plain = model_of(PagedReference(hashed()), eos=())
    expected = [plain.generate(prompt, max_new_tokens=new) for prompt, new in texts]
    model.generate([1], max_new_tokens=1)
    assert model._scheduler.batch.pages.count == 8  # type: ignore[union-attr]
    calls = [lambda prompt=prompt, new=new: model.generate(prompt, max_new_tokens=new) for prompt, new in texts]
    assert together(calls) == expected  # type: ignore[arg-type]
    assert model._scheduler.batch.pages.count == 20  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="free memory"):
        model.generate([5] * 90, max_new_tokens=30)
    pages_are_back(model)


# -------------------------------------------------------------------- real engines
@pytest.mark.parametrize("options", [{}, {"drafter": "lookup"}], ids=["plain", "lookup"])
def test_the_decoder_in_c(tiny_artifact: Any, options: dict[str, Any]) -> None:
    model = runtime.load(tiny_artifact, dtype="float32", prefix_cache="1MB", **options)
    plain = runtime.load(tiny_artifact, dtype="float32", drafter=False, prefix_cache=0)
    limit = model.engine.vocab_size
    chance = random.Random(0)
    asked = [([chance.randrange(2, limit) for _ in range(3)] * 6, each) for each in (*OPTIONS[:4], *OPTIONS[:4])]
    expected = [plain.generate(prompt, max_new_tokens=24, **each) for prompt, each in asked]
    for _ in range(2):
        calls = [lambda prompt=p, each=e: model.generate(prompt, max_new_tokens=24, **each) for p, e in asked]
        assert together(calls) == expected  # type: ignore[arg-type]
    if not model.engine.lockstep:
        pages_are_back(model)


def test_calls_with_different_drafters_share_steps(tiny_artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = runtime.load(tiny_artifact, dtype="float32", drafter=False, prefix_cache=0)
    if model.engine.lockstep:
        pytest.skip("the engine has no pages: no C compiler")
    monkeypatch.setattr("speculation_cases.VOCABULARY", model.engine.vocab_size)
    prompts = [[7, 8, 9] * 8, [4, 5] * 9, [6, 7, 8, 9] * 5]
    expected = [model.generate(prompt, max_new_tokens=40, ignore_eos=True) for prompt in prompts]
    truth = {tuple(prompt): new for prompt, new in zip(prompts, expected, strict=True)}
    drafters = [Speculation(kind(truth), lengths=Fixed(depth=3, nodes=6)) for kind in (Scripted, ScriptedChain)]
    streams = []
    for speculation, prompt in zip([*drafters, None], prompts, strict=True):
        model.speculation = speculation
        streams.append(model.stream(prompt, max_new_tokens=40, ignore_eos=True))
    found = [[next(stream)] for stream in streams]
    for index in (2, 0, 1):
        found[index] += streams[index]
        stats = model.stats
        assert stats["new_tokens"] == 40
        assert (stats["drafted_tokens"] > 0) == (index < 2)
        assert stats["accepted_tokens"] <= stats["drafted_tokens"]
        assert (stats["draft_seconds"] > 0) == (index < 2)
    assert found == expected
    pages_are_back(model)


# -------------------------------------------------------------------- for a while
@pytest.mark.slow
def test_random_calls_and_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams closed and cancelled, errors, a pool too small for all: every answer that comes is right, and every page comes back."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 70 * 100)
    engine = PagedReference(hashed(), page_size=2)
    plain = model_of(PagedReference(hashed()), eos=range(9))
    model = model_of(engine, eos=range(9), prefix_cache=3000)
    deadline = time.monotonic() + 20
    wrong: list[Any] = []
    counts = {"answers": 0, "errors": 0, "parts": 0, "preemptions": 0}

    def ask(chance: random.Random) -> None:
        prompt = [*range(20, 20 + chance.randrange(0, 40)), *(chance.randrange(2, 400) for _ in range(5))]
        options = {**chance.choice(OPTIONS), "max_new_tokens": chance.randint(1, 40)}
        expected = plain.generate(prompt, cache_memory=10**5, **options)
        event = threading.Event()
        kind = chance.randrange(6)
        if kind == 0:
            threading.Timer(chance.uniform(0, 0.05), event.set).start()
        if chance.random() < 0.03:
            engine.fail_at = len(engine.steps) + 2
        stream: Any = model.stream(prompt, cancel=event, **options)
        found: list[int] = []
        for token in stream:
            found.append(token)
            if kind == 1 and chance.random() < 0.1:
                stream.close()
            if kind == 2 and chance.random() < 0.1:
                time.sleep(0.01)
        counts["parts" if len(found) < len(expected) else "answers"] += 1
        counts["preemptions"] += model.stats["preemptions"]
        if found != expected[: len(found)] or (kind > 1 and found != expected):
            wrong.append((prompt, options, found, expected))
        if kind > 3 and model.generate([prompt, prompt[::-1]], **options)[0] != expected:
            wrong.append((prompt, options))

    def work(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < deadline:
            try:
                ask(chance)
            except OSError:
                engine.fail_at = None
                counts["errors"] += 1

    found = together([lambda number=number: work(number) for number in range(6)])  # type: ignore[misc]
    assert found == [None] * 6
    assert not wrong
    assert min(counts.values()) > 5, counts
    pages_are_back(model)
