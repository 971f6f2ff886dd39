"""When goodput lengths draft, how much, and how seldom they try where it does not pay."""

from __future__ import annotations

import random

import pytest

from runtime.drafting.lengths.base import Belief, Costs, Progress, Trust
from runtime.drafting.lengths.goodput import Goodput
from runtime.sampling.tree import Tree


def measured(fixed: float, row: float, draft: float, rows: int = 12) -> Costs:
    """Steps that take so many seconds and as many more for each row, drafts that take so many for each token."""
    costs = Costs()
    for count in range(1, rows):
        costs.step.add(count, fixed + row * count)
        costs.draft.add(count, draft * count)
    return costs


@pytest.mark.parametrize(("texts", "depth"), [(1, 8), (2, 4), (5, 1), (8, 1), (20, 1)])
def test_the_first_step_is_as_large_for_many_texts_as_for_one(texts: int, depth: int) -> None:
    plans = Goodput().plan([Progress(Belief(), room=100) for _ in range(texts)], Costs(), texts, 256)
    assert [plan.depth for plan in plans] == [depth] * texts


def test_asking_in_vain_rests_as_long_as_it_costs() -> None:
    pauses = []
    for idle in (0.00001, 0.001, 0.01):
        costs = Costs()
        costs.step.add(1, 0.010)
        costs.draft.add(1, 0.0)
        costs.idle = idle
        lengths, text = Goodput(), Progress(Belief(), room=1000)
        for _ in range(8):
            assert lengths.plan([text], costs, 1, 64)[0].depth > 0
            lengths.trim([text], [Tree()], costs, 1, 0.0)
        pauses.append(text.memory.left)
    # A thousandth of a step may always be asked for; the others must not come to more than a hundredth of the time.
    assert pauses == [0, 80, 800]


def test_a_machine_that_stopped_for_a_moment_stops_no_drafting() -> None:
    costs, texts = Costs(), [Progress(Belief(), room=1000) for _ in range(8)]
    costs.step.add(8, 0.010)
    costs.draft.add(1, 0.0)
    lengths = Goodput()
    for number in range(8):
        lengths.plan(texts, costs, 8, 64)
        lengths.trim(texts, [Tree()] * 8, costs, 8, 60.0 if number == 7 else 0.0005)  # seconds
    assert texts[0].memory.left < 100
    # However long a pause is, it is over when so many steps went by, of whichever texts.
    costs.pause = 4000
    asked = []
    for _ in range(402):
        text = Progress(Belief(), room=10)
        asked.append(lengths.plan([text], costs, 1, 64)[0].depth > 0)
        lengths.rested([text], costs, 9)
    assert asked.index(True) == 400
    trust = Trust()
    for _ in range(100):
        trust.add(2.5, 2.5)
    trust.add(3000.0, 2.0)
    assert trust.value > 0.8


def test_texts_that_rested_are_drafted_for_as_soon_as_it_pays() -> None:
    costs = measured(0.010, 0.0, 0.001, rows=80)
    lengths, texts = Goodput(), [Progress(Belief(costs.belief), room=1000) for _ in range(8)]
    for text in texts:
        for _ in range(40):
            text.belief.observe(Tree.chain([5]), [6])
    lengths.plan(texts, costs, 8, 256)
    assert all(text.memory.left for text in texts)
    for text in texts[:1]:
        for _ in range(400):
            text.belief.observe(Tree.chain([5, 6, 7]), [5, 6, 7, 8])
    found = lengths.plan(texts, costs, 8, 256)
    assert all(plan.depth > 0 for plan in found)  # else the promise would be one that these texts do not keep
    assert costs.promised > 0


