"""Parallel drafts: the layout against one pass a position, drop-token masks, the loss against a naive sum."""

from __future__ import annotations

import copy
from typing import Any

import distill_runs as runs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from random_models import random_llama
from teachers import logits_teacher

from compress.distill.draft.cut import cut
from compress.distill.draft.pard import ParallelStudent, PardConfig, dropped, layout, no_masks
from compress.distill.train.losses import SparseTargets
from compress.distill.train.options import TrainOptions

MASK = 0


def naive(draft: Any, row: list[int], anchor: int, masks: int) -> torch.Tensor:
    """Logits at the last mask of a pass over the text up to an anchor and the masks behind it."""
    ids = torch.tensor([row[: anchor + 1] + [MASK] * masks])
    logits: torch.Tensor = draft(input_ids=ids, use_cache=False).logits[0, -1]
    return logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_the_layout_computes_what_a_pass_of_its_own_would(attention: str, keep: float) -> None:
    draft = runs.target(attn_implementation=attention)
    student = ParallelStudent(draft, MASK, PardConfig(tokens=4))
    ids = runs.rows(3, 14).ids
    placed = layout(ids, dropped(14, 4, keep, 0.0, [1, 2, 3]), MASK)
    with torch.no_grad():
        logits = student._placed_logits(placed)
        for row in range(3):
            for place in range(placed.ids.shape[1]):
                anchor, level = int(placed.anchors[row, place]), int(placed.levels[place])
                expected = naive(draft, ids[row].tolist(), anchor, level)
                torch.testing.assert_close(logits[row, place], expected, atol=2e-5, rtol=1e-4)


def test_the_layout_place_by_place() -> None:
    """Every entry of the mask by the rule itself."""
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    anchors = [torch.tensor([[0, 2], [1, 2]]), torch.tensor([[2], [1]])]
    placed = layout(ids, anchors, 9)
    assert placed.ids.tolist() == [[5, 6, 7, 8, 9, 9, 9], [1, 2, 3, 4, 9, 9, 9]]
    assert placed.positions.tolist() == [[0, 1, 2, 3, 1, 3, 4], [0, 1, 2, 3, 2, 3, 3]]
    assert placed.levels.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert placed.allowed.shape == (2, 1, 7, 7)
    for row in range(2):
        for query in range(7):
            for key in range(7):
                a, j = int(placed.anchors[row, query]), int(placed.levels[query])
                b, i = int(placed.anchors[row, key]), int(placed.levels[key])
                seen = b <= a if i == 0 else (a == b and 1 <= i <= j)
                assert bool(placed.allowed[row, 0, query, key]) == seen, (row, query, key)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(4, 40),
    tokens=st.integers(2, 8),
    keep=st.floats(0.05, 1),
    least=st.floats(0, 1),
    seed=st.integers(0, 2**40),
)
def test_dropped_masks_have_all_that_they_need(length: int, tokens: int, keep: float, least: float, seed: int) -> None:
    if length <= tokens:
        return
    kept = dropped(length, tokens, keep, least, [seed, seed + 1])
    assert len(kept) == tokens - 1
    before = [set(range(length - tokens))] * 2
    for ahead, part in enumerate(kept, 1):
        assert part.shape == (2, max(1, round((length - tokens) * max(keep**ahead, least))))
        for row in range(2):
            found = part[row].tolist()
            assert found == sorted(set(found))
            assert set(found) <= before[row]  # the masks before it are there
            assert max(found) + ahead + 1 < length  # what it predicts is there
            before[row] = set(found)
    again = dropped(length, tokens, keep, least, [seed])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(again, kept, strict=True))


def test_all_anchors_are_drawn_alike() -> None:
    counts = torch.zeros(20)
    for part in dropped(24, 4, 0.5, 0.0, list(range(2000)))[1:2]:
        counts += torch.bincount(part.flatten(), minlength=20)
    expected = 2000 * 5 / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 43.8  # 0.1 % of fair draws are above


