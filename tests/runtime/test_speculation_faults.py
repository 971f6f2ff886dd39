"""What goes wrong in the middle of speculative decoding, and what is counted and told where texts end."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from speculation_cases import Scripted, answers, model, prompts, speculation

from runtime.decoding.drafters.recycling import Recycling
from runtime.decoding.lengths.base import Costs, Progress
from runtime.decoding.lengths.belief import Belief
from runtime.decoding.lengths.fixed import Fixed
from runtime.decoding.lengths.goodput import Goodput
from runtime.decoding.lengths.trust import Trust
from runtime.decoding.options import GenerationOptions
from runtime.decoding.tree import Tree
from runtime.decoding.verify.target import Target
from runtime.errors import CompressError
from runtime.kernels.cpu import library

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
    drafting = model(speculation(Recycling(), Fixed(depth=4, nodes=12)))
    assert drafting.generate(texts, max_new_tokens=60, ignore_eos=True) == list(truth.values())
    assert drafting.stats["drafted_tokens"] > 100


def test_numbers_that_are_none_are_an_error() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = torch.nan
    target = Target(logits, GenerationOptions(temperature=1.0), torch.Generator())
    assert target.distribution(-1).sum() == pytest.approx(1.0)
    with pytest.raises(CompressError, match="NaN logits"):
        target.distribution(0)


def test_that_nothing_pays_at_the_end_of_a_text_stops_no_other() -> None:
    costs = Costs.unknown()
    for rows in range(1, 9):
        costs.step.add(rows, 0.010)
        costs.draft.add(rows, 0.001 * rows)
    lengths = Goodput()
    text = Progress(Belief(), room=20)
    assert lengths.plan([text], costs, 1, 64)[0].depth > 1
    for room in (1, 0):
        text.room = room
        costs.draft.add(1, 0.1)  # now a draft of one token does not pay
        assert lengths.plan([text], costs, 1, 64)[0].depth <= room
    assert costs.pause == 0
    assert text.memory.left == 0


def test_promises_that_are_not_kept_end_drafting_and_may_be_made_again() -> None:
    costs = Costs.unknown()
    for rows in range(1, 12):
        costs.step.add(rows, 0.010)
        costs.draft.add(rows, 0.001 * rows)
    lengths, text = Goodput(), Progress(Belief(), room=100)
    steps, plain = [], 1 / costs.step(1)
    for _ in range(200):
        depth = lengths.plan([text], costs, 1, 64)[0].depth
        steps.append(depth)
        # Whatever is drafted, texts grow at half the speed of plain decoding.
        costs.kept(1, 2 / plain if depth else 1 / plain)
    assert steps[0] > 1
    assert sum(map(bool, steps[:12])) > 3
    assert sum(map(bool, steps[20:])) < 20
    assert costs.trust.value < 0.7
    for _ in range(3000):  # the same drafts are worth what they promise now
        depth = lengths.plan([text], costs, 1, 64)[0].depth
        costs.kept(costs.promised * 0.02, 0.02)
    assert depth > 1
    assert costs.trust.value > 0.9


def test_one_hopeless_text_does_not_pause_the_next() -> None:
    costs = Costs.unknown()
    for rows in range(1, 12):
        costs.step.add(rows, 0.010)
        costs.draft.add(rows, 0.002 * rows)
    for _ in range(40):  # what all texts have shown
        costs.belief.observe(Tree.chain([5, 6, 7]), [5, 6, 7, 8])
    lengths, hopeless = Goodput(), Progress(Belief(costs.belief), room=100)
    for _ in range(40):
        hopeless.belief.observe(Tree.chain([5]), [6])
    assert [lengths.plan([hopeless], costs, 1, 64)[0].depth for _ in range(4)] == [2, 0, 0, 0]
    assert costs.pause > 0
    assert lengths.plan([Progress(Belief(costs.belief), room=100)], costs, 1, 64)[0].depth > 2
    # Where nothing speaks for it, what others have shown holds for the next too.
    costs.trust.add(1000.0, 1.0)
    found = [lengths.plan([Progress(Belief(costs.belief), room=100)], costs, 1, 64)[0].depth for _ in range(4)]
    assert found == [2, 0, 0, 0]


def test_noisy_promises_that_are_kept_on_average_are_trusted() -> None:
    trust, numbers = Trust(), random.Random(3)
    values = []
    for _ in range(2000):
        trust.add(2.5, 1.0 if numbers.random() < 0.5 else 4.0)
        values.append(trust.value)
    assert min(values) > 0.75
    assert sum(values) / len(values) > 0.95


def test_the_time_of_whole_steps_is_told(plain: Any) -> None:
    texts = prompts(2, 20)
    truth = answers(plain, texts, max_new_tokens=30, ignore_eos=True)
    together = speculation(Scripted(truth, right=1.0))
    told = []
    together.costs.kept = lambda tokens, seconds: told.append((tokens, seconds))  # type: ignore[method-assign]
    drafting = model(together)
    drafting.generate(texts, max_new_tokens=30, ignore_eos=True)
    assert sum(tokens for tokens, _ in told) == drafting.stats["new_tokens"] - 2  # all but the prompts' own
    assert (
        0.5 * drafting.stats["decode_seconds"]
        < sum(seconds for _, seconds in told)
        <= 1.1 * drafting.stats["decode_seconds"]
    )


def test_one_text_at_a_time_is_tried_where_drafting_does_not_pay() -> None:
    costs = Costs.unknown()
    for rows in range(1, 12):
        costs.step.add(rows, 0.010 * rows)  # every row costs as much as a step
        costs.draft.add(rows, 0.005 * rows)
    lengths, texts = Goodput(), [Progress(Belief(), room=1000) for _ in range(8)]
    tried = 0
    for _ in range(2000):
        plans = lengths.plan(texts, costs, 8, 64)
        busy = [plan for plan in plans if plan.nodes]
        assert len(busy) <= 1
        assert all(plan.nodes <= 2 and plan.depth <= 2 for plan in busy)
        tried += len(busy)
    assert 2 <= tried <= 40
    costs.reading = 10.0  # seconds: more than all these steps are worth
    before = tried
    for _ in range(2000):
        tried += sum(plan.nodes > 0 for plan in lengths.plan(texts, costs, 8, 64))
    assert tried - before <= 8