def test_that_nothing_pays_at_the_end_of_a_text_stops_no_other() -> None:
    costs = measured(0.010, 0.0, 0.001, rows=9)
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
    costs = measured(0.010, 0.0, 0.001)
    lengths, text = Goodput(), Progress(Belief(), room=100)
    steps, plain = [], 1 / costs.step(1)
    for _ in range(200):
        depth = lengths.plan([text], costs, 1, 64)[0].depth
        steps.append(depth)
        # Whatever is drafted, texts grow at half the speed of plain decoding.
        costs.kept(costs.promised, 1, 2 / plain if depth else 1 / plain)
    assert steps[0] > 1
    assert sum(map(bool, steps[:12])) > 3
    assert sum(map(bool, steps[20:])) < 20
    assert costs.trust.value < 0.7
    for _ in range(3000):  # the same drafts are worth what they promise now
        depth = lengths.plan([text], costs, 1, 64)[0].depth
        costs.kept(costs.promised, costs.promised * 0.02, 0.02)
    assert depth > 1
    assert costs.trust.value > 0.9


def test_one_hopeless_text_does_not_pause_the_next() -> None:
    costs = measured(0.010, 0.0, 0.002)
    for _ in range(40):  # what all texts have shown
        costs.belief.observe(Tree.chain([5, 6, 7]), [5, 6, 7, 8])
    lengths, hopeless = Goodput(), Progress(Belief(costs.belief), room=100)
    for _ in range(40):
        hopeless.belief.observe(Tree.chain([5]), [6])
    assert [lengths.plan([hopeless], costs, 1, 64)[0].depth for _ in range(4)] == [2, 0, 0, 0]
    assert costs.pause > 0
    assert lengths.plan([Progress(Belief(costs.belief), room=100)], costs, 1, 64)[0].depth > 2
    # Where nothing speaks for it, what others have shown holds for the next too.
    for _ in range(200):
        costs.trust.add(8.0, 1.0)
    found = [lengths.plan([Progress(Belief(costs.belief), room=100)], costs, 1, 64)[0].depth for _ in range(4)]
    assert found == [0, 0, 0, 0]
    lengths.rested((), costs, 10_000)
    found = [lengths.plan([Progress(Belief(costs.belief), room=100)], costs, 1, 64)[0].depth for _ in range(4)]
    assert found == [2, 0, 0, 0]


def test_what_one_text_of_many_gains_is_worth_its_rows_of_later_steps() -> None:
    for fixed, every, alone, together in ((0.008, 0.0016, 0, 8), (0.012, 0.0001, 1, 8)):
        costs = measured(fixed, every, 0.0, rows=40)
        lengths, texts = Goodput(), [Progress(Belief(), room=100) for _ in range(8)]
        lengths.plan(texts, costs, 8, 64)
        tree = Tree.chain([5], [0.99])
        for count, drafted in ((2, 2 * alone), (8, together)):
            kept = lengths.trim(texts, [tree] * count + [Tree()] * (8 - count), costs, 8, 0.0)
            assert sum(map(len, kept)) == drafted


def test_free_drafts_are_held_against_what_came_of_them_too() -> None:
    costs = measured(0.010, 0.001, 0.0)
    lengths, text = Goodput(), Progress(Belief(), room=100)
    tree = Tree.chain([5, 6, 7], [0.9, 0.9, 0.9])  # what it says never changes, and is not learned from here

    def step(right: bool) -> bool:
        lengths.plan([text], costs, 1, 64)
        (kept,) = lengths.trim([text], [tree], costs, 1, 0.0)
        costs.kept(costs.promised, 1 + right * len(kept), costs.step(1 + len(kept)))
        return len(kept) > 0

    assert step(False)
    tried = [step(False) for _ in range(1000)]
    assert 0 < sum(tried[100:]) < 90  # of 900, so that they cost some two per cent
    assert sum([step(True) for _ in range(1000)][-100:]) > 90


def test_noisy_promises_that_are_kept_on_average_are_trusted() -> None:
    trust, numbers = Trust(), random.Random(3)
    values = []
    for _ in range(2000):
        trust.add(2.5, 1.0 if numbers.random() < 0.5 else 4.0)
        values.append(trust.value)
    assert min(values) > 0.75
    assert sum(values) / len(values) > 0.95


def test_one_text_at_a_time_is_tried_where_drafting_does_not_pay() -> None:
    costs = measured(0.0, 0.010, 0.005)
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
