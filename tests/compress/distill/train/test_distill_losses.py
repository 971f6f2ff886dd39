"""Divergences against torch's and closed forms, their gradients, and sparse targets against whole distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from compress.distill.train.losses import LOG_FLOOR, Objective, SparseTargets
from runtime.errors import RequestError

KINDS = ["forward_kl", "reverse_kl", "js", "tvd"]


def logits(seed: int, shape: tuple[int, ...] = (3, 5, 11), scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(kind: str, student: torch.Tensor, teacher: torch.Tensor, temperature: float, beta: float) -> torch.Tensor:
    """Written out, one position at a time."""
    values = []
    for q_row, p_row in zip(
        student.reshape(-1, student.shape[-1]), teacher.reshape(-1, student.shape[-1]), strict=True
    ):
        p, q = torch.softmax(p_row / temperature, -1).tolist(), torch.softmax(q_row / temperature, -1).tolist()
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        kl_p = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        kl_q = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        mixed = beta * sum(a * math.log(a / c) for a, c in zip(p, m, strict=True))
        mixed += (1 - beta) * sum(b * math.log(b / c) for b, c in zip(q, m, strict=True))
        apart = 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
        values.append({"forward_kl": kl_p, "reverse_kl": kl_q, "js": mixed, "tvd": apart}[kind])
    return torch.tensor(values, dtype=torch.float64).view(student.shape[:-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "beta"), [(1.0, 0.5), (2.0, 0.1), (0.5, 0.9)])
def test_values_are_those_of_the_definitions(kind: str, temperature: float, beta: float) -> None:
    student, teacher = logits(0), logits(1)
    objective = Objective(kind, temperature, beta)
    expected = reference(kind, student, teacher, temperature, beta)
    torch.testing.assert_close(objective(student, teacher), expected, atol=1e-10, rtol=1e-10)
    single = objective(student.float(), teacher.to(torch.bfloat16).float())
    assert single.dtype == torch.float32
    near = reference(kind, student.float().double(), teacher.to(torch.bfloat16).double(), temperature, beta)
    torch.testing.assert_close(single.double(), near, atol=2e-5, rtol=2e-5)


def test_torch_agrees() -> None:
    student, teacher = logits(2), logits(3)
    p, q = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
    forward = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(Objective("forward_kl")(student, teacher), forward)
    reverse = functional.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(Objective("reverse_kl")(student, teacher), reverse)
    labels = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    entropy = functional.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="none").view(3, 5)
    torch.testing.assert_close(Objective("cross_entropy")(student, labels=labels), entropy)


def test_js_becomes_both_kl_at_its_ends() -> None:
    student, teacher = logits(4), logits(5)
    low = Objective("js", beta=1e-7)(student, teacher) / 1e-7
    torch.testing.assert_close(low, Objective("forward_kl")(student, teacher), atol=1e-4, rtol=1e-3)
    high = Objective("js", beta=1 - 1e-7)(student, teacher) / 1e-7
    torch.testing.assert_close(high, Objective("reverse_kl")(student, teacher), atol=1e-4, rtol=1e-3)


def test_tvd_is_what_speculative_sampling_rejects() -> None:
    student, teacher = logits(6), logits(7)
    accepted = torch.minimum(torch.softmax(student, -1), torch.softmax(teacher, -1)).sum(-1)
    torch.testing.assert_close(Objective("tvd")(student, teacher), 1 - accepted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_those_of_the_values(kind: str, sparse: bool) -> None:
    student = logits(8, (4, 7)).requires_grad_()
    teacher = logits(9, (4, 7))
    objective = Objective(kind, 1.5, 0.3)
    targets = SparseTargets.of(teacher, 3, 1.5) if sparse else teacher
    assert torch.autograd.gradcheck(lambda x: objective(x, targets), (student,))


def test_gradients_of_cross_entropy() -> None:
    labels = torch.tensor([0, 6, 3, 3])
    student = logits(10, (4, 7)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Objective("cross_entropy")(x, labels=labels), (student,))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_the_teacher(kind: str) -> None:
    student, teacher = logits(0, (2, 5)).requires_grad_(), logits(1, (2, 5)).requires_grad_()
    Objective(kind)(student, teacher).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, 11))
def test_sparse_targets_merge_all_others_into_one_outcome(kind: str, seed: int, k: int) -> None:
    student, teacher = logits(seed, (4, 11)), logits(seed + 7, (4, 11))
    objective = Objective(kind, 0.8, 0.4)
    targets = SparseTargets.of(teacher, k, 0.8)
    torch.testing.assert_close(targets.log_probs.exp().sum(-1) + targets.rest, torch.ones(4, dtype=torch.float64))
    got = objective(student, targets)
    merged = []
    for q_row, p_row in zip(student, teacher, strict=True):
        p, q = torch.softmax(p_row / 0.8, -1), torch.softmax(q_row / 0.8, -1)
        top = p.topk(k).indices
        rest = torch.ones(11, dtype=torch.bool).index_fill(0, top, False)
        parts = [torch.cat([row[top], row[rest].sum()[None]]) if k < 11 else row[top] for row in (q, p)]
        merged.append(torch.stack(parts).log())
    pairs = torch.stack(merged)
    torch.testing.assert_close(got, Objective(kind, 1.0, 0.4)(pairs[:, 0], pairs[:, 1]), atol=1e-9, rtol=1e-7)
    whole = objective(student, teacher)
    assert bool((got <= whole + 1e-9).all())
    if k == 11:
        torch.testing.assert_close(got, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_logits_stay_finite(kind: str) -> None:
    """Teachers that rule tokens out, or are certain; students far away from them."""
    teacher = torch.tensor([[0.0, -torch.inf, -torch.inf, 1.0], [1e4, 0.0, -1e4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    student = torch.tensor(
        [[-50.0, 60.0, 0.0, 0.0], [-1e4, 1e4, 0.0, 0.0], [300.0, 0.0, -300.0, 0.0]], requires_grad=True
    )
    for targets in (teacher, SparseTargets.of(teacher, 2), SparseTargets.of(teacher, 4)):
        losses = Objective(kind)(student, targets)
        assert bool(losses.isfinite().all())
        (gradient,) = torch.autograd.grad(losses.sum(), student)
        assert bool(gradient.isfinite().all())
    if kind == "reverse_kl":
        assert float(Objective(kind)(student, teacher)[0].detach()) == pytest.approx(-LOG_FLOOR, abs=0.1)


def test_equal_distributions_cost_nothing() -> None:
    teacher = logits(11).float()
    for kind in KINDS:
        losses = Objective(kind)(teacher + 3.0, teacher)
        assert float(losses.abs().max()) < 1e-5


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RequestError, match="its temperature is 1, not 2"):
        Objective("cross_entropy", temperature=2.0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        Objective()(logits(0, (2, 5)), logits(1, (2, 6)))
