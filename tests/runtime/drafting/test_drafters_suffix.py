"""SuffixDecoding against plain counting over the text; which of two stores wins; how large a tree may be."""

from __future__ import annotations

import pytest
from drafter_cases import Words, Writing, occurrences, random_text
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.suffix import Suffix
from runtime.drafting.drafters.tables.odds import likely
from runtime.sampling.tree import Tree

ALL = {"occurrences": 4096, "factor": 64, "offset": 4096}


def draft(drafter: Suffix, tokens: list[int], nodes: int = 1000, depth: int = 6) -> Tree:
    text = Words(tokens, len(tokens))
    state = drafter.begin(text)
    (tree,) = drafter.draft([Ask(state, text, nodes, depth)])
    drafter.end(state)
    return tree


def naive_chances(tokens: list[int], longest: int, depth: int, slope: float = 0.4) -> dict[tuple[int, ...], float]:
    """Of all that followed the longest end that occurred before: C(child) / C(node), and how likely such guesses are at first."""
    for size in range(min(longest, len(tokens)), 0, -1):
        if occurrences(tokens, tokens[-size:])[1:]:
            break
    else:
        return {}
    chances, waiting = {}, [()]
    while waiting:
        path: tuple[int, ...] = waiting.pop()
        own = 0 if path else 1  # the end itself is not one that something followed
        total = len(occurrences(tokens, [*tokens[-size:], *path])) - own
        for token in sorted(set(tokens)):
            count = len(occurrences(tokens, [*tokens[-size:], *path, token]))
            if count and len(path) < depth:
                often = 1 if count == 1 else 2 if count < 4 else 4
                chances[(*path, token)] = count / total * likely((size + len(path)) * often, slope)
                waiting.append((*path, token))
    return chances


@given(st.lists(st.integers(0, 2), min_size=1, max_size=50), st.sampled_from([1, 3, 8]))
@settings(max_examples=100, deadline=None)
def test_trees_are_the_frequencies_of_plain_counting(tokens: list[int], longest: int) -> None:
    tree = draft(Suffix(longest=longest, patterns=1, history=0, **ALL), tokens, depth=5)
    found = {tuple(tree.tokens[i] for i in tree.path(node)): tree.chances[node] for node in range(len(tree))}
    assert found == pytest.approx(naive_chances(tokens, longest, 5))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=50), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_small_trees_are_the_most_likely_part_of_large_ones(tokens: list[int], nodes: int) -> None:
    large = draft(Suffix(patterns=1, history=0, **ALL), tokens)
    small = draft(Suffix(patterns=1, history=0, **ALL), tokens, nodes)
    assert small.reach() == pytest.approx(sorted(large.reach(), reverse=True)[:nodes])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_better_of_the_text_and_of_earlier_outputs_is_proposed(earlier: list[int], tokens: list[int]) -> None:
    """Against drafters that see only one of them."""

    def with_history(patterns: int) -> Suffix:
        drafter = Suffix(patterns=patterns, **ALL)
        text = Words([0, *earlier], 1)
        drafter.end(drafter.begin(text))
        return drafter

    both, own = draft(with_history(1), tokens), draft(Suffix(patterns=1, history=0, **ALL), tokens)
    # What ends an output is followed by nothing, and a token that is nowhere else keeps the text from matching itself.
    scores = [sum(own.reach()), score_of_history(earlier, tokens)]
    assert sum(both.reach()) == pytest.approx(max(scores))
    more = draft(with_history(3), tokens)
    assert sum(more.reach()) >= sum(both.reach()) - 1e-9


def score_of_history(earlier: list[int], tokens: list[int]) -> float:
    """As naive_chances, over another text."""
    for size in range(min(32, len(tokens)), 0, -1):
        if occurrences(earlier, tokens[-size:]):
            break
    else:
        return 0.0
    score, waiting = 0.0, [((), 1.0)]
    while waiting:
        path, reach = waiting.pop()
        total = len(occurrences(earlier, [*tokens[-size:], *path]))
        for token in set(earlier):
            count = len(occurrences(earlier, [*tokens[-size:], *path, token]))
            if count and len(path) < 6:
                often = 1 if count == 1 else 2 if count < 4 else 4
                below = reach * count / total * likely((size + len(path)) * often, 0.2)
                score += below
                waiting.append(((*path, token), below))
    return score


def test_a_longer_match_may_have_a_larger_tree() -> None:
    text = [*range(100, 140), 1, *range(100, 110)]
    for factor, offset, expected in ((1, 0, 10), (2, 0, 20), (0.5, 3, 8), (0, 0, 0), (0, 4, 4)):
        tree = draft(Suffix(factor=factor, offset=offset), text, 1000, 100)
        assert len(tree) == expected


def test_shorter_ends_are_tried_where_they_occur_more_often() -> None:
    """[1, 2, 3] was followed by 4 once; 3 alone by 5 very often."""
    tokens = [1, 2, 3, 4, *([9, 3, 5] * 30), 1, 2, 3]
    one, two = draft(Suffix(patterns=1), tokens, 1, 1), draft(Suffix(patterns=2), tokens, 1, 1)
    assert (one.tokens, two.tokens) == ([4], [5])
    assert two.chances[0] > one.chances[0]


def test_only_the_latest_occurrences_are_counted() -> None:
    tokens = [*([1, 2] * 20), *([1, 3] * 4), 1]
    assert draft(Suffix(longest=1, occurrences=4, patterns=1, history=0), tokens, 4, 1).tokens == [3]
    found = draft(Suffix(longest=1, occurrences=8, patterns=1, history=0), tokens, 4, 1)
    assert dict(zip(found.tokens, found.chances, strict=True)) == pytest.approx(
        {2: 0.5 * likely(4), 3: 0.5 * likely(4)}
    )


def test_prompts_of_others_are_not_remembered() -> None:
    drafter = Suffix()
    secret = random_text(0, 100, 3)
    Writing(drafter, secret, [30, 31]).finish()
    assert set(drafter._earlier.index.tokens[:-1]) == {30, 31}
