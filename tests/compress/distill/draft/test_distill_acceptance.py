"""Measured acceptance against speculative decoding played out token by token, and the formulas of expected speedup."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import distill_runs as runs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_llama
from teachers import acceptance_of

import runtime
from compress.distill.draft.acceptance import follow
from compress.distill.draft.cut import cut
from compress.distill.draft.pard import ParallelStudent, PardConfig
from compress.distill.draft.speedup import best_length, speedup, tokens_of
from compress.distill.draft.student import Student
from compress.distill.train.data import TextRows

ROWS = runs.rows(6, 20, seed=4).ids


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def played(target: Any, propose: Any, prompt: list[int], total: int, length: int) -> list[int]:
    """Greedy speculative decoding as its definition has it: accepted tokens of each step that fits into `total`."""
    text = greedy(target, prompt, total - len(prompt))
    at, accepted = len(prompt), []
    while at + length <= total:
        draft = propose(text[:at], length)
        count = 0
        while count < length and draft[count] == text[at + count]:
            count += 1
        accepted.append(count)
        at += count + 1
    return accepted


def expected_record(steps: list[int], length: int) -> dict[str, Any]:
    reached = [sum(count >= place for count in steps) for place in range(length)]
    passed = [sum(count > place for count in steps) for place in range(length)]
    shares = [p / r if r else None for p, r in zip(passed, reached, strict=True)]
    mean = sum(steps) / len(steps)
    return {"by_position": shares, "accepted": mean, "tokens": mean + 1, "steps": len(steps)}


@pytest.mark.parametrize("length", [1, 3, 5])
def test_greedy_acceptance_is_that_of_decoding_itself(length: int) -> None:
    target = runs.target()
    draft = cut(target, range(2))
    found = acceptance_of(draft, target, ROWS, length=length)
    assert found["continuations"] is not None
    got = found["continuations"]["greedy"]
    steps: list[int] = []
    for row in ROWS.tolist():
        steps += played(target, lambda ids, count: greedy(draft, ids, count)[len(ids) :], row[:10], 20, length)
    wanted = expected_record(steps, length)
    assert got["by_position"] == pytest.approx(wanted["by_position"])
    assert {key: got[key] for key in ("accepted", "tokens", "steps")} == pytest.approx(
        {key: wanted[key] for key in ("accepted", "tokens", "steps")}
    )
    assert 0 < got["accepted"] < length


def test_parallel_drafts_are_played_with_their_own_passes() -> None:
    target = runs.target()
    draft = cut(target, range(2))
    student = ParallelStudent(draft, 0, PardConfig(tokens=4))

    @torch.no_grad()
    def propose(ids: list[int], count: int) -> list[int]:
        logits = draft(input_ids=torch.tensor([ids + [0] * (count - 1)])).logits[0, -count:]
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens

    found = acceptance_of(student, target, ROWS, length=3)
    steps = [count for row in ROWS.tolist() for count in played(target, propose, row[:10], 20, 3)]
    assert found["continuations"] is not None
    got = found["continuations"]["greedy"]
    assert got["accepted"] == pytest.approx(sum(steps) / len(steps))
    assert got["steps"] == len(steps)


@pytest.mark.slow
def test_sampling_acceptance_is_that_of_speculative_sampling() -> None:
    """All texts of a tiny vocabulary written out."""
    target, draft = (random_llama(seed, vocab_size=5, num_hidden_layers=1) for seed in (0, 1))

    @torch.no_grad()
    def chances(model: Any, ids: list[int]) -> torch.Tensor:
        return torch.softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1)

    prompt = [1, 2, 3]
    reach = [0.0] * 3
    passed = [0.0] * 3
    for tokens in itertools.product(range(5), repeat=2):
        weight = 1.0
        for place in range(3):
            p, q = (chances(model, [*prompt, *tokens[:place]]) for model in (target, draft))
            both = torch.minimum(p, q)
            # Every text is gone through with the chance that all of it so far was accepted; its tail counts once.
            share = weight / 5 ** (2 - place)
            reach[place] += share
            passed[place] += share * float(both.sum())
            if place < 2:
                weight *= float(both[tokens[place]])
    rows = torch.tensor([[*prompt, 0, 0, 0]]).expand(3000, -1).contiguous()
    found = acceptance_of(draft, target, rows, length=3)
    assert found["continuations"] is not None
    got = found["continuations"]["sampling"]
    assert got["steps"] == 3000  # of three tokens each, just one fits
    assert got["by_position"][0] == pytest.approx(passed[0] / reach[0], abs=1e-5)
    assert got["by_position"] == pytest.approx([p / r for p, r in zip(passed, reach, strict=True)], abs=0.02)
    assert got["accepted"] == pytest.approx(sum(passed), abs=0.04)


def test_given_text_is_walked_with_its_own_tokens() -> None:
    target = runs.target()
    draft = cut(target, range(2))
    found = acceptance_of(draft, target, TextRows(ROWS), length=2)
    with torch.no_grad():
        p, q = (torch.softmax(model(input_ids=ROWS).logits[:, :-1], -1) for model in (target, draft))
    assert found["text"]["sampling"]["acceptance"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-6)
    agree = p.argmax(-1) == q.argmax(-1)
    assert found["text"]["greedy"]["acceptance"] == pytest.approx(float(agree.double().mean()))
    steps = []
    for row in agree.tolist():
        at = 0
        while at + 2 <= len(row):
            count = 0 if not row[at] else 1 if not row[at + 1] else 2
            steps.append(count)
            at += count + 1
    assert found["text"]["greedy"]["accepted"] == pytest.approx(sum(steps) / len(steps))


def test_a_trimmed_draft_is_never_right_about_what_it_left_out() -> None:
    target = runs.target()
    kept = torch.tensor([2, 3, 5, 8, 13, 21, 34, 55])
    draft = cut(target, range(3))  # the target itself, but for its head
    found = acceptance_of(Student(draft, kept=kept), target, ROWS, length=2)
    assert found["continuations"] is not None
    share = torch.isin(torch.tensor([greedy(target, row[:10], 10)[10:] for row in ROWS.tolist()]), kept).double().mean()
    assert found["continuations"]["greedy"]["acceptance"] == pytest.approx(float(share))
    with torch.no_grad():
        p = torch.softmax(target(input_ids=ROWS).logits[:, :-1], -1)
    assert found["text"]["sampling"]["acceptance"] == pytest.approx(float(p[..., kept].sum(-1).mean()), abs=1e-6)


def test_the_target_as_its_own_draft_is_always_right(tiny_artifact: Path) -> None:
    loaded = runtime.load(tiny_artifact, dtype="float32", kernels="reference")
    rows = torch.randint(1, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    found = acceptance_of(loaded.engine.module, loaded, rows, length=3)
    assert found["continuations"] is not None
    for part in (found["text"], found["continuations"]):
        for record in part.values():
            assert record["by_position"] == pytest.approx([1.0] * 3, abs=1e-5)
            assert record["tokens"] == pytest.approx(4.0, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), length=st.integers(1, 4), tokens=st.integers(1, 9))
def test_following_a_row_is_the_mean_over_all_outcomes(data: st.DataObject, length: int, tokens: int) -> None:
    """Each drafted token accepted or not: all combinations played, each with its probability."""
    size = tokens + length
    chance = [
        torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=size - j, max_size=size - j)))
        for j in range(length)
    ]
    counted = [torch.arange(size - j) + j < tokens for j in range(length)]
    steps, reached, passed = follow(chance, chance, counted)
    total, wanted_reached, wanted_passed = 0.0, [0.0] * length, [0.0] * length
    todo = [(0, 1.0)]
    while todo:
        at, weight = todo.pop()
        if at + length > tokens or weight == 0:
            continue
        total += weight
        for place in range(length):
            wanted_reached[place] += weight
            accept = float(chance[place][at])
            wanted_passed[place] += weight * accept
            todo.append((at + place + 1, weight * (1 - accept)))
            weight *= accept
        todo.append((at + length + 1, weight))
    assert steps == pytest.approx(total)
    assert reached.tolist() == pytest.approx(wanted_reached)
    assert passed.tolist() == pytest.approx(wanted_passed)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_accepted_more_often_than_always(seed: int) -> None:
    """Of equal distributions the sum of the smaller of both is 1 but for rounding, which may be upwards."""
    target = random_llama(seed, vocab_size=61, num_hidden_layers=1)
    found = acceptance_of(target, target, ROWS, length=4)
    for part in (found["text"], found["continuations"]):
        rates = part["sampling"]["by_position"]
        assert part["sampling"]["acceptance"] <= 1
        assert max(rates) <= 1
        assert best_length(rates, 0.1)[0] == 4
    assert target_overlap(target) <= 1


def target_overlap(target: Any) -> float:
    """What training looks at, of a target that is its own draft."""
    rows = TextRows(ROWS)
    with torch.no_grad():
        total, count = Student(target).measure(rows.batch([0], [0]), target(input_ids=ROWS[:1]).logits)["acceptance"]
    return total / count


def test_where_no_whole_draft_fits_nothing_is_measured() -> None:
    target = runs.target()
    draft = cut(target, range(1))
    found = acceptance_of(draft, target, TextRows(ROWS, torch.arange(20).expand(6, -1) < 4))
    assert found["text"] == {"greedy": None, "sampling": None}
    assert found["continuations"]["greedy"]["steps"] > 0
    short = TextRows(ROWS, (torch.arange(20) > 16).expand(6, -1))
    found = acceptance_of(draft, target, ROWS, texts={"greedy": short, "sampling": short})
    assert found["continuations"] == {"greedy": None, "sampling": None}
    assert found["text"]["greedy"]["steps"] > 0


def test_a_student_in_training_stays_so() -> None:
    target = runs.target()
    draft = cut(target, range(1))
    student = Student(draft)
    student.train()
    acceptance_of(student, target, ROWS)
    assert student.training


@given(acceptance=st.floats(0, 0.999), length=st.integers(0, 20), cost=st.floats(0, 2))
def test_speedup_is_the_papers(acceptance: float, length: int, cost: float) -> None:
    closed = (1 - acceptance ** (length + 1)) / (1 - acceptance)
    assert tokens_of([acceptance] * length) == pytest.approx(closed, rel=1e-9)
    paper = (1 - acceptance ** (length + 1)) / ((1 - acceptance) * (length * cost + 1))
    assert speedup(closed, length, cost) == pytest.approx(paper, rel=1e-9)


def test_costs_of_verifying() -> None:
    assert tokens_of([1.0] * 4) == 5
    assert tokens_of([0.5, 0.2]) == pytest.approx(1 + 0.5 + 0.1)
    assert speedup(3.0, 4, 0.1, 0.15) == pytest.approx(3 / 2.0)
    assert best_length([0.9, 0.9, 0.1], 0.1) == (2, pytest.approx((1 + 0.9 + 0.81) / 1.2))
    assert best_length([0.1, 0.1], 0.9) == (0, 1.0)
    assert best_length([], 0.1) == (0, 1.0)
    assert best_length([0.8] * 4, 0.05, 0.6)[0] == 1
    # One pass for all: a shorter draft is no cheaper, so the longest is best and none is where the pass does not pay.
    assert best_length([0.5, 0.5, 0.1], 0.3, one_pass=True) == (3, pytest.approx((1 + 0.5 + 0.25 + 0.025) / 1.3))
    assert best_length([0.5, 0.1], 0.8, one_pass=True) == (0, 1.0)
    assert best_length([0.5, 0.1], 0.4)[0] == 1
