"""Training rows: what is trained of them, who writes them, and that a seed decides all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_llama
from teachers import logits_teacher, teacher_of

import runtime
from compress.distill.train.data import MixedRows, OnPolicyRows, TextRows, continuations, mix
from compress.distill.train.teacher import Teacher, teacher_rows
from runtime.errors import CompressError, RequestError

IDS = torch.randint(1, 257, (6, 10), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama(0)


def naive(model: Any, prompt: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
    """One token at a time, without a cache."""
    generator, ids = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        if temperature == 0:
            ids.append(int(logits.argmax()))
            continue
        sums = torch.softmax(logits / temperature, -1).cumsum(-1)
        ids.append(int((sums <= torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]).sum()))
    return ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
def test_continuations_are_those_of_one_row_at_a_time(model: Any, temperature: float) -> None:
    seeds = [5, 6, 7, 8, 9, 10]
    model.train()
    got, lengths = continuations(model, IDS[:, :4], 6, temperature, seeds)
    assert model.training
    model.eval()
    assert got.tolist() == [
        naive(model, row[:4].tolist(), 6, temperature, s) for row, s in zip(IDS, seeds, strict=True)
    ]
    assert lengths.tolist() == [6] * 6


def test_continuations_end_and_keep_to_kept_tokens(model: Any) -> None:
    whole, _ = continuations(model, IDS[:, :4], 6, 1.0, range(6))
    ends = frozenset(whole[:3, 6].tolist())
    got, lengths = continuations(model, IDS[:, :4], 6, 1.0, range(6), ends)
    for row, full, length in zip(got.tolist(), whole.tolist(), lengths.tolist(), strict=True):
        first = next((place for place in range(4, 10) if full[place] in ends), None)
        assert length == (6 if first is None else first - 3)
        assert row[: 4 + length] == full[: 4 + length]
        assert set(row[4 + length :]) <= {row[3 + length]}
    kept = torch.tensor([3, 17, 200])
    limited, _ = continuations(model, IDS[:, :4], 6, 1.0, range(6), kept=kept)
    assert set(limited[:, 4:].unique().tolist()) == {3, 17, 200}
    with torch.no_grad():
        best = model(input_ids=IDS[:1, :4]).logits[0, -1, kept].argmax()
    assert continuations(model, IDS[:1, :4], 1, 0.0, [0], kept=kept)[0][0, 4] == kept[best]


def test_sampled_tokens_have_the_models_distribution() -> None:
    small = random_llama(1, vocab_size=7)
    prompts = torch.tensor([[1, 2, 3]]).expand(4000, -1)
    got, _ = continuations(small, prompts, 1, 1.3, range(4000))
    with torch.no_grad():
        expected = torch.softmax(small(input_ids=prompts[:1]).logits[0, -1] / 1.3, -1)
    found = torch.bincount(got[:, 3], minlength=7) / 4000
    chi = float((4000 * (found - expected) ** 2 / expected).sum())
    assert chi < 22.5, chi  # 0.1 % of fair draws of 7 outcomes are above


def test_the_last_position_is_never_trained() -> None:
    rows = TextRows(IDS)
    assert rows.trained[0].tolist() == [True] * 9 + [False]
    batch = rows.batch([1, 0], [7, 8])
    assert torch.equal(batch.ids, IDS[[1, 0]])
    assert batch.rows.tolist() == [1, 0]
    assert batch.seeds.tolist() == [7, 8]
    parts = rows.batch(range(5), [0] * 5).split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.ids for part in parts]), IDS[:5])


def test_rows_are_kept_on_disk(tmp_path: Path) -> None:
    rows = TextRows(IDS, torch.rand(6, 10) > 0.5, "teacher")
    rows.save(tmp_path / "rows.safetensors")
    back = TextRows.load(tmp_path / "rows.safetensors")
    assert torch.equal(back.ids, rows.ids)
    assert torch.equal(back.trained, rows.trained)
    assert back.describe() == rows.describe()
    assert rows.describe() != TextRows(IDS, None, "teacher").describe()


def test_a_teacher_writes_rows_whatever_the_batch(model: Any) -> None:
    teacher = teacher_of(model)
    told: list[tuple[int, int]] = []
    rows = teacher_rows(teacher, IDS[:, :3], 5, seed=4, batch=4, told=lambda done, total: told.append((done, total)))
    again = teacher_rows(teacher, IDS[:, :3], 5, seed=4, batch=1)
    assert torch.equal(rows.ids, again.ids)
    assert not torch.equal(rows.ids, teacher_rows(teacher, IDS[:, :3], 5, seed=5).ids)
    assert told == [(4, 6), (6, 6)]
    assert torch.equal(rows.ids[:, :3], IDS[:, :3])
    # What was written is trained on: predicted by the prompt's last token and all that follow but the last.
    assert rows.trained.tolist() == [[False, False, True, True, True, True, True, False]] * 6
    assert rows.ids[2].tolist() == naive(model, IDS[2, :3].tolist(), 5, 1.0, mix(4, 2))


def test_an_artifact_writes_and_judges(tiny_artifact: Path) -> None:
    loaded = runtime.load(tiny_artifact, dtype="float32")
    teacher = Teacher.of(loaded)
    assert teacher.fingerprint == loaded.artifact.checkpoint.fingerprint()
    assert teacher.vocabulary == 257
    logits = teacher.logits(IDS)
    torch.testing.assert_close(logits, loaded.logits(IDS))
    assert not logits.is_inference()
    written, lengths = teacher.continuations(IDS[:, :4], 6, 0.0, range(6))
    for row, length, ids in zip(written.tolist(), lengths.tolist(), IDS.tolist(), strict=True):
        alone = loaded.generate(ids[:4], max_new_tokens=6, ignore_eos=True)
        assert row[: 4 + length] == ids[:4] + alone[:length]
        assert 256 not in row[4 : 3 + length]
        assert length == 6 or row[3 + length] == 256


def test_texts_that_end_count_up_to_their_end(tiny_artifact: Path) -> None:
    loaded = runtime.load(tiny_artifact, dtype="float32")
    plain = Teacher.of(loaded).continuations(IDS[:, :4], 6, 1.0, range(6))[0]
    end = int(plain[0, 5])
    loaded.eos_token_ids = frozenset([end])
    ids, lengths = Teacher.of(loaded).continuations(IDS[:, :4], 6, 1.0, range(6))
    for row, text, length in zip(ids[:, 4:].tolist(), plain[:, 4:].tolist(), lengths.tolist(), strict=True):
        assert length == (text.index(end) + 1 if end in text else 6)
        assert row == text[:length] + [end] * (6 - length)
    rows = teacher_rows(Teacher.of(loaded), IDS[:, :4], 6, seed=0)
    assert bool((rows.trained.sum(1) <= 6).all())


def test_a_teacher_is_checked() -> None:
    broken = logits_teacher(lambda ids: torch.full((*ids.shape, 5), torch.nan), 5)
    with pytest.raises(CompressError, match="NaN"):
        broken.logits(IDS)
    with pytest.raises(RequestError, match=r"\[6, 10, 5\] for ids \[6, 10\]"):
        logits_teacher(lambda ids: torch.zeros(*ids.shape, 5), 6).logits(IDS)


def test_on_policy_rows_follow_the_draft_as_it_is() -> None:
    draft = random_llama(2)
    rows = OnPolicyRows(draft, IDS[:, :4], 6, temperature=0.0)
    batch = rows.batch([3, 1], [0, 0])
    assert batch.ids.tolist() == [naive(draft, IDS[row, :4].tolist(), 6, 0.0, 0) for row in (3, 1)]
    assert batch.rows.tolist() == [-1, -1]
    assert batch.trained.tolist() == [[False] * 3 + [True] * 6 + [False]] * 2
    with torch.no_grad():
        draft.lm_head.weight.mul_(-1)
    assert not torch.equal(rows.batch([3, 1], [0, 0]).ids, batch.ids)


def test_mixed_rows_take_their_share_by_seed() -> None:
    draft = random_llama(2)
    fixed = TextRows(torch.randint(0, 257, (40, 10), generator=torch.Generator().manual_seed(1)))
    made = OnPolicyRows(draft, fixed.ids[:, :4].clone(), 6)
    rows = MixedRows(fixed, made, 0.3)
    seeds = [mix(9, index) for index in range(40)]
    batch = rows.batch(range(40), seeds)
    generated = batch.rows == -1
    assert 4 <= int(generated.sum()) <= 20
    assert torch.equal(batch.ids[~generated], fixed.ids[~generated])
    alone = made.batch(generated.nonzero()[:, 0].tolist(), [s for s, g in zip(seeds, generated, strict=True) if g])
    assert torch.equal(batch.ids[generated], alone.ids)
    assert torch.equal(batch.trained[generated], alone.trained)
    assert bool((MixedRows(fixed, made, 0.0).batch(range(40), seeds).rows >= 0).all())
    assert bool((MixedRows(fixed, made, 1.0).batch(range(40), seeds).rows == -1).all())
    assert len(rows) == 40


def test_seeds_are_the_same_everywhere() -> None:
    assert mix(0) == mix(0)
    assert len({mix(a, b) for a in range(20) for b in range(20)}) == 400
    assert mix(1, 2) == 9192633397613097166
    assert all(0 <= mix(n) < 2**63 for n in range(100))
