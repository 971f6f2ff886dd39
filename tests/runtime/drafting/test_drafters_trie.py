"""Lookahead's trie and the tri-gram model, against plain counts of n-grams and a plain tree search."""

from __future__ import annotations

import random
from math import sqrt

import pytest
from drafter_cases import Words, Writing, random_text
from hypothesis import given, settings
from hypothesis import strategies as st
from witten_bell import witten_bell

from runtime.drafting.drafters.adaptive_ngram import AdaptiveNgram
from runtime.drafting.drafters.base import Ask, Verified
from runtime.drafting.drafters.trie import Trie
from runtime.sampling.tree import Tree

Counts = dict[int, float]


def after(tokens: list[int], ending: list[int]) -> Counts:
    """What came after each occurrence, and how often."""
    counts: Counts = {}
    for start in range(len(tokens) - len(ending)):
        if tokens[start : start + len(ending)] == ending:
            token = tokens[start + len(ending)]
            counts[token] = counts.get(token, 0) + 1
    return counts


# ---------------------------------------------------------------- trie
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_branches_of_the_text_and_of_outputs_are_blended_by_their_counts(
    output: list[int], tokens: list[int], prefix: int
) -> None:
    drafter = Trie(prefix=prefix, width=100)
    first = Writing(drafter, [50], output, nodes=1).finish()
    assert first.text.tokens == [50, *output]
    drafter._odds.reset()
    text = Words(list(tokens), len(tokens))
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, 10_000, 2)])
    found = {tuple(tree.tokens[i] for i in tree.path(node)): tree.chances[node] for node in range(len(tree))}
    expected: dict[tuple[int, ...], float] = {}
    for path in [(), (0,), (1,), (2,)]:
        contexts = [
            after(source, [*tokens[-size:], *path])
            for size in range(min(prefix, len(tokens)), 0, -1)
            for source in (tokens, output)
            if after(source, tokens[-size:])
        ]
        if not path or path in expected:
            expected |= {(*path, token): chance for token, chance in witten_bell(contexts).items()}
    assert found == pytest.approx({path: min(max(chance, 0.001), 0.999) for path, chance in expected.items()})


def test_longer_prefixes_are_trusted_more() -> None:
    tokens = [1, 2, 3, 4, 8, 3, 5, 8, 3, 5, 1, 2, 3]
    drafter, text = Trie(), Words(tokens, len(tokens))
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, 16, 1)])
    assert tree.tokens[:2] == [4, 5]
    assert tree.chances[0] > tree.chances[1]


def test_outputs_stay_and_prompts_go() -> None:
    drafter = Trie()
    Writing(drafter, [1, 2, 3, 4], [5, 6, 7, 8]).finish()
    for tokens, expected in (([1, 2], []), ([9, 5, 6], [7, 8])):
        text = Words(tokens, len(tokens))
        (tree,) = drafter.draft([Ask(drafter.begin(text), text, 8, 8)])
        assert tree.tokens == expected


def test_what_follows_in_the_middle_of_a_text_is_known_to_others_at_once() -> None:
    drafter = Trie()
    writing = Writing(drafter, [1], [5, 6, 7, 8, 9])
    for _ in range(3):
        writing.step()
    text = Words([2, 5, 6], 3)
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, 8, 8)])
    assert tree.tokens[0] == 7


# ---------------------------------------------------------------- tri-grams
def probabilities(tokens: list[int], last: list[int]) -> Counts:
    return witten_bell([after(tokens, last[-2:]), after(tokens, last[-1:])] if len(last) > 1 else [after(tokens, last)])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
def test_chances_are_those_of_a_tri_gram_model_with_backing_off(tokens: list[int]) -> None:
    drafter, text = AdaptiveNgram(width=100), Words(tokens, len(tokens))
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, 100, 2)])
    for node in range(len(tree)):
        path = [tree.tokens[index] for index in tree.path(node)]
        chance = probabilities(tokens, [*tokens, *path[:-1]])[path[-1]]
        assert tree.chances[node] == pytest.approx(min(max(chance, 0.001), 0.999))
    assert sum(parent < 0 for parent in tree.parents) == len(probabilities(tokens, tokens))


