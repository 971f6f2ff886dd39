"""What goes wrong in the middle of speculative decoding, and what is counted and told where texts end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculation_cases import Scripted, answers, model, prompts, speculation

from runtime.drafting.drafters.token_recycling import TokenRecycling
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.verify.target import TargetLogits
from runtime.errors import CompressError
from runtime.kernels.cpu import library
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import Tree

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


@pytest.fixture(scope="module")
def plain() -> Any:
    return model()


class Failing(Scripted):
    """Fails in one of its methods, from the `after`-th call on.

    Attributes:
        lock: of the model's turns, if it is to be held whenever the drafter is called.
    """

    wants = frozenset(["hidden", "prompt"])

    def __init__(self, truth: Any, method: str = "", after: int = 1) -> None:
        super().__init__(truth, right=1.0)
        self._method, self._left = method, after
        self.lock: Any = None
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        assert self.lock is None or self.lock.locked()
        if name == self._method:
            self._left -= 1
            if self._left <= 0:
                raise OverflowError(f"in {name}")

    def begin(self, text: Any) -> Any:
        self._called("begin")
        return super().begin(text)

    def read(self, state: Any, start: int, tokens: Any, hidden: Any) -> None:
        self._called("read")

    def draft(self, asks: Any) -> Any:
        self._called("draft")
        return super().draft(asks)

    def learn(self, state: Any, verified: Any) -> None:
        self._called("learn")
        super().learn(state, verified)

    def end(self, state: Any) -> None:
        self._called("end")
        super().end(state)


@pytest.mark.parametrize(
    ("method", "after"), [("begin", 1), ("begin", 2), ("read", 1), ("read", 3), ("learn", 4), ("end", 1)]
)
def test_a_drafter_may_fail_anywhere(plain: Any, method: str, after: int, caplog: Any) -> None:
    # The second prompt is still being read, in small pieces, while the first text is drafted for.
    texts = [prompts(1, 5)[0], prompts(1, 90, seed=4)[0] * 2]
    truth = answers(plain, texts, max_new_tokens=30, ignore_eos=True)
    drafting = model(speculation(Failing(truth, method, after)))
    assert drafting.generate(texts, max_new_tokens=30, ignore_eos=True, prefill_chunk=16) == list(truth.values())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert f"OverflowError: in {method}" in warnings[0]


def test_what_was_drafted_is_verified_though_another_call_switched_the_drafter_off(plain: Any) -> None:
    texts = prompts(3, 20)
    truth = answers(plain, texts, max_new_tokens=40, ignore_eos=True)
    together = speculation(Scripted(truth, right=1.0))
    drafting = model(together)
    verify, steps = drafting.engine.verify, []

    def interrupted(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            together.switch_off("somebody else's text was too much for it")
        return verify(*arguments)

    drafting.engine.verify = interrupted
    assert drafting.generate(texts, max_new_tokens=40, ignore_eos=True) == list(truth.values())
    assert len(steps) == 3


def test_the_drafter_is_called_in_turns_only(plain: Any) -> None:
    texts = prompts(2, 40)
    truth = answers(plain, texts, max_new_tokens=20, ignore_eos=True)
    drafter = Failing(truth)
    drafting = model(speculation(drafter))
    drafter.lock = drafting._turns.lock
    stream = drafting.stream(texts[0], max_new_tokens=20, ignore_eos=True)
    for _ in range(3):
        next(stream)
    stream.close()  # thrown away: ended in the next turn, which may be any call's
    assert "end" not in drafter.calls
    assert drafting.generate(texts, max_new_tokens=20, ignore_eos=True) == list(truth.values())
    assert drafter.calls.count("begin") == drafter.calls.count("end") == 3
    assert {"read", "learn", "draft"} <= set(drafter.calls)
    assert drafting.speculation is not None
    assert drafting.speculation.off is None


def test_tokens_after_the_end_are_not_counted(plain: Any) -> None:
    texts = prompts(16, 30, seed=7)
    beyond = answers(plain, texts, max_new_tokens=60, ignore_eos=True)
    truth = answers(plain, texts, max_new_tokens=60)
    ended = 0
    for text in texts:
        drafting = model(speculation(Scripted(beyond, right=1.0)))
        found = drafting.generate(text, max_new_tokens=60)
        assert found == truth[tuple(text)]
        stats = drafting.stats
        # A step writes one token besides those that it accepts, or none where the text ends among these.
        assert stats["new_tokens"] - stats["steps"] - stats["accepted_tokens"] in (0, -1)
        assert stats["acceptance_rate"] is None or 0 <= stats["acceptance_rate"] <= 1
        ended += found[-1:] == [3]
    assert ended  # some did


def test_recycling_learns_where_it_proposed_nothing(plain: Any) -> None:
    texts = prompts(4, 30)
    truth = answers(plain, texts, max_new_tokens=60, ignore_eos=True)
    drafting = model(speculation(TokenRecycling(), Fixed(depth=4, nodes=12)))
    assert drafting.generate(texts, max_new_tokens=60, ignore_eos=True) == list(truth.values())
    assert drafting.stats["drafted_tokens"] > 100


def test_numbers_that_are_none_are_an_error() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = torch.nan
    target = TargetLogits(logits, GenerationOptions(temperature=1.0), torch.Generator())
    assert target.distribution(-1).sum() == pytest.approx(1.0)
    with pytest.raises(CompressError, match="NaN logits"):
        target.distribution(0)


def test_reading_a_prompt_breaks_no_promise(plain: Any) -> None:
    texts = prompts(1, 20)
    truth = answers(plain, texts, max_new_tokens=30, ignore_eos=True)

    class Reading(Scripted):
        def draft(self, asks: Any) -> list[Tree]:
            self.overhead = 100.0  # seconds: more than all this takes
            return super().draft(asks)

    together = speculation(Reading(truth, right=1.0), Goodput())
    told = []
    together.costs.kept = lambda promised, tokens, seconds: told.append((promised, seconds))  # type: ignore[method-assign]
    model(together).generate(texts, max_new_tokens=30, ignore_eos=True)
    assert any(promised for promised, _ in told)
    assert all(seconds < 0 for promised, seconds in told if promised)


def test_the_time_of_whole_steps_is_told(plain: Any) -> None:
    texts = prompts(2, 20)
    truth = answers(plain, texts, max_new_tokens=30, ignore_eos=True)
    together = speculation(Scripted(truth, right=1.0))
    told = []
    together.costs.kept = lambda promised, tokens, seconds: told.append((tokens, seconds))  # type: ignore[method-assign]
    drafting = model(together)
    drafting.generate(texts, max_new_tokens=30, ignore_eos=True)
    assert sum(tokens for tokens, _ in told) == drafting.stats["new_tokens"] - 2  # all but the prompts' own
    assert (
        0.5 * drafting.stats["decode_seconds"]
        < sum(seconds for _, seconds in told)
        <= 1.1 * drafting.stats["decode_seconds"]
    )
