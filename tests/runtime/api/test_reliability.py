"""What users do to a model: threads, Ctrl-C, streams left alone, thousands of stop strings, values of every kind."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged_reference import PagedReference, hashed, model_of
from tiny_models import llama, save, tokenizer

import runtime
from runtime.api.model import Model
from runtime.decoding.turns import Caller, Turns
from runtime.errors import CompressError, RequestError
from runtime.sampling.text import StopMatcher


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return runtime.load(save(llama(), tmp_path_factory.mktemp("llama")))


@pytest.fixture(params=["torch", "paged"])
def model(request: pytest.FixtureRequest, torch_model: Model) -> Model:
    return torch_model if request.param == "torch" else model_of(PagedReference(hashed()), eos=())


# -------------------------------------------------------------------- threads
def calls(model: Model) -> list[Any]:
    """Functions that each ask the model something, with results to compare."""
    prompts = ["Once upon a time", "cat", "def add(a, b):"]
    return [
        lambda: model.generate(prompts[0], max_new_tokens=12),
        lambda: model.generate(prompts, max_new_tokens=8, temperature=1.0, seed=5),
        lambda: model.generate([[5, 6, 7], [8]], max_new_tokens=9, repetition_penalty=1.3),
        lambda: "".join(model.stream(prompts[1], max_new_tokens=10, stop=["zz", "e"])),
        lambda: list(model.stream([9, 10], max_new_tokens=10, ignore_eos=True)),
        lambda: model.score(prompts[2]).log_likelihood,
        lambda: model.logits([[4, 5, 6]]).tolist(),
    ]


def test_calls_from_threads_give_what_they_give_alone(model: Model) -> None:
    work = calls(model)
    expected = [call() for call in work]
    chosen = [random.Random(i).randrange(len(work)) for i in range(60)]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda i: work[i](), chosen))
    assert results == [expected[i] for i in chosen]


def test_every_thread_has_numbers_of_its_own(model: Model) -> None:
    def count(new: int) -> int:
        model.generate([5, 6], max_new_tokens=new, ignore_eos=True)
        time.sleep(0.01)
        return int(model.stats["new_tokens"])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(count, range(1, 17))) == list(range(1, 17))
    model.generate([5, 6], max_new_tokens=3, ignore_eos=True)
    with ThreadPoolExecutor(1) as threads:  # has had none: the last one of all
        assert threads.submit(lambda: model.stats["new_tokens"]).result() == 3


def test_a_stream_that_nobody_reads_holds_nobody_up(model: Model) -> None:
    expected = list(model.stream([5, 6], max_new_tokens=12, ignore_eos=True))
    stream = model.stream([5, 6], max_new_tokens=12, ignore_eos=True)
    first = next(stream)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(model.generate, [7, 8], max_new_tokens=5).result(timeout=60)
    streams = [model.stream([5, 6], max_new_tokens=12, ignore_eos=True) for _ in range(3)]
    together = list(zip(*streams, strict=True))  # three in one thread, in turns
    assert [token for token, _, _ in together] == expected
    assert all(len(set(row)) == 1 for row in together)
    assert [first, *stream] == expected


def test_turns_are_fair() -> None:
    """A lock alone would give one thread hundreds of turns in a row."""
    turns = Turns()
    order: list[int] = []
    begin = threading.Barrier(3)

    def step(me: int) -> None:
        order.append(me)
        time.sleep(2e-4)

    def work(me: int) -> None:
        caller = Caller(turns)
        begin.wait()
        for _ in range(100):
            caller.run(step, me)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == [0] * 100 + [1] * 100 + [2] * 100
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 150, "most turns go to another thread"


def test_a_stale_hint_costs_little() -> None:
    turns = Turns()
    turns.waiting.add(-1)  # what an interrupt may leave
    caller = Caller(turns)
    started = time.perf_counter()
    assert [caller.run(int, i) for i in range(100)] == list(range(100))
    assert time.perf_counter() - started < 2
    assert not turns.waiting


def test_two_threads_of_torch_give_what_one_gives(torch_model: Model) -> None:
    """Not bit for bit (sums may be cut differently), but to a tolerance; greedy tokens are the same."""
    ids = [[5, 6, 7, 8] * 20]
    one, text = torch_model.logits(ids), torch_model.generate(ids[0], max_new_tokens=20)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.allclose(torch_model.logits(ids), one, rtol=1e-5, atol=1e-4)
        assert torch_model.generate(ids[0], max_new_tokens=20) == text
    finally:
        torch.set_num_threads(before)


# -------------------------------------------------------------------- Ctrl-C
@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """KeyboardInterrupt in the main thread, wherever it then is; none once the block is left."""
    armed = True

    def handler(*_: Any) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    try:
        timer.start()
        yield
    finally:
        armed = False
        timer.cancel()
        timer.join()
        time.sleep(0)  # a signal that came just now is handled here, and does nothing
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_leaves_a_usable_model(model: Model) -> None:
    work = calls(model)
    expected = [call() for call in work]
    chance = random.Random(0)
    hits = 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and hits < 100:
        choice = chance.randrange(len(work))
        try:
            with interrupted_after(chance.uniform(0, 0.02)):
                # Python swallows an interrupt that comes while a destructor runs: then there is none to wait for.
                late = time.monotonic() + 2
                while time.monotonic() < late:
                    assert work[choice]() == expected[choice]
        except KeyboardInterrupt:
            hits += 1
        assert not model._turns.lock.locked()
        assert not torch.is_inference_mode_enabled()
    assert hits > 10
    assert [call() for call in work] == expected


def test_ctrl_c_while_waiting_for_another_thread(model: Model) -> None:
    expected = model.generate([5, 6], max_new_tokens=5)
    with model._turns.lock, pytest.raises(KeyboardInterrupt), interrupted_after(0.05):
        model.generate([5, 6], max_new_tokens=5)
    assert model.generate([5, 6], max_new_tokens=5) == expected


def test_errors_leave_a_usable_model() -> None:
    engine = PagedReference(hashed())
    model = model_of(engine, eos=())
    expected = model.generate([5, 6], max_new_tokens=5)
    for error in (OSError, CompressError, KeyboardInterrupt, MemoryError):
        engine.following, following = _raises(error), engine.following
        for call in (lambda: model.generate([[5], [6]]), lambda: list(model.stream([5])), lambda: model.score([5, 6])):
            with pytest.raises(error):
                call()
        engine.following = following
        assert model.generate([5, 6], max_new_tokens=5) == expected


def _raises(error: type[BaseException]) -> Any:
    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        raise error("in the middle")

    return logits


# -------------------------------------------------------------------- stop strings
class NaiveStops:
    """The definition: all of the text, every stop string, after every piece."""

    def __init__(self, stops: list[str]) -> None:
        self.stops = stops

    def run(self, text: str) -> tuple[str, bool]:
        ends = [(text.find(s) + len(s), text.find(s)) for s in self.stops if s in text]
        return (text[: min(ends)[1]], True) if ends else (text, False)

    def certain(self, text: str) -> str:
        """What may be given out while `text` may go on: all but the longest end that begins a stop string."""
        keep = max((n for s in self.stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - keep]


letters = st.sampled_from("ab\ud800é")


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.text(letters, max_size=5), max_size=12),
    stops=st.lists(st.text(letters, min_size=1, max_size=6), max_size=6),
)
@example(text=["aaab"], stops=["aab"])
@example(text=["xab", "c"], stops=["abc", "bc", "c"])
def test_stop_strings_against_the_naive_definition(text: list[str], stops: list[str]) -> None:
    naive, matcher = NaiveStops(stops), StopMatcher(stops)
    given_out, seen = "", ""
    for piece in text:
        given_out += matcher.push(piece)
        seen += piece
        if matcher.found:
            break
        assert given_out == naive.certain(seen)
    if not matcher.found:
        given_out += matcher.finish()
    assert (given_out, matcher.found) == naive.run("".join(text))


def test_ten_thousand_stop_strings_cost_what_a_few_do(model: Model) -> None:
    chance = random.Random(0)
    stops = ["".join(chance.choices("abcdefgh \n", k=chance.randint(8, 30))) for _ in range(10_000)]
    stops += ["\ud800", "x" * 100_000, *("e" * i + "é" for i in range(1, 300))]
    prompts = ["Once upon a time", "cat"] * 10
    expected = model.generate(prompts, max_new_tokens=20)
    expected = [NaiveStops(stops).run(text)[0] for text in expected]
    started = time.perf_counter()
    assert model.generate(prompts, max_new_tokens=20, stop=stops) == expected
    assert time.perf_counter() - started < 10
    matcher = StopMatcher(stops)
    started = time.perf_counter()
    for _ in range(1000):
        matcher.push("eeee once upon a time there was a cat")
    assert time.perf_counter() - started < 5


# -------------------------------------------------------------------- values of every kind
HUGE = 10**12
VAST = 10**5000  # Python refuses to print it
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": HUGE}, "max_new_tokens 1000000000000 and the prompt of 2 tokens exceed"),
    ({"max_new_tokens": VAST}, "max_new_tokens must be an integer"),
    ({"max_new_tokens": -VAST}, "max_new_tokens must be an integer"),
    ({"max_new_tokens": "5"}, "max_new_tokens must be an integer"),
    ({"max_new_tokens": np.bool_(True)}, "max_new_tokens"),
    ({"max_new_tokens": np.float64(3)}, "max_new_tokens"),
    ({"max_new_tokens": [3]}, "max_new_tokens"),
    ({"temperature": None}, "temperature must be a number"),
    ({"temperature": VAST}, "temperature must be a number"),
    ({"temperature": -1e-300}, "temperature must be a number"),
    ({"temperature": float("-inf")}, "temperature must be a number"),
    ({"temperature": True}, "temperature must be a number"),
    ({"temperature": 1j}, "temperature must be a number"),
    ({"top_k": -(10**9)}, "top_k must be an integer"),
    ({"top_k": VAST}, "top_k must be an integer"),
    ({"top_p": float("nan")}, "top_p must be above 0"),
    ({"min_p": float("nan")}, "min_p must be between"),
    ({"repetition_penalty": 1e308}, "repetition_penalty must be above 0"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty must be above 0"),
    ({"seed": VAST}, "seed must be an integer"),
    ({"seed": []}, "seed has 0 entries for 1 prompts"),
    ({"stop": ["a"] * 10_000 + [""]}, "stop must be a non-empty text"),
    ({"stop": b"x"}, "stop must be a non-empty text"),
    ({"cache_memory": 0}, "cache_memory must be a number of bytes"),
    ({"cache_memory": "2 bananas"}, "cache_memory must be a number of bytes"),
    ({"cache_memory": "1 Gb per prompt"}, "cache_memory must be a number of bytes"),
    ({"cache_memory": True}, "cache_memory must be a number of bytes"),
    ({"prefill_chunk": 0}, "prefill_chunk must be an integer"),
    ({"progress": 3}, "progress must be True, False or a function"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(list(o)) for o, _ in BAD])
def test_bad_values_are_one_sentence(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        model.generate([5, 6], **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "prompt",
    [
        [], "", [[]], [[5], []], ["a", ""], [-1], [400], [2**63], [VAST], [[5], [-VAST]], [True], [np.bool_(True)], [None],
        [5.0], [np.float32(5)], [[5], "a"], {"a": 1}, {5, 6}, b"bytes", object(), float("nan"), "\ud800", ["ok", "a\udfff"],
        np.array([[1.0]]), np.array(5), torch.tensor(5), torch.tensor([0.5]), np.zeros((0, 3)), np.zeros((1, 2, 3), int),
        [5] * 1000, "word " * 1000,
    ],
    ids=lambda value: ascii(type(value).__name__),
)  # fmt: skip
def test_bad_prompts_are_one_sentence(model: Model, prompt: Any) -> None:
    for call in (model.generate, model.stream, model.score):
        with pytest.raises(RequestError) as caught:
            call(prompt)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("ids", [[[VAST]], [[2**63]], [[-1]], [[1j]], [[5] * 1000], [], 5, None, [["a"]], [[None]]])
def test_bad_ids_for_logits_are_one_sentence(model: Model, ids: Any) -> None:
    with pytest.raises(RequestError) as caught:
        model.logits(ids)
    assert "\n" not in str(caught.value)


def test_extreme_values_give_right_answers(model: Model) -> None:
    prompt = tokenizer()("Once upon a time")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 12}
    greedy = model.generate(prompt, **options)
    for temperature in (0, 0.0, -0.0, 5e-324, 1e-300, 1e-30, 1e-9, np.float64(1e-300)):
        assert model.generate(prompt, temperature=temperature, **options) == greedy
    assert model.generate(prompt, temperature=9.0, top_p=5e-324, **options) == greedy
    sampled = model.generate(prompt, temperature=1.0, seed=3, **options)
    for same in ({"top_k": 10**9}, {"top_k": 400}, {"top_p": 1}, {"min_p": 0}, {"top_k": None}, {"min_p": 1e-300}):
        assert model.generate(prompt, temperature=1.0, seed=3, **same, **options) == sampled
    assert model.generate(prompt, temperature=np.float32(1), seed=np.int64(3), max_new_tokens=np.int32(12)) == sampled
    assert len(model.generate(prompt, temperature=1e308, seed=3, ignore_eos=True, **options)) == 12
    assert len(model.generate(prompt, temperature=1.0, repetition_penalty=1e4, ignore_eos=True, **options)) == 12
    assert model.generate(prompt, stop=["\ud800", "zzzzzz"], **options) == greedy
    assert model.generate(prompt, seed=2**63 - 1, temperature=1.0, **options)


def test_arrays_and_tensors_are_prompts(model: Model) -> None:
    expected = model.generate([5, 6, 7], max_new_tokens=4)
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), [np.int64(5), 6, np.uint8(7)]):
        result = model.generate(prompt, max_new_tokens=4)
        assert result == expected
        assert all(type(token) is int for token in result)
    for batch in (np.array([[5, 6, 7]]), torch.tensor([[5, 6, 7]]), [np.array([5, 6, 7])], ((5, 6, 7),)):
        assert model.generate(batch, max_new_tokens=4) == [expected]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop"]
        ),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.text(max_size=2)),
    )
)
def test_any_values_give_an_answer_or_a_request_error(options: dict[str, Any]) -> None:
    model = model_of(PagedReference(hashed(), context=40), eos=())
    try:
        result = model.generate([5, 6], **options)
    except RequestError as error:
        result, message = [], str(error)
    else:
        message = ""
    assert all(0 <= token < 400 for token in result)
    assert "\n" not in message


# -------------------------------------------------------------------- for a while
@pytest.mark.slow
def test_twenty_seconds_of_random_requests(tmp_path: Path) -> None:
    """benchmarks/soak.py in small; whether memory stays flat takes longer to see."""
    checkpoint = save(llama(max_position_embeddings=256), tmp_path)
    script = Path(__file__).parents[3] / "benchmarks" / "soak.py"
    done = subprocess.run(
        [sys.executable, script, "--minutes", "0.33", checkpoint], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["unexpected_errors"], result["wrong_answers"]) == (0, 0)
    assert result["requests"] > 20
    assert result["rss_peak_mb"] < result["rss_start_mb"] + 300