def plain_search(tokens: list[int], nodes: int, depth: int, exploration: float, width: int) -> set[tuple[int, ...]]:
    """The search as its docstring has it, with everything looked up anew each time."""
    passed: dict[tuple[int, ...], int] = {}
    found: dict[tuple[int, ...], float] = {}
    tree: set[tuple[int, ...]] = set()

    def below(path: tuple[int, ...]) -> list[tuple[int, float]]:
        if len(path) == depth:
            return []
        likely = probabilities(tokens, [*tokens, *path])
        return sorted(likely.items(), key=lambda item: -item[1])[:width]

    def open_(path: tuple[int, ...]) -> bool:
        """Whether something can still be added there."""
        return path not in tree or any(open_((*path, token)) for token, _ in below(path))

    for _ in range(nodes):
        path: tuple[int, ...] = ()
        way = [(path, 1.0)]
        while not path or path in tree:
            options = [(token, p) for token, p in below(path) if open_((*path, token))]
            if not options:
                return tree

            def score(option: tuple[int, float], above: tuple[int, ...] = path) -> float:
                child = (*above, option[0])
                n = passed.get(child, 0)
                q = found[child] / n if n else 0.0
                return q + exploration * option[1] * sqrt(passed.get(above, 0) + 1) / (1 + n)

            token, p = max(options, key=score)
            path = (*path, token)
            way.append((path, p))
        tree.add(path)
        value = 0.0
        for place, p in reversed(way):
            value = p if place == path else p * (1 + value) / 2
            passed[place] = passed.get(place, 0) + 1
            found[place] = found.get(place, 0.0) + value
    return tree


@pytest.mark.parametrize("exploration", [0.0, 0.37, 3.1, 100.0])
def test_the_search_is_the_one_that_is_documented(exploration: float) -> None:
    # Counts that differ, so that no two scores are equal and the order of equals does not matter.
    source = random.Random(1)
    tokens = [min(4, int(source.paretovariate(0.8)) - 1) for _ in range(400)]
    drafter, text = AdaptiveNgram(exploration=exploration, width=3), Words(tokens, len(tokens))
    state = drafter.begin(text)
    for nodes, depth in ((1, 1), (7, 3), (20, 5), (60, 3)):
        (tree,) = drafter.draft([Ask(state, text, nodes, depth)])
        found = {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))}
        assert found == plain_search(tokens, nodes, depth, exploration, 3)


def test_exploration_makes_trees_wider() -> None:
    tokens = random_text(0, 300, 6)
    text, shapes = Words(tokens, 300), []
    for exploration in (0.0, 1.0, 1000.0):
        drafter = AdaptiveNgram(exploration=exploration)
        (tree,) = drafter.draft([Ask(drafter.begin(text), text, 12, 12)])
        shapes.append(max(tree.depths()))
    assert shapes[0] == 12
    assert shapes[0] > shapes[2]
    assert shapes == sorted(shapes, reverse=True)


def test_counts_follow_what_is_verified_and_prompts_only_as_far_as_asked() -> None:
    drafter = AdaptiveNgram(prompt=3)
    text = Words([1, 2, 3, 4, 5, 6], 6)
    state = drafter.begin(text)
    assert drafter.following((1, 2)) == []
    assert [token for token, _ in drafter.following((4, 5))] == [6]
    text.tokens += [7, 8]
    drafter.learn(state, Verified(text, Tree(), [], [7, 8], None))  # type: ignore[arg-type]
    assert [token for token, _ in drafter.following((6, 7))] == [8]
    assert [token for token, _ in drafter.following((99, 7))] == [8]
    assert drafter.following((7, 8)) == []
