"""Compositions: who is asked, whose tree is taken, and that all are told everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_cases import FREE, Words, Writing, check_tree, random_text

from runtime.drafting.drafters.base import Ask, Drafter, Draw, Text, Verified
from runtime.drafting.drafters.composition import Fallback, Merged, both, expected
from runtime.drafting.drafters.lookup import Lookup
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import ROOT, Tree


class Says(Drafter):
    """Always the same tree, and a list of all that it was told."""

    name = "says"

    def __init__(self, tree: Tree, **attributes: Any) -> None:
        self.tree, self.told = tree, []
        for key, value in attributes.items():
            setattr(self, key, value)

    def begin(self, text: Text) -> Any:
        self.told.append("begin")
        return self, text

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        self.told.append(f"draft {len(asks)}")
        assert all(ask.state[0] is self and ask.state[1] is ask.text for ask in asks)
        self.draws_asked = [ask.draw for ask in asks]
        return [self.tree for _ in asks]

    def read(self, state: Any, start: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        assert state[0] is self
        self.told.append(f"read {start} {list(tokens)}")

    def learn(self, state: Any, verified: Verified) -> None:
        assert state[0] is self
        self.told.append(verified)

    def end(self, state: Any) -> None:
        assert state[0] is self
        self.told.append("end")

    def reset(self) -> None:
        self.told.append("reset")

    @property
    def memory_bytes(self) -> int:
        return 100


WEAK, STRONG = Tree.chain([1, 2], [0.5, 0.5]), Tree.chain([3, 4, 5], [0.9, 0.9, 0.9])


def ask(drafter: Drafter, draw: Draw | None = None, nodes: int = 8) -> Ask:
    text = Words([1], 1)
    return Ask(drafter.begin(text), text, nodes, 8, draw)


def test_the_first_that_expects_enough_is_taken_and_others_are_not_asked() -> None:
    first, second, third = Says(WEAK), Says(STRONG), Says(STRONG)
    drafter = Fallback([first, second, third], least=2.0)
    assert drafter.draft([ask(drafter)]) == [STRONG]
    assert ["draft 1" in each.told for each in (first, second, third)] == [True, True, False]
    cheap = Fallback([first, second], least=0.7)
    assert cheap.draft([ask(cheap)]) == [WEAK]


def test_the_best_is_taken_where_none_expects_enough() -> None:
    for trees in ([WEAK, STRONG, Tree()], [STRONG, WEAK], [Tree(), STRONG]):
        drafter = Fallback([Says(tree) for tree in trees], least=10.0)
        assert drafter.draft([ask(drafter)]) == [STRONG]
    drafter = Fallback([Says(Tree()), Says(Tree())])
    assert drafter.draft([ask(drafter)]) == [Tree()]


def test_each_text_of_a_call_is_decided_on_its_own() -> None:
    class Sometimes(Says):
        def draft(self, asks: Sequence[Ask]) -> list[Tree]:
            super().draft(asks)
            return [STRONG if each.text.tokens[-1] % 2 else WEAK for each in asks]

    first, second = Sometimes(Tree()), Says(Tree.chain([8, 8, 8], [1.0, 1.0, 1.0]))
    drafter = Fallback([first, second])
    texts = [Words([number], 1) for number in range(4)]
    trees = drafter.draft([Ask(drafter.begin(text), text, 8, 8) for text in texts])
    assert [tree.tokens[0] for tree in trees] == [8, 3, 8, 3]
    assert "draft 2" in second.told


def test_a_tree_that_says_nothing_of_its_chances_is_enough() -> None:
    silent = Tree.chain([7])
    drafter = Fallback([Says(WEAK), Says(silent), Says(STRONG)], least=100.0)
    assert drafter.draft([ask(drafter)]) == [silent]


def test_what_was_drawn_is_taken_whatever_it_holds() -> None:
    """Taking it only if its tokens are likely would change what is sampled."""
    drawn = Tree([6], [ROOT], [0.001], {ROOT: torch.full((10,), 0.1)})
    drafter = Fallback([Says(WEAK), Says(drawn, draws=True), Says(STRONG)], least=1.0)
    assert drafter.draws
    draw = Draw(GenerationOptions(temperature=1.0), torch.Generator())
    asked = ask(drafter, draw)
    assert drafter.draft([asked]) == [drawn]
    assert drafter.drafters[1].draws_asked == [draw]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Fallback, Merged])
def test_all_are_told_everything_whoever_proposed(kind: Any) -> None:
    parts = [Says(STRONG), Says(WEAK)]
    drafter = kind(parts)
    text = Words([1, 2], 2)
    state = drafter.begin(text)
    drafter.read(state, 0, [1, 2], torch.zeros(2, 4))
    verified = Verified(text, STRONG, [0], [3, 4], torch.zeros(4, 9))
    drafter.learn(state, verified)
    drafter.end(state)
    drafter.reset()
    for part in parts:
        assert [entry for entry in part.told if entry is not verified] == ["begin", "read 0 [1, 2]", "end", "reset"]
        assert any(entry is verified for entry in part.told)
    assert drafter.memory_bytes == 200


@pytest.mark.parametrize("kind", [Fallback, Merged])
def test_a_composition_wants_what_its_parts_want(kind: Any) -> None:
    parts = [
        Says(WEAK, wants=frozenset({"hidden"}), overhead=0.25),
        Says(WEAK, wants=frozenset({"prompt"}), vocabulary=50, overhead=0.5),
        Says(WEAK, vocabulary=70, inside=True),
    ]
    drafter = kind(parts)
    assert drafter.wants == {"hidden", "prompt"}
    assert drafter.vocabulary == 70
    assert drafter.inside
    assert drafter.watched == any(part.watched for part in parts)
    assert not kind([Lookup()]).watched
    assert kind([Lookup()]).vocabulary is None
    drafter.draft([ask(drafter)])
    assert drafter.overhead == 0.75
    assert drafter.describe() == f"{drafter.name}(says, says, says)"


@pytest.mark.parametrize("kind", [Fallback, Merged])
def test_a_composition_of_nothing_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        kind([])
    with pytest.raises(ValueError, match=r"first\.least must be .*at least 0"):
        Fallback([Lookup()], least=-1.0)


# ---------------------------------------------------------------- merged
def test_merged_trees_are_the_likeliest_nodes_of_all() -> None:
    first = Tree([1, 2, 3], [ROOT, 0, ROOT], [0.5, 0.9, 0.2])
    second = Tree([1, 7, 4, 5], [ROOT, 0, ROOT, 2], [0.3, 0.5, 0.5, 0.8])
    drafter = Merged([Says(first), Says(second)])
    (tree,) = drafter.draft([ask(drafter)])
    paths = {tuple(tree.tokens[i] for i in tree.path(node)): reach for node, reach in enumerate(tree.reach())}
    # 4 comes beside 1 and 3, which leave it 0.3; 7 beside 2, which leaves it 0.1.
    assert paths == pytest.approx({(1,): 0.5, (1, 2): 0.45, (3,): 0.2, (1, 7): 0.025, (4,): 0.15, (4, 5): 0.12})
    (small,) = drafter.draft([ask(drafter, nodes=4)])
    assert {tuple(small.tokens[i] for i in small.path(node)) for node in range(4)} == {(1,), (1, 2), (3,), (4,)}
    assert (first.tokens, second.tokens) == ([1, 2, 3], [1, 7, 4, 5])  # drafters keep their own trees


def test_merging_with_nothing_or_with_trees_without_chances() -> None:
    assert both(Tree(), STRONG) == STRONG
    assert both(STRONG, Tree()) == STRONG
    silent = Tree.chain([3, 9])
    assert both(STRONG, silent) == Tree([3, 4, 5, 9], [ROOT, 0, 1, 0])
    assert both(silent, STRONG) == Tree([3, 9, 4, 5], [ROOT, 0, 0, 2])
    drafter = Merged([Says(silent), Says(STRONG)])
    (tree,) = drafter.draft([ask(drafter, nodes=3)])
    assert tree == Tree([3, 9, 4], [ROOT, 0, 0])


def test_all_parts_of_a_merged_tree_are_guesses() -> None:
    parts = [Says(WEAK), Says(STRONG, draws=True)]
    drafter = Merged(parts)
    assert not drafter.draws
    drafter.draft([replace(ask(drafter), draw=Draw(GenerationOptions(temperature=1.0), torch.Generator()))])
    assert [part.draws_asked for part in parts] == [[None], [None]]


def test_what_is_expected_of_a_tree() -> None:
    assert expected(Tree()) == 0
    assert expected(WEAK) == pytest.approx(0.75)
    assert expected(Tree.chain([1])) == float("inf")


@pytest.mark.parametrize("kind", [Fallback, Merged])
def test_real_drafters_together_are_at_least_about_as_good_as_the_best_alone(kind: Any) -> None:
    text = random_text(5, 600, 5)
    parts = ["lookup", "suffix", "adaptive-ngram", "recycling"]
    alone = [Writing(FREE[name](), text[:200], text[200:]).finish().pace for name in parts]
    composed = Writing(kind([FREE[name]() for name in parts]), text[:200], text[200:]).finish()
    assert composed.pace > 0.9 * max(alone)
    for tree in composed.trees:
        check_tree(tree, 16, 8)


def test_a_merged_drafter_can_be_a_part_of_another() -> None:
    text = random_text(6, 200)
    drafter = Fallback([Lookup(), Merged([FREE["trie"](), FREE["recycling"]()])], least=3.0)
    writing = Writing(drafter, text[:80], text[80:]).finish()
    assert writing.text.tokens == text
    assert drafter.describe() == "first(lookup, merged(trie, recycling))"
