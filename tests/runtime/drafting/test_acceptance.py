"""Acceptance rules: what they let through is distributed as the target alone would write it, or as their source says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distribution_cases import drawn_tree, expected, misfit, table_logits, written

from runtime.config.settings import read_method
from runtime.drafting.config.registry import RULES
from runtime.drafting.verify.base import Rule
from runtime.drafting.verify.exact import Exact, rejected
from runtime.drafting.verify.lenient import Lenient
from runtime.drafting.verify.rollback import Rollback
from runtime.drafting.verify.target import TargetLogits
from runtime.drafting.verify.typical import Typical
from runtime.errors import RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import ROOT, Tree

VOCABULARY = 7
SETTINGS = [
    GenerationOptions(temperature=1.0),
    GenerationOptions(temperature=0.6, top_k=4),
    GenerationOptions(temperature=1.5, top_p=0.8),
]


def misfit_of(rule: Rule, shape: list[int], options: GenerationOptions, draws: int, guesses: bool = False) -> float:
    """How badly three tokens of many texts, written by this rule from drawn trees of this shape, fit what the target would draw."""
    target, draft = table_logits(VOCABULARY, 1), table_logits(VOCABULARY, 2)

    def tree(last: int, source: torch.Generator) -> Tree:
        tree = drawn_tree(draft, last, shape, options, source)
        return Tree(tree.tokens, tree.parents) if guesses else tree

    return misfit(written(rule, tree, target, options, draws, 3), expected(target, options, 3))


class KeepsResidual(Exact):
    """Broken on purpose: after a rejection it draws from the target's distribution, not from what is left of it."""

    def step(self, tree: Any, node: Any, options: Any, branch: Any, target: Any) -> Any:
        proposal = tree.proposals.get(node)
        if proposal is None or not options:
            return super().step(tree, node, options, branch, target)
        p, q = target.distribution(node, branch), proposal.double()
        for child in options:
            if target.uniform() * q[tree.tokens[child]] < p[tree.tokens[child]]:
                return child, tree.tokens[child]
        return None, target.choose(node, branch)


class KeepsProposal(Exact):
    """Broken on purpose: the next child is taken to be drawn with replacement."""

    def step(self, tree: Any, node: Any, options: Any, branch: Any, target: Any) -> Any:
        proposal = tree.proposals.get(node)
        if proposal is None or not options:
            return super().step(tree, node, options, branch, target)
        p, q = target.distribution(node, branch), proposal.double()
        for child in options:
            if target.uniform() * q[tree.tokens[child]] < p[tree.tokens[child]]:
                return child, tree.tokens[child]
            p, _ = rejected(p, q, tree.tokens[child])
        return None, int(torch.multinomial(p, 1, generator=target.generator))


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("shape", [[1, 1], [3, 2]])
def test_exact_sampling_is_distributed_as_the_target(shape: list[int], options: GenerationOptions) -> None:
    assert misfit_of(Exact(), shape, options, 5000) < 4


def test_guesses_under_sampling_are_distributed_as_the_target() -> None:
    assert misfit_of(Exact(), [2, 2], SETTINGS[0], 5000, guesses=True) < 4


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(temperature=1.0),
        GenerationOptions(temperature=0.7, top_k=4),
        GenerationOptions(temperature=0.7, top_p=0.8),
        GenerationOptions(temperature=0.7, top_k=5, top_p=0.9),
    ],
)
@pytest.mark.parametrize(
    ("rule", "shape"), [(KeepsResidual(), [1, 1]), (KeepsProposal(), [3, 2]), (Lenient(0.5), [1, 1])]
)
def test_the_test_sees_broken_rules(rule: Rule, shape: list[int], options: GenerationOptions) -> None:
    assert misfit_of(rule, shape, options, 800) > 8