@pytest.mark.parametrize("kind", ["cross_entropy", "forward_kl", "sparse", "kept"])
def test_the_loss_is_a_mean_over_the_places_ahead(kind: str) -> None:
    model = runs.target()
    draft = cut(model, range(1))
    kept = torch.arange(0, 61, 3) if kind == "kept" else None
    config = PardConfig(
        tokens=3, keep=0.6, divergence="forward_kl" if kind in ("forward_kl", "sparse") else "cross_entropy"
    )
    objective, student = config.objective(), ParallelStudent(draft, MASK, config, kept, least=0.1)
    source = runs.rows(4, 12)
    batch = source.batch(range(4), [11, 12, 13, 14])
    with torch.no_grad():
        teacher = model(input_ids=batch.ids).logits
    targets = SparseTargets.of(teacher, 5) if kind == "sparse" else teacher if objective.needs_teacher else None
    total, weight = student(batch, targets)
    expected, norm = 0.0, 0.0
    anchors = [torch.arange(12).expand(4, -1), *dropped(12, 3, 0.6, 0.1, [11, 12, 13, 14])]
    for ahead, part in enumerate(anchors):
        for row in range(4):
            for anchor in part[row].tolist():
                at = anchor + ahead
                label = int(batch.ids[row, at + 1]) if at < 11 else 0
                if not bool(batch.trained[row, at]) or (kept is not None and label % 3):
                    continue
                with torch.no_grad():
                    logits = naive(draft, batch.ids[row].tolist(), anchor, ahead)
                logits = logits if kept is None else logits[kept]
                truth = targets[row, at] if targets is not None else None
                wanted = torch.tensor(label if kept is None else label // 3)
                share = 12 / part.shape[1]
                expected += share * float(objective(logits, truth, wanted))
                norm += share
    assert float(weight) == pytest.approx(norm)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)


def test_proposals_are_of_one_pass_each() -> None:
    draft = runs.target()
    student = ParallelStudent(draft, MASK, PardConfig(tokens=4))
    ids = runs.rows(2, 8).ids
    with torch.no_grad():
        found = list(student.proposals(ids, 3))
        for ahead, logits in enumerate(found):
            assert logits.shape == (2, 8 - ahead, 61)
            for anchor in range(8 - ahead):
                expected = naive(draft, ids[1].tolist(), anchor, ahead)
                torch.testing.assert_close(logits[1, anchor], expected, atol=2e-5, rtol=1e-4)


def test_a_parallel_draft_learns_to_look_ahead() -> None:
    """Rows that count up: what comes two and three tokens ahead can be learned from masks alone."""
    model = random_llama(3, vocab_size=31)
    start = torch.randint(1, 31, (48, 1), generator=torch.Generator().manual_seed(0))
    text = (start + torch.arange(14) - 1) % 30 + 1
    source, held = runs.TextRows(text[:40]), runs.TextRows(text[40:])
    judge = logits_teacher(lambda ids: 20.0 * torch.nn.functional.one_hot(ids % 30 + 1, 31).float(), 31)
    student = ParallelStudent(copy.deepcopy(model), MASK, PardConfig(tokens=3))
    options = TrainOptions(steps=60, batch=8, evaluate_every=30, learning_rate=1e-2)
    found = runs.Training(student, source, None, held, judge, options).run()
    assert found.before["agreement_3"] < 0.2
    assert found.after["agreement_1"] > 0.9
    assert found.after["agreement_3"] > 0.8
    assert set(found.after) == {
        f"{name}{end}" for name in ("acceptance", "agreement") for end in ("", "_1", "_2", "_3")
    }


@pytest.mark.parametrize("fields", [{"mask_token": -1}, {"tokens": 0}, {"keep": 0.0}, {"keep": 1.5}])
def test_wrong_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        PardConfig(**fields)


def test_attention_that_cannot_have_such_masks_is_refused() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "num_key_value_heads": 2, "vocab_size": 31, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    windowed = Qwen2ForCausalLM(Qwen2Config(**sizes, use_sliding_window=True, sliding_window=4, max_window_layers=1))
    assert "full attention" in str(no_masks(windowed))
    assert no_masks(runs.target()) is None
