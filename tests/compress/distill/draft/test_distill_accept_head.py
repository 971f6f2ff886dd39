"""The head that foresees acceptance: what it is trained on, and that it foresees more than the draft's own word does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_llama
from safetensors.torch import save_file
from teachers import logits_teacher, teacher_of

from compress.distill.draft import distillspec
from compress.distill.draft.cut import cut
from compress.distill.draft.distillspec import fit_accept_head, gather_examples, losses, thinned
from compress.distill.draft.student import Student
from compress.distill.train.data import TextRows
from compress.distill.train.teacher import Teacher
from runtime.drafting.drafters.confident import FILE, AcceptHead
from runtime.errors import ArtifactError


def rows(count: int, seed: int) -> TextRows:
    return TextRows(torch.randint(0, 61, (count, 24), generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(scope="module")
def pair() -> tuple[Student, Teacher]:
    return Student(cut(random_llama(0, vocab_size=61, num_hidden_layers=2), range(1))), teacher_of(
        random_llama(0, vocab_size=61, num_hidden_layers=2)
    )


def test_labels_are_what_the_target_accepts(pair: Any) -> None:
    student, teacher = pair
    text = rows(4, 0)
    found = gather_examples(student, teacher, text, torch.Generator().manual_seed(0))
    q = torch.softmax(student.logits(text.ids).float(), -1)[:, :-1].flatten(0, 1)
    p = torch.softmax(teacher.logits(text.ids), -1)[:, :-1].flatten(0, 1)
    assert torch.equal(found["greedy_label"].bool(), q.argmax(-1) == p.argmax(-1))
    drawn = (q.log() - found["sampling_log_chance"][:, None]).abs().argmin(-1)
    expected = (p / q).clamp_max(1).gather(1, drawn[:, None])[:, 0]
    torch.testing.assert_close(found["sampling_label"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["entropy"], torch.distributions.Categorical(q).entropy(), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_head_learns_what_the_draft_does_not_know(pair: Any) -> None:
    """A target that agrees with the draft after some tokens, and not at all after others: the state tells which."""
    student, _ = pair
    strange = (
        12 * torch.randn(61, 61, generator=torch.Generator().manual_seed(3)) * (torch.arange(61) % 3 == 0)[:, None]
    )
    teacher = logits_teacher(lambda ids: student.draft(ids).logits + strange[ids], 61)
    found, facts = fit_accept_head(student, teacher, rows(400, 1), rows(24, 2))
    for name in ("greedy", "sampling"):
        assert facts[name]["head"] < 0.9 * facts[name]["constant"]
        assert facts[name]["head"] < facts[name]["draft"]
    again, _ = fit_accept_head(student, teacher, rows(400, 1), rows(24, 2))
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_where_there_is_nothing_to_learn_it_is_a_constant(pair: Any) -> None:
    student, teacher = pair
    _, facts = fit_accept_head(student, teacher, rows(48, 1), rows(24, 2))
    for name in ("greedy", "sampling"):
        assert facts[name]["head"] < facts[name]["constant"] + 0.05


def test_the_head_that_runs_is_the_one_that_was_trained(pair: Any, tmp_path: Path) -> None:
    student, teacher = pair
    tensors, _ = fit_accept_head(student, teacher, rows(8, 1), rows(4, 2))
    save_file({name: value.half() for name, value in tensors.items()}, tmp_path / FILE)
    width = tensors["mix"].shape[0]
    head = AcceptHead.load(tmp_path, width)
    states, log_chance, entropy = torch.randn(5, width), -torch.rand(5), torch.rand(5)
    torch.testing.assert_close(
        head(states, log_chance, entropy), AcceptHead(tensors)(states, log_chance, entropy), atol=2e-2, rtol=2e-2
    )
    with pytest.raises(ArtifactError, match="states of"):
        AcceptHead.load(tmp_path, width + 1)
    assert (tmp_path / FILE).is_file()


def test_no_more_states_are_held_than_are_needed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = pair
    text = rows(12, 5)
    whole = text.trained.clone()
    few = thinned(text, 20, torch.Generator().manual_seed(0))
    assert int(few.trained.sum()) == 20
    assert bool(few.trained.any(1).all())
    assert torch.equal(text.trained, whole)
    at = [int((text.ids == row).all(1).nonzero()[0, 0]) for row in few.ids]
    assert bool((whole[at] | ~few.trained).all())
    assert thinned(text, int(whole.sum()), torch.Generator()) is text
    monkeypatch.setattr(distillspec, "MOST", 20)
    held: list[int] = []
    examples = distillspec.gather_examples

    def counting(*arguments: Any) -> Any:
        found = examples(*arguments)
        held.append(len(found["states"]))
        return found

    monkeypatch.setattr(distillspec, "gather_examples", counting)
    _, facts = fit_accept_head(student, teacher, text, rows(2, 6))
    assert held == [20, 20]
    assert facts["positions"] == 20


def test_losses_are_cross_entropies() -> None:
    tensors = {
        "mix": torch.zeros(2, 2),
        "mix_bias": torch.zeros(2),
        "out": torch.zeros(2, 4),
        "out_bias": torch.tensor([0.0, 1.0]),
    }
    examples = {name: torch.zeros(1) for name in ("entropy", "greedy_log_chance", "sampling_log_chance")}
    examples |= {
        "states": torch.zeros(1, 2),
        "greedy_label": torch.tensor([1.0]),
        "sampling_label": torch.tensor([0.25]),
    }
    found = losses(tensors, examples)
    chance = torch.sigmoid(torch.tensor(1.0))
    assert float(found["greedy"]) == pytest.approx(0.6931, abs=1e-3)
    assert float(found["sampling"]) == pytest.approx(float(-0.25 * chance.log() - 0.75 * (1 - chance).log()), abs=1e-5)
