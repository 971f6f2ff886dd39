"""Speculative decoding on the paged engine: whatever is proposed, texts are those of plain decoding."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from llama_engines import engines
from speculation_cases import Scripted, answers, model, model_over, prompts, speculation
from tiny_models import llama, tokenizer

from runtime.drafting.drafters.base import Drafter
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.speculation import DrafterThread
from runtime.kernels.cpu import library
from runtime.sampling.tree import Tree

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


@pytest.fixture(scope="module")
def plain() -> Any:
    return model()


@pytest.mark.parametrize("lengths", [Fixed(depth=6, nodes=12), Fixed(depth=3, nodes=40), Goodput(depth=8, nodes=24)])
@pytest.mark.parametrize("branches", [1, 3])
def test_greedy_texts_are_those_of_plain_decoding(plain: Any, lengths: Any, branches: int) -> None:
    texts = prompts(24, 150)
    truth = answers(plain, texts, max_new_tokens=40)
    drafter = Scripted(truth, branches=branches)
    drafting = model(speculation(drafter, lengths))
    assert drafting.generate(texts, max_new_tokens=40) == list(truth.values())
    stats = drafting.stats
    assert stats["new_tokens"] == plain.stats["new_tokens"]
    assert stats["accepted_tokens"] > 0
    assert drafter.begun == drafter.ended == 24
    assert 0 < stats["acceptance_rate"] < 1
    if isinstance(lengths, Fixed):
        assert stats["steps"] < plain.stats["steps"] / 1.5


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 1.3, "min_p": 0.02}],
)
def test_a_seed_gives_the_text_of_plain_decoding(plain: Any, options: Any) -> None:
    texts = prompts(12, 80)
    options = {**options, "seed": list(range(12)), "max_new_tokens": 30, "repetition_penalty": 1.1}
    truth = answers(plain, texts, **options)
    drafting = model(speculation(Scripted(truth)))
    assert drafting.generate(texts, **options) == list(truth.values())
    assert drafting.stats["accepted_tokens"] > 100


def test_a_repetition_penalty_counts_the_tokens_of_the_branch(plain: Any) -> None:
    texts = prompts(8, 20)
    options = {"repetition_penalty": 1.8, "max_new_tokens": 60}
    truth = answers(plain, texts, **options)
    drafting = model(speculation(Scripted(truth, right=1.0, branches=2)))
    assert drafting.generate(texts, **options) == list(truth.values())
    assert drafting.stats["mean_accepted"] > 1.5


def test_little_memory_puts_texts_aside_not_wrong(plain: Any) -> None:
    texts = prompts(9, 100)
    truth = answers(plain, texts, max_new_tokens=150, ignore_eos=True)
    drafting = model(speculation(Scripted(truth)))
    memory = 9 * drafting.engine.page_bytes
    found = drafting.generate(texts, max_new_tokens=150, ignore_eos=True, cache_memory=memory)
    assert found == list(truth.values())
    assert drafting.stats["preemptions"] > 0
    assert drafting.stats["cache_bytes"] <= memory


def test_shared_beginnings_stay_shared(plain: Any) -> None:
    start = prompts(1, 400, seed=5)[0] * 10
    texts = [start[:200] + end for end in prompts(6, 30)]
    truth = answers(plain, texts, max_new_tokens=80, ignore_eos=True)
    drafting = model(speculation(Scripted(truth)))
    assert drafting.generate(texts, max_new_tokens=80, ignore_eos=True) == list(truth.values())
    assert drafting.stats["shared_prompt_tokens"] == plain.stats["shared_prompt_tokens"] > 0


def test_texts_end_where_plain_ones_do(plain: Any) -> None:
    texts = prompts(16, 30, seed=7)
    truth = answers(plain, texts, max_new_tokens=100)
    drafting = model(speculation(Scripted(truth, right=1.0)))
    for count in (1, 2, 5):
        assert drafting.generate(texts, max_new_tokens=count) == [new[:count] for new in truth.values()]
    full = model(speculation(Scripted(truth, right=1.0)), max_position_embeddings=60)
    small = model(max_position_embeddings=60)
    short = [text for text in texts if len(text) < 50]
    assert [full.generate(text) for text in short] == [small.generate(text) for text in short]


def test_streams_give_the_same_tokens(plain: Any) -> None:
    text = prompts(1, 30, seed=2)[0]
    truth = answers(plain, [text], max_new_tokens=50)
    drafting = model(speculation(Scripted(truth)))
    assert list(drafting.stream(text, max_new_tokens=50)) == next(iter(truth.values()))


class Broken(Scripted):
    """Works twice, then does something wrong."""

    def __init__(self, truth: Any, what: str) -> None:
        super().__init__(truth)
        self.what, self.calls = what, 0

    @property
    def watched(self) -> bool:
        return self.what == "stalls"

    def draft(self, asks: Any) -> list[Tree]:
        self.calls += 1
        trees = super().draft(asks)
        if self.calls < 3:
            return trees
        if self.what == "raises":
            raise ZeroDivisionError("by zero\nand more")
        if self.what == "stalls":
            time.sleep(5)
        if self.what == "forgets one":
            return trees[1:]
        if self.what == "invents tokens":
            trees[0].add(400, -1)
        if self.what == "turns parents round":
            trees[0].add(7, len(trees[0]) + 1)
        if self.what == "repeats itself":
            trees[0].tokens, trees[0].parents = [9, 9], [-1, -1]
        return trees

    def learn(self, state: Any, verified: Any) -> None:
        if self.what == "raises late" and self.calls > 2:
            raise KeyError("x")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "ZeroDivisionError: by zero"),
        ("raises late", "KeyError"),
        ("stalls", "did not answer within 0.2 seconds"),
        ("forgets one", "it gave 2 trees for 3 sequences"),
        ("invents tokens", "token 400 of a vocabulary of 400"),
        ("turns parents round", "comes before its parent"),
        ("repeats itself", "same token twice"),
    ],
)
def test_a_drafter_that_fails_is_switched_off(plain: Any, what: str, said: str, caplog: Any) -> None:
    texts = prompts(3, 20)
    truth = answers(plain, texts, max_new_tokens=40, ignore_eos=True)
    drafter: Drafter = Broken(truth, what)
    together = speculation(drafter)
    together.thread = DrafterThread(0.2)
    drafting = model(together)
    assert drafting.generate(texts, max_new_tokens=40, ignore_eos=True) == list(truth.values())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert said in warnings[0]
    assert "switched off" in drafting.stats["drafter"]
    # It stays off.
    calls = drafter.calls  # type: ignore[attr-defined]
    assert drafting.generate(texts, max_new_tokens=40, ignore_eos=True) == list(truth.values())
    assert drafter.calls == calls  # type: ignore[attr-defined]


def test_stop_strings_end_texts_where_plain_decoding_does() -> None:
    """Also in the middle of what a step has accepted, of texts and of streams."""
    plain = model_over(engines(llama())[1], tokenizer=tokenizer())
    texts = ["Once upon a time", "cat", "def add(a, b):", "the moon"]
    ids = [plain.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[misc]
    truth = answers(plain, ids, max_new_tokens=60, ignore_eos=True)
    drafting = model_over(engines(llama())[1], speculation(Scripted(truth, right=0.95)), tokenizer=tokenizer())
    for stop in (["e"], ["a", "th"], ["zzzz"]):
        expected = plain.generate(texts, max_new_tokens=60, stop=stop)
        tokens, reasons = plain.stats["new_tokens"], plain.stats["finish_reasons"]
        assert ("stop" in reasons) == (stop != ["zzzz"])
        assert drafting.generate(texts, max_new_tokens=60, stop=stop) == expected
        assert drafting.stats["mean_accepted"] > 1.5
        assert (drafting.stats["new_tokens"], drafting.stats["finish_reasons"]) == (tokens, reasons)
        assert ["".join(drafting.stream(text, max_new_tokens=60, stop=stop)) for text in texts] == expected


def test_nothing_is_drafted_where_it_does_not_pay(plain: Any) -> None:
    texts = prompts(4, 20)
    truth = answers(plain, texts, max_new_tokens=100, ignore_eos=True)
    drafter = Scripted(truth, right=0.0)
    drafting = model(speculation(drafter, Goodput()))
    assert drafting.generate(texts, max_new_tokens=100, ignore_eos=True) == list(truth.values())
    first = drafting.stats["drafted_tokens"]
    drafting.generate(texts, max_new_tokens=100, ignore_eos=True)
    assert drafting.stats["drafted_tokens"] < first / 2
    assert drafting.stats["drafted_tokens"] < 80


def test_hidden_states_belong_to_their_tokens(plain: Any) -> None:
    texts = prompts(3, 70)
    truth = answers(plain, texts, max_new_tokens=20)

    class Reading(Scripted):
        wants = frozenset(["hidden", "prompt"])

        def begin(self, text: Any) -> Any:
            self.states = getattr(self, "states", {})
            self.states[tuple(text.tokens[: text.prompt])] = []
            return super().begin(text)

        def read(self, state: Any, start: int, tokens: Any, hidden: torch.Tensor) -> None:
            assert start == sum(map(len, self.states[state]))
            assert len(tokens) == len(hidden)
            self.states[state].append(hidden)

    drafter = Reading(truth)
    drafting = model(speculation(drafter))
    assert drafting.generate(texts, max_new_tokens=20, prefill_chunk=16) == list(truth.values())
    head = drafting.engine.module.get_output_embeddings()  # type: ignore[attr-defined]
    for verified in drafter.verified:
        assert verified.hidden is not None
        torch.testing.assert_close(head(verified.hidden), verified.logits, atol=1e-3, rtol=1e-3)
    for prompt, hidden in drafter.states.items():
        logits = plain.logits([list(prompt)])[0]
        torch.testing.assert_close(head(torch.cat(hidden)), logits, atol=1e-3, rtol=1e-3)
