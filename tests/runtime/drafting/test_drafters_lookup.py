"""Lookup and CopySpec against a plain scan of the whole text; what is learned of how long a copy holds."""

from __future__ import annotations

import random

import pytest
from drafter_cases import Words, Writing, check_tree, occurrences, random_text
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.lookup import Lookup, copied
from runtime.drafting.drafters.tables.odds import likely


def naive_copy(tokens: list[int], longest: int, shortest: int, candidates: int, count: int) -> tuple[list[int], int]:
    """What is copied, and how many tokens agree before it."""

    def agreement(end: int) -> int:
        size = 0
        while size < 64 and size <= end and tokens[end - size] == tokens[len(tokens) - 1 - size]:
            size += 1
        return size

    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        places = occurrences(tokens, tokens[-size:])[1:]
        if places:
            agreeing = size
            place = places[0]
            if size == longest:
                place = max(places[:candidates], key=lambda end: (agreement(end), end))
                agreeing = agreement(place)
            text = list(tokens)
            for offset in range(count):  # one by one, so that a copy runs into itself
                text.append(text[place + 1 + offset])
            return text[len(tokens) :], agreeing
    return [], 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=70),
    st.sampled_from([(8, 1), (2, 1), (3, 3), (1, 1), (5, 2)]),
    st.sampled_from([1, 3, 100]),
    st.integers(1, 12),
    st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_what_is_copied_is_what_a_plain_scan_finds(
    tokens: list[int], sizes: tuple[int, int], candidates: int, nodes: int, depth: int
) -> None:
    longest, shortest = sizes
    drafter = Lookup(longest, shortest, candidates)
    text = Words(tokens[: len(tokens) // 2 + 1], 1)
    state = drafter.begin(text)
    text.tokens = list(tokens)  # grown since, and another list
    (tree,) = drafter.draft([Ask(state, text, nodes, depth)])
    expected, agreeing = naive_copy(tokens, longest, shortest, candidates, min(nodes, depth))
    assert tree.tokens == expected
    assert tree.is_chain
    assert tree.chances == pytest.approx([likely(agreeing + place) for place in range(len(expected))])


def test_copies_run_into_themselves() -> None:
    assert copied([1, 2, 3, 4], 2, 7) == [3, 4, 3, 4, 3, 4, 3]
    assert copied([1, 2, 3, 4], 3, 1) == [4]
    assert copied([1, 2, 3, 4], 0, 3) == [1, 2, 3]


def test_the_place_that_agrees_longest_is_copied_not_the_latest() -> None:
    once, again = [1, 2, 3, 4, 5, 6], [9, 3, 4, 7]
    text = Words([*once, *again, 8, 1, 2, 3, 4], 5)
    for candidates, expected in ((1, 7), (2, 5)):
        drafter = Lookup(2, 2, candidates)
        (tree,) = drafter.draft([Ask(drafter.begin(text), text, 1, 1)])
        assert tree.tokens == [expected]


def test_copyspec_wants_its_number_of_tokens() -> None:
    drafter = Lookup(longest=3, shortest=3)
    for tokens, expected in (([1, 2, 3, 4, 5, 2, 3], []), ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5])):
        text = Words(tokens, 1)
        (tree,) = drafter.draft([Ask(drafter.begin(text), text, 2, 2)])
        assert tree.tokens == expected


def test_copies_that_fail_make_later_ones_less_likely_and_the_other_way_round() -> None:
    source = random.Random(0)
    drafter = Lookup(4, 1)
    random_writing = Writing(drafter, [0], [source.randrange(4) for _ in range(1500)]).finish()
    low = [tree.chances[0] for tree in random_writing.trees if len(tree)]
    drafter.reset()
    text = random_text(0, 200, 30)
    copying = Writing(drafter, text, text[50:] * 3).finish()
    high = [tree.chances[0] for tree in copying.trees if len(tree)]
    assert sum(low[-50:]) / 50 < 0.4 < 0.8 < sum(high[-10:]) / 10
    # What was learned is where the next text starts.
    prompt = Words(text + text[:20], 1)
    (tree,) = drafter.draft([Ask(drafter.begin(prompt), prompt, 4, 4)])
    assert tree.chances[0] > likely(20)


def test_copies_stop_where_they_are_unlikely() -> None:
    drafter, text = Lookup(), Words([1, 2, 3, 4, 5, 6, 7, 8, 1], 9)
    state = drafter.begin(text)
    (whole,) = drafter.draft([Ask(state, text, 7, 7)])
    (part,) = drafter.draft([Ask(state, text, 7, 7, least=0.1)])
    assert len(whole) == 7
    assert 0 < len(part) < 7
    assert whole.reach()[len(part) - 1] < 0.1 <= whole.reach()[len(part) - 2]
    check_tree(part, 7, 7)