@pytest.mark.sampled(10, 2)
@pytest.mark.parametrize("seed", range(20))
def test_the_rate_of_acceptance_is_the_overlap(seed: int) -> None:
    """One drawn child is accepted as often as the two distributions overlap: nothing is given away."""
    source = torch.Generator().manual_seed(seed)
    logits, q = torch.randn(1, 50, generator=source) * 2, torch.softmax(torch.randn(50, generator=source) * 2, -1)
    options = GenerationOptions(temperature=1.0)
    target = TargetLogits(logits.expand(2, -1), options, source)
    p = target.distribution(ROOT)
    right, count = 0, 1500
    for token in torch.multinomial(q, count, replacement=True, generator=source).tolist():
        tree = Tree([token], [ROOT], [], {ROOT: q})
        right += bool(Exact().accept(tree, target).path)
    overlap = float(torch.minimum(p, q.double()).sum())
    assert abs(right / count - overlap) < 4.5 * (overlap * (1 - overlap) / count) ** 0.5 + 1e-3


def test_greedy_takes_the_longest_right_branch() -> None:
    logits = torch.full((6, 9), -1.0)
    for row, best in enumerate([4, 5, 6, 7, 8, 2]):
        logits[row, best] = 1.0
    #              0: 3   1: 4   2: 4->7  3: 7->? ...
    tree = Tree([3, 4, 6, 7, 8], [ROOT, ROOT, 1, 2, 3])
    logits[2, 6] = 3.0  # after node 1 (token 4) comes 6, node 2; then 7, node 3
    logits[3, 7] = 3.0
    logits[4, 1] = 3.0  # after node 3 comes 1, which is not node 4
    assert Exact().accept(tree, TargetLogits(logits, GenerationOptions())) == ([1, 2, 3], 1)


def test_equal_distributions_accept_everything() -> None:
    logits = torch.randn(1, 30).expand(4, -1)
    options = GenerationOptions(temperature=1.0)
    q = torch.softmax(logits[0], -1)
    source = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens = torch.multinomial(q, 3, replacement=True, generator=source).tolist()
        tree = Tree.chain(tokens)
        tree.proposals = dict.fromkeys((-1, 0, 1), q)
        assert len(Exact().accept(tree, TargetLogits(logits, options, source)).path) == 3


def test_impossible_proposals_are_never_written() -> None:
    """A draft that draws what top-k forbids, or knows fewer tokens than there are children."""
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    options = GenerationOptions(temperature=1.0, top_k=3)
    allowed = set(torch.topk(logits[0], 3).indices.tolist())
    q = torch.zeros(12)
    outside = [token for token in range(12) if token not in allowed][:2]
    q[outside] = 0.5
    source = torch.Generator().manual_seed(0)
    for _ in range(100):
        tree = Tree([outside[0], outside[1], 5], [ROOT, ROOT, ROOT], [], {ROOT: q})
        path, token = Exact().accept(tree, TargetLogits(logits, options, source))
        assert (tree.tokens[path[0]] if path else token) in allowed


def test_typical_acceptance_follows_its_formula() -> None:
    options = GenerationOptions(temperature=1.0)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        logits = torch.randn(3, 20, generator=generator) * 3
        tokens = torch.randint(0, 20, (2,), generator=generator).tolist()
        p = torch.softmax(logits.double(), -1)
        count = 0
        for row, token in enumerate(tokens):
            entropy = float(-(p[row] * p[row].log()).sum())
            if float(p[row, token]) <= min(0.09, 0.3 * 2.718281828459045**-entropy):
                break
            count += 1
        verdict = Typical().accept(Tree.chain(tokens), TargetLogits(logits, options, generator))
        assert len(verdict.path) == count
    greedy = TargetLogits(logits, GenerationOptions())
    assert Typical().accept(Tree.chain(tokens), greedy) == Exact().accept(Tree.chain(tokens), greedy)


def test_typical_acceptance_takes_the_longest_branch() -> None:
    logits = torch.zeros(5, 4)  # everything is plausible
    tree = Tree([0, 1, 2, 3], [ROOT, ROOT, 1, 2])
    assert Typical().accept(tree, TargetLogits(logits, GenerationOptions(temperature=1.0), torch.Generator())).path == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("draws", [False, True])
