"""Hierarchical drafting: nearer stores first, later ones as long as that is not enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drafter_cases import Words, Writing, branches, random_text

from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.hierarchy import Hierarchy
from runtime.drafting.drafters.tables.occurrences import Match, Occurrences
from runtime.sampling.tree import ROOT, Tree

CORPUS = [1, 2, 30, 31, 32]
OUTPUT = [1, 2, 20, 21, 22]
CONTEXT = [1, 2, 10, 11, 12]


def draft(drafter: Hierarchy, tokens: list[int], nodes: int = 16, depth: int = 3) -> Tree:
    text = Words(tokens, len(tokens))
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, nodes, depth)])
    return tree


def full(**options: int) -> Hierarchy:
    """With something in each store."""
    drafter = Hierarchy(statistics=CORPUS, **options)
    Writing(drafter, [99], OUTPUT, vocabulary=100).finish()
    drafter._odds.reset()
    return drafter


def test_stores_are_asked_in_the_order_of_their_locality() -> None:
    assert branches(draft(full(), [*CONTEXT, 7, 1, 2])) == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert branches(draft(full(), [8, 9, 7, 1, 2])) == [[20, 21, 22], [30, 31, 32]]
    assert branches(draft(Hierarchy(statistics=CORPUS), [7, 1, 2])) == [[30, 31, 32]]
    assert not len(draft(Hierarchy(), [7, 1, 2]))


@pytest.mark.parametrize(("enough", "found"), [(1, 1), (3, 3), (4, 4), (6, 6), (9, 9), (64, 9)])
def test_later_stores_are_asked_only_until_there_is_enough(enough: int, found: int) -> None:
    tree = draft(full(enough=enough), [*CONTEXT, 7, 1, 2])
    assert len(tree) == found
    assert tree.tokens[:3] == [10, 11, 12][:found]


def test_no_more_is_taken_than_is_asked_for() -> None:
    for nodes in range(1, 12):
        assert len(draft(full(), [*CONTEXT, 7, 1, 2], nodes)) == min(nodes, 9)


def test_a_store_that_is_not_needed_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, match = full(), Occurrences.match
    asked = []

    def counting(store: Occurrences, places: int, *suffix: list[int]) -> Match:
        if not suffix:  # the sequence's own tokens
            return match(store, places)
        asked.append("corpus" if CORPUS[-1] in store.tokens else "outputs")
        return Match(0, [])

    monkeypatch.setattr(Occurrences, "match", counting)
    draft(drafter, [*CONTEXT, 7, 1, 2], nodes=3)
    assert asked == []
    draft(drafter, [*CONTEXT, 7, 1, 2], nodes=4)
    assert asked == ["outputs", "corpus"]


def test_what_two_stores_say_is_said_once_and_chances_stay_chances() -> None:
    drafter = Hierarchy(statistics=[1, 2, 10, 50, 1, 2, 60])
    text = Words([*CONTEXT, 7, 1, 2], 8)
    state = drafter.begin(text)
    (tree,) = drafter.draft([Ask(state, text, 16, 3)])
    assert state.guesses.estimates == pytest.approx(tree.chances)  # nothing was learned yet
    assert sorted(branches(tree)) == [[10, 11, 12], [10, 50, 1], [60]]
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    for parent in {ROOT, *tree.parents}:
        assert sum(tree.chances[node] for node, above in enumerate(tree.parents) if above == parent) <= 1 + 1e-9


def test_width_is_how_many_go_on_from_a_place() -> None:
    tokens = [token for other in (11, 12, 13, 14, 15, 16) for token in (1, other)] + [1]
    for width in (1, 3, 9):
        tree = draft(Hierarchy(width=width), tokens, depth=1)
        assert len(tree) == min(width, 6)
        assert set(tree.tokens) <= {11, 12, 13, 14, 15, 16}
        assert tree.tokens[0] == 16  # of equals the latest


def test_shortest_is_the_least_that_must_agree() -> None:
    for shortest, found in ((1, True), (2, True), (3, False)):
        tree = draft(Hierarchy(shortest=shortest, longest=4), [*CONTEXT, 7, 1, 2])
        assert bool(len(tree)) == found


def test_a_corpus_may_be_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "corpus.npy", np.array(CORPUS, dtype=np.uint16))
    drafter = Hierarchy(statistics=str(tmp_path / "corpus.npy"))
    assert drafter.vocabulary == 33
    assert draft(drafter, [1, 2]).tokens == [30, 31, 32]
    drafter.reset()
    assert draft(drafter, [1, 2]).tokens == [30, 31, 32]
    assert Hierarchy().vocabulary is None


def test_what_is_written_again_and_again_stays_and_the_rest_goes() -> None:
    drafter = Hierarchy(history=400)
    for seed in range(30):
        Writing(
            drafter, [99], [5, 6, 7, 8, *(10 + token for token in random_text(seed, 40, 20))], vocabulary=100
        ).finish()
    assert draft(drafter, [5, 6], depth=2).tokens[:2] == [7, 8]
    assert len(drafter._earlier) <= 400
