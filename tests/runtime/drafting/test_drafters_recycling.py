"""Token Recycling: the matrix against a plain one, the shape against all trees, and what is learned of ranks."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from drafter_cases import Words, Writing, branches, check_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafting.drafters.base import Ask, Verified
from runtime.drafting.drafters.token_recycling import TokenRecycling, likeliest
from runtime.sampling.tree import ROOT, Tree


@pytest.mark.parametrize(
    ("rows", "vocabulary", "count"), [(1, 3, 8), (4, 100, 8), (9, 64 * 140, 8), (5, 64 * 140 + 37, 5)]
)
def test_the_likeliest_are_those_of_a_full_order(rows: int, vocabulary: int, count: int) -> None:
    for seed in range(5):
        logits = torch.stack(
            [torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed + row)) for row in range(rows)]
        )
        found = likeliest(logits.float(), count)
        assert found.dtype == np.int32
        assert found.tolist() == logits.argsort(dim=1, descending=True)[:, :count].tolist()


def test_the_likeliest_in_the_columns_beyond_whole_chunks_are_found() -> None:
    logits = torch.zeros(1, 64 * 200 + 5)
    logits[0, -5:] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    assert likeliest(logits, 5).tolist() == [list(range(12800, 12805))]


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_the_matrix_is_a_plain_one(seed: int, count: int) -> None:
    source, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    drafter, plain = TokenRecycling(candidates=count), {}
    text = Words([source.randrange(12)], 1)
    state = drafter.begin(text)
    for _ in range(6):
        last = text.tokens[-1]
        tree = Tree()
        for node in range(source.randrange(8)):
            tree.add(source.randrange(12), source.randrange(ROOT, node))
        children, path = tree.children(), []
        while source.random() < 0.7 and (path[-1] if path else ROOT) in children:
            path.append(source.choice(children[path[-1] if path else ROOT]))
        logits = torch.randn(1 + len(tree), 12, generator=numbers)
        rows = [[row.index(value) for value in sorted(row, reverse=True)[:count]] for row in logits.tolist()]
        for node, token in enumerate(tree.tokens):  # one after another, the accepted ones last
            plain[token] = rows[1 + node]
        plain[last] = rows[0]
        for node in path:
            plain[tree.tokens[node]] = rows[1 + node]
        new = [*(tree.tokens[node] for node in path), source.randrange(12)]
        text.tokens += new
        drafter.learn(state, Verified(text, tree, path, new, logits))
    found = {token: row for token, row in enumerate(drafter._matrix.tolist()) if row[0] >= 0}
    assert found == plain


def test_trees_are_filled_from_the_matrix_along_their_branches() -> None:
    drafter = TokenRecycling(candidates=3)
    drafter._matrix = np.array([[1, 2, 3], [2, 3, -1], [-1, -1, -1], [0, 1, 2]], dtype=np.int32)
    text = Words([0], 1)
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, 64, 3)])
    check_tree(tree, 64, 3)
    rows = drafter._matrix.tolist()
    ranks = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        ranks[node] = rows[0 if parent == ROOT else tree.tokens[parent]].index(token)
    assert -1 not in tree.tokens
    # No level is deeper than asked, no known candidate of an inner node is missing, as 64 nodes are enough.
    paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(len(tree))]
    expected = []
    for depth in (1, 2, 3):
        for path in itertools.product(range(4), repeat=depth):
            if all(after in rows[before] for before, after in itertools.pairwise([0, *path])):
                expected.append(list(path))
    assert len(tree) == sum(1 for path in expected if path in paths)
    shape = drafter.shapes.of(64, 3)
    assert len(tree) <= len(shape.tree) == 39  # 3 + 9 + 27
    assert sorted(paths) == sorted(expected)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (5, 2), (13, 3), (30, 3), (500, 3)])
def test_the_shape_is_the_tree_that_is_most_likely_reached(nodes: int, depth: int) -> None:
    drafter = TokenRecycling(candidates=4)
    source = random.Random(0)
    for _ in range(300):  # ranks that do not fall with the rank
        drafter._odds.count(source.choice([1, 6, 9]), 0.2, True)
        drafter._odds.count(source.choice([0, 4, 8]), 0.4, False)
    chance = [
        [drafter._odds.chance(4 * level + rank, drafter._estimates[rank]) for rank in range(4)] for level in range(4)
    ]
    reaches = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(4), repeat=length):
            reaches.append(np.prod([chance[level][rank] for level, rank in enumerate(ranks)]))
    shape = drafter.shapes.of(nodes, depth).tree
    assert shape.reach() == pytest.approx(sorted(reaches, reverse=True)[:nodes])
    assert len(set(zip(shape.parents, shape.tokens, strict=True))) == len(shape)


def test_chances_of_ranks_are_learned_and_the_shape_follows() -> None:
    """A target that always writes the second of its candidates."""
    drafter, source = TokenRecycling(candidates=4, refit=16), random.Random(0)
    text = Words([0], 1)
    state = drafter.begin(text)
    order = {token: source.sample(range(30), 4) for token in range(30)}
    table = torch.zeros(30, 30)
    for token, after in order.items():
        table[token, after] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    first: Tree | None = None
    for _ in range(300):
        (tree,) = drafter.draft([Ask(state, text, 8, 4)])
        first = first or tree
        last, path, new, node = text.tokens[-1], [], [], ROOT
        while True:
            new.append(order[new[-1] if new else last][1])
            right = [n for n, p in enumerate(tree.parents) if p == node and tree.tokens[n] == new[-1]]
            if not right:
                break
            path.append(node := right[0])
        logits = table[[last, *tree.tokens]]
        text.tokens += new
        drafter.learn(state, Verified(text, tree, path, new, logits))
    (tree,) = drafter.draft([Ask(state, text, 8, 4)])
    chain = [text.tokens[-1]]
    for _ in range(4):
        chain.append(order[chain[-1]][1])
    assert chain[1:] in branches(tree)
    assert tree.chances[0] > 0.9
    assert tree.tokens[0] == chain[1]


def test_it_starts_hot_and_takes_the_memory_that_was_promised() -> None:
    drafter = TokenRecycling()
    assert drafter.memory_bytes == 0
    text = Words([5, 6], 1)
    state = drafter.begin(text)
    logits = torch.randn(1, 32_000)
    drafter.learn(state, Verified(text, Tree(), [], [6], logits))
    drafter.end(state)
    assert drafter.memory_bytes == 32_000 * 8 * 4 < 2 << 20
    other = Words([9, 5], 2)
    (tree,) = drafter.draft([Ask(drafter.begin(other), other, 8, 1)])
    assert tree.tokens == logits[0].topk(8).indices.tolist()


def test_logits_that_are_not_on_the_cpu_or_are_broken_do_no_harm() -> None:
    drafter, text = TokenRecycling(), Words([5, 6], 1)
    state = drafter.begin(text)
    drafter.learn(state, Verified(text, Tree(), [], [6], torch.full((1, 20_000), float("nan"))))
    (tree,) = drafter.draft([Ask(state, Words([5], 1), 8, 2)])
    check_tree(tree, 8, 2)


def test_what_the_target_wrote_is_proposed_when_its_token_comes_again() -> None:
    rest = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    writing = Writing(TokenRecycling(), [0], rest)
    while not writing.done:
        writing.step()
    assert writing.steps <= 9 + 5