def test_rollback_begins_where_the_target_finds_a_token_unlikely(draws: bool) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.08, 0.02], [1 / 3, 1 / 3, 1 / 3]]))
    options = GenerationOptions(temperature=1.0) if draws else GenerationOptions()
    source = torch.Generator() if draws else None
    tree = Tree.chain([2, 1])
    assert Rollback(threshold=2.0).accept(tree, TargetLogits(logits, options, source)).path == [0]  # -log 0.08 = 2.5
    assert Rollback(threshold=3.0).accept(tree, TargetLogits(logits, options, source)).path == [0, 1]
    assert Rollback(threshold=1.0).accept(tree, TargetLogits(logits, options, source)).path == []


@pytest.mark.parametrize("draws", [False, True])
def test_the_target_writes_where_the_small_model_is_not_sure(draws: bool) -> None:
    """Of the second token the target would say 1 (greedy: always), and it does not object to 0."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.6, 0.0], [0.2, 0.4, 0.4]]))
    options = GenerationOptions(temperature=1.0) if draws else GenerationOptions()
    for sure, path in ((0.7, [0, 1]), (0.6, [0, 1]), (0.59, [0])):
        tree = Tree.chain([1, 0], [0.9, sure])
        if draws:  # what counts is the likeliest token, not the drawn one
            tree.chances[1] = 0.1
            tree.proposals = {-1: torch.tensor([0.0, 0.9, 0.1]), 0: torch.tensor([0.1, sure, 0.9 - sure])}
        written = []
        for seed in range(40 if draws else 1):
            source = torch.Generator().manual_seed(seed) if draws else None
            verdict = Rollback(threshold=3.0, fallback=0.6).accept(tree, TargetLogits(logits, options, source))
            assert verdict.path[: len(path)] == path
            if (
                len(path) == 1
            ):  # the target's own token; where that is the drafted one, what comes after it still counts
                assert verdict.path == ([0, 1] if len(verdict.path) == 2 else [0])
                written.append(0 if len(verdict.path) == 2 else verdict.token)
        if len(path) == 1:
            assert set(written) == ({0, 1} if draws else {1})
    # Without fallback, and from drafters that say nothing of their chances, only the target's word counts.
    for tree in (Tree.chain([1, 0], [0.9, 0.1]), Tree.chain([1, 0])):
        fallback = 0.0 if tree.chances else 0.6
        assert Rollback(3.0, fallback).accept(tree, TargetLogits(logits, GenerationOptions())).path == [0, 1]
    assert Rollback().fallback == 0.5


def test_lenience_forgives_a_factor() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    for factor, path in ((1.0, []), (0.61, []), (0.59, [0])):
        assert Lenient(factor).accept(Tree.chain([1]), TargetLogits(logits, GenerationOptions())).path == path
    # A token that the draft draws with certainty is accepted with probability p / factor.
    q = torch.tensor([0.0, 0.0, 1.0])
    source, options = torch.Generator().manual_seed(0), GenerationOptions(temperature=1.0)
    tree = Tree([2], [ROOT], [], {ROOT: q})
    right = sum(bool(Lenient(0.5).accept(tree, TargetLogits(logits, options, source)).path) for _ in range(4000))
    assert abs(right / 4000 - 0.4) < 0.035


def test_rules_are_read_from_names_and_mappings() -> None:
    assert isinstance(read_method(RULES, "exact"), Exact)
    assert read_method(RULES, {"typical": {"epsilon": 0.2}}) == Typical(epsilon=0.2)
    assert Typical().describe() == "typical (lossy)"
    with pytest.raises(RequestError, match="unknown acceptance 'typcal'; did you mean 'typical'"):
        read_method(RULES, "typcal")
    with pytest.raises(RequestError, match="epsilon: "):
        read_method(RULES, {"typical": {"epsilon": 2}})
    with pytest.raises(RequestError, match="unknown key 'eps'"):
        read_method(RULES, {"typical": {"eps": 0.2}})
