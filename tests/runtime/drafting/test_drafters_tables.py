"""What model-free drafters look things up in, against plain scans and plain counting."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from drafter_cases import occurrences, random_text
from hypothesis import given, settings
from hypothesis import strategies as st
from witten_bell import witten_bell

from runtime.drafting.drafters.hierarchy import token_ids
from runtime.drafting.drafters.tables import occurrences as occurrences_module
from runtime.drafting.drafters.tables.continuations import following, indexed
from runtime.drafting.drafters.tables.growth import grow, join
from runtime.drafting.drafters.tables.occurrences import BORDER, History, Occurrences
from runtime.drafting.drafters.tables.odds import BUCKETS, Guesses, Odds, bucket, likely
from runtime.drafting.drafters.tables.token_trie import Reader, TokenTrie, blended
from runtime.errors import RequestError
from runtime.sampling.tree import ROOT, Tree

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=80)


# ---------------------------------------------------------------- occurrences
def longest_match(
    tokens: list[int], ending: list[int], longest: int, shortest: int, own: bool
) -> tuple[int, list[int]]:
    for size in range(min(longest, len(ending)), shortest - 1, -1):
        places = occurrences(tokens, ending[-size:])
        places = places[1:] if own else places
        if places:
            return size, places
    return 0, []


@given(
    TEXTS, st.sampled_from([(1,), (3,), (1, 2, 3, 4), (1, 2, 4, 8), (2, 5)]), st.lists(st.integers(1, 30), max_size=6)
)
@settings(max_examples=150, deadline=None)
def test_the_longest_match_is_that_of_a_plain_scan(
    text: list[int], lengths: tuple[int, ...], pieces: list[int]
) -> None:
    growing: list[int] = []
    index = Occurrences(growing, lengths)
    for end in [*itertools.accumulate(pieces), len(text)]:
        growing += text[len(growing) : end]
        index.catch_up()
        found = index.match(1000)
        assert tuple(found) == longest_match(growing, growing, lengths[-1], lengths[0], own=True)
        for level, size in enumerate(lengths):
            if size <= len(growing):
                assert index.places(level, 1000) == occurrences(growing, growing[-size:])[1:]
                assert index.places(level, 2) == occurrences(growing, growing[-size:])[1:3]


@given(TEXTS, TEXTS)
@settings(max_examples=80, deadline=None)
def test_matches_of_another_text_are_those_of_a_plain_scan(text: list[int], other: list[int]) -> None:
    lengths = (1, 2, 4, 8)
    index, ending = Occurrences(text, lengths), Occurrences(other, lengths)
    index.catch_up()
    ending.catch_up()
    assert tuple(index.match(1000, ending)) == longest_match(text, other, 8, 1, own=False)
    for level, size in enumerate(lengths):
        wanted = occurrences(text, other[-size:]) if size <= len(other) else []
        assert index.places(level, 1000, ending) == wanted


def test_reading_at_once_is_reading_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(0, 5000, letters=30)
    whole = Occurrences(text, (1, 2, 4, 8, 16))
    whole.catch_up()
    monkeypatch.setattr(occurrences_module, "_BULK", 1 << 60)
    single = Occurrences([], (1, 2, 4, 8, 16))
    for token in text:
        single.tokens.append(token)
        single.catch_up()
    assert whole._links == single._links
    assert whole._heads == single._heads
    assert whole._hashes == single._hashes
    for level in range(5):
        assert whole.places(level, 10**6) == single.places(level, 10**6)
    assert len(single._links[0]) == single.seen == len(text)
    monkeypatch.undo()
    pieces, source = Occurrences([], (1, 2, 4, 8, 16)), random.Random(0)
    while len(pieces.tokens) < len(text):
        pieces.tokens += text[len(pieces.tokens) :][: source.choice([1, 3, 300, 700])]
        pieces.catch_up()
    assert pieces._links == whole._links
    assert pieces._heads == whole._heads
    assert pieces._hashes == whole._hashes


def test_tables_grow_with_the_text_and_a_token_costs_a_bounded_number_of_bytes() -> None:
    index = Occurrences([7] * 300_000, (1, 2, 4, 8))
    index.catch_up()
    assert index.memory_bytes < 25 * 4 * 300_000
    assert index.match(5) == (8, [299_998, 299_997, 299_996, 299_995, 299_994])


def test_how_long_two_places_agree() -> None:
    index = Occurrences([1, 2, 3, 4, 9, 2, 3, 4], (1, 2))
    index.catch_up()
    assert index.match(1) == (2, [3])
    assert index.agreement(3, 2, 64) == 3
    assert index.agreement(3, 2, 2) == 2


@given(TEXTS, st.integers(0, 79))
@settings(max_examples=50, deadline=None)
def test_what_follows_places(text: list[int], seed: int) -> None:
    places = random.Random(seed).sample(range(len(text)), min(len(text), 5))
    found = following(text, places)
    assert Counter({token: count for token, count, _ in found}) == Counter(
        text[p + 1] for p in places if p + 1 < len(text)
    )
    assert sorted(p for _, _, after in found for p in after) == sorted(p + 1 for p in places if p + 1 < len(text))


def test_indexed_lengths_are_powers_of_two_and_the_longest() -> None:
    assert indexed(1) == (1,)
    assert indexed(2) == (1, 2)
    assert indexed(5) == (1, 2, 4, 5)
    assert indexed(8) == (1, 2, 4, 8)


# ---------------------------------------------------------------- history
def test_history_finds_across_outputs_but_nothing_over_a_border() -> None:
    history, text = History(1000, (1, 2, 4)), Occurrences([5, 1, 2], (1, 2, 4))
    text.catch_up()
    history.add([1, 2, 3])
    history.add([9, 1])
    history.add([2, 8])
    found = history.index.match(10, text)
    assert found.length == 2  # [1, 2], not across [9, 1] and [2, 8]
    assert len(found.places) == 1
    assert [token for token, _, _ in following(history.index.tokens, found.places)] == [3]
    ends = history.index.places(0, 10, text)
    assert [token for token, _, _ in following(history.index.tokens, ends)] == [8, 3]


@given(st.integers(0, 200), st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=30))
@settings(max_examples=60, deadline=None)
def test_history_is_bounded_and_keeps_the_newest(window: int, outputs: list[list[int]]) -> None:
    history = History(window, (1, 2))
    for output in outputs:
        history.add(output)
        assert len(history) <= window
        kept = history.index.tokens
        everything = [token for each in outputs for token in [*each, BORDER]]
        if window >= 4:
            assert kept[-1] == BORDER
            newest = output[-(window // 2 - 1) :]
            assert kept[-1 - len(newest) : -1] == newest
            assert set(kept) <= set(everything)
    assert History(window, (1,)).index.match(3, _suffix([1])).places == []


def _suffix(tokens: list[int]) -> Any:
    return Occurrences(tokens, (1,))


# ---------------------------------------------------------------- odds
def test_odds_start_at_the_estimate_and_go_to_what_is_counted() -> None:
    odds = Odds()
    assert odds.chance(0, 0.3) == pytest.approx(0.3)
    source = random.Random(0)
    for _ in range(4000):
        odds.count(0, 0.3, source.random() < 0.75)
    assert odds.chance(0, 0.3) == pytest.approx(0.75, abs=0.06)
    assert odds.chance(1, 0.3) == pytest.approx(0.3)
    for _ in range(4000):
        odds.count(0, 0.3, False)  # what changes is learned anew
    assert odds.chance(0, 0.3) < 0.01
    odds.reset()
    assert odds.chance(0, 0.3) == pytest.approx(0.3)


def test_a_texts_odds_begin_with_those_of_all_texts_and_teach_them() -> None:
    parent = Odds()
    first = Odds(weight=2.0, parent=parent)
    for _ in range(200):
        first.count(0, 0.5, True)
    assert parent.chance(0, 0.5) > 0.9
    second = Odds(weight=2.0, parent=parent)
    assert second.chance(0, 0.5) == parent.chance(0, 0.5)
    for _ in range(20):
        second.count(0, 0.5, False)
    assert second.chance(0, 0.5) < 0.2 < parent.chance(0, 0.5)


def test_settling_counts_what_was_put_to_the_test_and_nothing_else() -> None:
    counted: list[tuple[int, bool]] = []

    class Counting(Odds):
        def count(self, kind: int, estimate: float, right: bool) -> None:
            counted.append((kind, right))

    guesses = Guesses(length=10)
    for kind, (token, parent) in enumerate([(5, ROOT), (6, ROOT), (7, 0), (8, 1), (9, 2), (4, 2), (3, 4)]):
        guesses.add(token, parent, 0.5, kind, 0.5)
    guesses.settle(Counting(), 9, [5])  # of another turn
    assert counted == []
    guesses.settle(Counting(), 10, [5, 7, 4])
    assert sorted(counted) == [(0, True), (1, False), (2, True), (4, False), (5, True)]
    guesses.settle(Counting(), 10, [5, 7, 4])  # once only
    assert len(counted) == 5


def test_buckets_are_ordered_and_estimates_rise_with_what_agrees() -> None:
    found = [bucket(length) for length in range(200)]
    assert found == sorted(found)
    assert found[-1] == BUCKETS - 1
    assert set(found) == set(range(BUCKETS))
    estimates = [likely(length) for length in range(100)]
    assert estimates == sorted(estimates)
    assert 0 <= estimates[0] < estimates[-1] < 1


# ---------------------------------------------------------------- growth
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_grown_trees_are_the_most_likely_reached_of_all(seed: int, nodes: int, depth: int) -> None:
    def chances(path: tuple[int, ...]) -> list[float]:
        source = random.Random(hash((seed, path)))
        return [source.random() for _ in range(source.randrange(4))]

    def followers(path: tuple[int, ...], level: int) -> list[Any]:
        assert level == len(path)
        return [(token, chance, 0, chance, (*path, token)) for token, chance in enumerate(chances(path))]

    def everything(path: tuple[int, ...], reach: float) -> list[float]:
        if len(path) == depth:
            return []
        found = []
        for token, chance in enumerate(chances(path)):
            found += [reach * chance, *everything((*path, token), reach * chance)]
        return found

    tree = grow((), followers, nodes, depth).tree
    assert sorted(tree.reach(), reverse=True) == pytest.approx(sorted(everything((), 1.0), reverse=True)[:nodes])
    assert tree.reach() == sorted(tree.reach(), reverse=True)


def test_branches_do_not_go_on_where_they_are_unlikely() -> None:
    tree = grow(0, lambda at, level: [(1, 0.5, 0, 0.5, at), (2, 0.2, 0, 0.2, at)], 100, 10, least=0.2).tree
    reach = tree.reach()
    assert all(parent == ROOT or reach[parent] >= 0.2 for parent in tree.parents)
    assert len(tree) == 8  # of the nodes with 0.5, 0.25 and 0.2 both children


def test_joined_trees_keep_chances_that_can_be_true() -> None:
    first = Tree([1, 2, 5], [ROOT, ROOT, 0], [0.5, 0.3, 0.9])
    more = Tree([3, 1, 6, 4, 7], [ROOT, ROOT, 1, 0, 2], [0.5, 0.5, 0.6, 0.8, 1.0])
    added = join(first, more, 6)
    assert first.tokens == [1, 2, 5, 3, 6, 4]
    assert first.parents == [ROOT, ROOT, 0, ROOT, 0, 3]
    assert first.chances == pytest.approx([0.5, 0.3, 0.9, 0.5 * 0.2, 0.6 * 0.1, 0.8])
    assert [node for node, _ in added] == [0, 2, 3]
    assert [part for _, part in added] == pytest.approx([0.2, 0.1, 1.0])


# ---------------------------------------------------------------- token trie
def contents(trie: TokenTrie) -> dict[tuple[int, ...], float]:
    """N-grams and weights, found by walking the lists of children; the dictionary must say the same."""
    found = {}
    waiting: list[tuple[tuple[int, ...], int]] = [((), 0)]
    while waiting:
        gram, node = waiting.pop()
        for kid in trie.kids(node):
            longer = (*gram, trie.token[kid])
            assert longer not in found
            assert trie.find(longer) == kid
            found[longer] = trie.weight[kid]
            waiting.append((longer, kid))
    assert len(found) == len(trie)
    return found


def naive_counts(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start : start + size])
        for text in texts
        for size in range(1, depth + 1)
        for start in range(len(text) - size + 1)
    )


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_trie_counts_all_ngrams_of_texts_that_take_turns(
    texts: list[list[int]], depth: int, turns: random.Random
) -> None:
    trie = TokenTrie(depth, 10**6)
    readers, rests = [Reader() for _ in texts], [list(text) for text in texts]
    while any(rests):
        who = turns.choice([index for index, rest in enumerate(rests) if rest])
        count = turns.randrange(1, 5)
        trie.read(readers[who], rests[who][:count])
        del rests[who][:count]
    assert contents(trie) == naive_counts(texts, depth)


@pytest.mark.parametrize("limit", [1, 50, 1000])
def test_a_full_trie_stays_within_its_bound_and_keeps_what_is_frequent(limit: int) -> None:
    trie, reader, source = TokenTrie(3, limit), Reader(), random.Random(0)
    for _ in range(400):
        trie.read(reader, [1, 2, 3])
        trie.read(reader, [source.randrange(10, 10_000) for _ in range(8)])
        assert len(trie) <= max(limit, 3)
    found = contents(trie)
    if limit >= 50:
        assert found[1, 2, 3] == max(weight for gram, weight in found.items() if len(gram) == 3)
    assert len(trie.weight) <= limit + 10  # numbers of nodes are used again
    before = trie.memory_bytes
    trie.clear()
    assert len(trie) == 0
    assert trie.memory_bytes < before
    trie.read(reader, [4, 5])  # a reader from before
    assert contents(trie) == {(4,): 1, (5,): 1, (4, 5): 1}


def test_pruning_halves_what_was_frequent_and_drops_what_came_once() -> None:
    trie, source = TokenTrie(3, 400), random.Random(0)
    trie.read(Reader(), [1, 2, 3, 4] * 100)
    trie.read(Reader(), [source.randrange(10, 100_000) for _ in range(200)])
    found = contents(trie)
    weights = [found[gram] for gram in ((1, 2, 3), (2, 3, 4), (3, 4, 1), (4, 1, 2))]
    assert min(weights) >= 24  # of 100 or 99, halved once or twice
    assert sum(weight == 1 for weight in found.values()) > 100
    trie.read(Reader(), [source.randrange(10, 100_000) for _ in range(5000)])
    assert (1, 2, 3) not in contents(trie)


def test_children_that_occurred_last_come_first() -> None:
    trie = TokenTrie(2, 100)
    trie.read(Reader(), [1, 2, 1, 3, 1, 4, 1, 2])
    node = trie.find([1])
    assert node is not None
    assert [(token, count) for token, count, _ in trie.followers(node)] == [(2, 2.0), (4, 1.0), (3, 1.0)]


@given(st.lists(st.dictionaries(st.integers(0, 9), st.integers(1, 20), max_size=6), max_size=4))
@settings(max_examples=80, deadline=None)
def test_blended_probabilities_are_those_of_the_recursion(contexts: list[dict[int, float]]) -> None:
    found = blended([[(t, float(c), (i, t)) for t, c in each.items()] for i, each in enumerate(contexts)], 100)
    expected = witten_bell(contexts)
    assert {token: chance for token, chance, _ in found} == pytest.approx(expected)
    assert sum(expected.values()) <= 1 + 1e-9
    for token, _, after in found:
        assert after == [(i, token) for i, each in enumerate(contexts) if token in each]
    best = blended([[(t, float(c), None) for t, c in each.items()] for each in contexts], 2)
    assert [chance for _, chance, _ in best] == pytest.approx(sorted(expected.values(), reverse=True)[:2])


# ---------------------------------------------------------------- corpora
def test_a_corpus_is_read_from_ids_and_from_a_file(tmp_path: Any) -> None:
    assert token_ids([3, 1, 2], "x", 3) == [3, 1, 2]
    assert token_ids([], "x", 3) == []
    for dtype in (np.uint16, np.int32, np.int64):
        np.save(tmp_path / "ids.npy", np.array([3, 1, 2], dtype=dtype))
        found = token_ids(str(tmp_path / "ids.npy"), "x", 3)
        assert found == [3, 1, 2]
        assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([[1, 2]]), "one row of token ids"),
        (np.array([1.5]), "one row of token ids"),
        (np.array(["a"]), "one row of token ids"),
        (np.array([-1]), "at least 0"),
        (np.array([2**31 - 1]), "below"),
        (np.arange(9), "at most 5 token ids"),
        (np.array([{}], dtype=object), "cannot be read"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Any, array: np.ndarray, reason: str) -> None:
    np.save(tmp_path / "ids.npy", array, allow_pickle=True)
    with pytest.raises(RequestError, match=reason):
        token_ids(tmp_path / "ids.npy", "hierarchy.statistics", 5)


def test_a_corpus_that_is_not_there_is_refused(tmp_path: Any) -> None:
    with pytest.raises(RequestError, match=r"hierarchy.statistics: .*missing.npy"):
        token_ids(str(tmp_path / "missing.npy"), "hierarchy.statistics", 5)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(RequestError, match="cannot be read"):
        token_ids(str(tmp_path / "text.npy"), "hierarchy.statistics", 5)
