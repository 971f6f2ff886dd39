"""Trees of a draft model: those of the most expected accepted tokens, in few passes, and exact where they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distribution_cases import expected, misfit, table_logits, written

from runtime.drafting.draft_cache import Slot
from runtime.drafting.drafters import model_tree
from runtime.drafting.drafters.base import Ask, Draw
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.model_tree import DynamicTree, LargeTree, Tried
from runtime.drafting.verify.exact import Exact
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import ROOT, Tree

Path = tuple[int, ...]


class Told:
    """DraftCache of a draft whose logits after a branch are given.

    Attributes:
        passes: of each since the text was read, its nodes.
    """

    most_rows, nbytes, trees = 64, 0, True

    def __init__(self, logits: Callable[[Path], torch.Tensor]) -> None:
        self._logits = logits
        self.vocabulary = len(logits(()))
        self.passes: list[int] = []
        self._read: dict[int, list[int]] = {}

    def open(self) -> Slot:
        return Slot()

    def close(self, slot: Slot) -> None:
        del self._read[id(slot)]

    def cut(self, slot: Slot, length: int) -> None:
        del slot.tokens[length:]

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        self.passes = []
        for slot, new in zip(slots, tokens, strict=True):
            slot.tokens += new
            self._read[id(slot)] = []
        return torch.stack([self._logits(()) for _ in slots])

    def branch(
        self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        self.passes.append(sum(map(len, tokens)))
        found = []
        for slot, new, above in zip(slots, tokens, parents, strict=True):
            read = self._read[id(slot)]
            read += new
            assert len(read) == len(above)
            tree = Tree(read, list(above))
            paths = [tree.path(node) for node in range(len(read) - len(new), len(read))]
            found.append(torch.stack([self._logits(tuple(read[node] for node in path)) for path in paths]))
        return found


class Repeatable(Candidates):
    """Draws that are the same for the same distribution, so that all that could be drawn is known."""

    @staticmethod
    def draw(q: torch.Tensor, draw: Draw, count: int = 1) -> list[int]:
        generator = torch.Generator().manual_seed(int(float(q[0]) * 1e9))
        return torch.multinomial(q, min(count, int((q > 0).sum())), generator=generator).tolist()


def noise(seed: int, size: int, sharp: float) -> Callable[[Path], torch.Tensor]:
    def logits(path: Path) -> torch.Tensor:
        number = seed + 1
        for token in path:
            number = (number * 1_000_003 + token + 1) % (1 << 40)
        return sharp * torch.randn(size, generator=torch.Generator().manual_seed(number))

    return logits


def draw_of(seed: int = 0) -> Draw:
    return Draw(GenerationOptions(temperature=1.0), torch.Generator().manual_seed(seed))


def drafted(
    cache: Told, nodes: int, depth: int, kind: Any = DynamicTree, draw: Draw | None = None, **settings: Any
) -> Tree:
    own = kind(cache=cache, candidates=Repeatable(cache.vocabulary), **settings)
    text = SimpleNamespace(tokens=[1, 2], prompt=2)
    (tree,) = own.draft([Ask(own.begin(text), text, nodes, depth, draw)])
    return tree


def every(
    logits: Callable[[Path], torch.Tensor], width: int, depth: int, draw: Draw | None
) -> list[tuple[Path, float]]:
    """All paths that could be in a tree and what each is worth; parents and earlier siblings come before."""
    found: list[tuple[Path, float]] = []
    level: list[tuple[Path, float]] = [((), 1.0)]
    for _ in range(depth):
        following = []
        for path, reach in level:
            q = torch.softmax(logits(path), -1)
            tokens = q.topk(width).indices.tolist() if draw is None else Repeatable.draw(q, draw, width)
            left = 1.0
            for token in tokens:
                chance = float(q[token])
                found.append(((*path, token), reach * (chance if draw is None else left)))
                following.append(((*path, token), reach * chance))
                left -= chance
        level = following
    return found


def best_sum(paths: Sequence[tuple[Path, float]], nodes: int, in_order: bool) -> float:
    """The largest sum of any tree of so many nodes; `in_order`: a node needs its earlier siblings."""
    worth = dict(paths)
    needs: dict[Path, Path] = {}
    last: dict[Path, Path] = {}
    for path in worth:
        needs[path] = path[:-1]
        if in_order:
            needs[path] = last.get(path[:-1], path[:-1])
            last[path[:-1]] = path
    trees: set[frozenset[Path]] = {frozenset([()])}
    for _ in range(nodes):
        trees = {tree | {path} for tree in trees for path in worth if path not in tree and needs[path] in tree}
    return max(sum(worth.get(path, 0.0) for path in tree) for tree in trees)


def paths_of(tree: Tree) -> list[Path]:
    return [tuple(tree.tokens[each] for each in tree.path(node)) for node in range(len(tree))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("level", [1, 8])
def test_no_tree_of_as_many_nodes_is_expected_to_bring_more(seed: int, drawn: bool, level: int) -> None:
    """Against all that could be, small enough that a node a pass is enough too."""
    logits, draw = noise(seed, 4, 1.0 + 0.5 * seed), draw_of() if drawn else None
    tree = drafted(Told(logits), 4, 4, draw=draw, width=2, level=level)
    paths = every(logits, 2, 4, draw)
    worth = dict(paths)
    found = [worth[path] for path in paths_of(tree)]
    assert len(tree) == 4
    assert sum(found) == pytest.approx(best_sum(paths, 4, drawn), abs=1e-5)
    # The first nodes are again the best: a tree that is cut short for want of room stays one that was chosen before its draws.
    assert all(a >= b - 1e-6 for a, b in pairwise(found))


@pytest.mark.parametrize("drawn", [False, True])
def test_sure_drafts_go_deep_and_unsure_ones_wide(drawn: bool) -> None:
    def sharp(path: Path) -> torch.Tensor:
        return torch.tensor([0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]).roll(len(path))

    draw = draw_of() if drawn else None
    slots = Told(sharp)
    tree = drafted(slots, 12, 8, draw=draw)
    assert max(tree.depths()) == 8
    assert len(tree) == 12
    assert len(slots.passes) <= 7
    flat = drafted(Told(lambda path: 0.01 * sharp(path)), 12, 8, draw=draw)
    assert max(flat.depths()) == 2
    assert flat.parents.count(ROOT) == 8


@pytest.mark.parametrize(("level", "nodes"), [(1, 30), (3, 30), (100, 30), (100, 3)])
@pytest.mark.parametrize("drawn", [False, True])
def test_passes_are_few_and_small(level: int, nodes: int, drawn: bool) -> None:
    for seed in range(4):
        slots = Told(noise(seed, 12, 2.0))
        tree = drafted(slots, nodes, 5, draw=draw_of() if drawn else None, level=level, width=4)
        assert len(tree) <= nodes
        assert max(tree.depths()) <= 5
        assert len(slots.passes) <= 4
        assert all(0 < count <= min(level, 64) for count in slots.passes)


def test_texts_share_the_passes_of_the_draft() -> None:
    slots = Told(noise(0, 12, 2.0))
    own = DynamicTree(cache=slots, candidates=Repeatable(12))  # type: ignore[arg-type]
    texts = [SimpleNamespace(tokens=[1, 2], prompt=2) for _ in range(5)]
    trees = own.draft(
        [Ask(own.begin(text), text, 9, depth) for text, depth in zip(texts, (1, 2, 3, 4, 4), strict=True)]
    )
    assert [max(tree.depths()) for tree in trees[:2]] == [1, 2]
    assert trees[3].tokens == trees[4].tokens
    assert len(slots.passes) <= 3


def test_nothing_follows_what_is_not_reached_likely_enough() -> None:
    slots = Told(noise(0, 6, 1.0))
    own = DynamicTree(cache=slots, candidates=Repeatable(6))  # type: ignore[arg-type]
    text = SimpleNamespace(tokens=[1, 2], prompt=2)
    (tree,) = own.draft([Ask(own.begin(text), text, 30, 6, None, 0.2)])
    reach = tree.reach()
    assert all(reach[parent] >= 0.2 for parent in tree.parents if parent != ROOT)
    assert any(chance < 0.2 for chance in reach)


def test_large_trees_guess_under_sampling_too() -> None:
    logits = noise(0, 6, 2.0)
    guessed = drafted(Told(logits), 20, 4, LargeTree)
    drawn = drafted(Told(logits), 20, 4, LargeTree, draw_of())
    assert not drawn.proposals
    assert (drawn.tokens, drawn.parents) == (guessed.tokens, guessed.parents)


# ---------------------------------------------------------------- what became of earlier ones
def test_estimates_begin_at_what_the_draft_says_and_learn() -> None:
    tried, said = Tried(), [0.4, 0.3, 0.15, 0.15]
    for drawn in (False, True):
        assert tried.rates(said, drawn) == pytest.approx([0.4, 0.5, 0.5, 1.0])
    tree = Tree([5, 6, 7, 8], [ROOT, ROOT, ROOT, 1], [0.4, 0.3, 0.15, 0.9], {ROOT: torch.ones(9) / 9})
    for _ in range(300):
        tried.observe(tree, [1])  # 5 was tried and was wrong, 7 and 8 were not tried or not right
    first, second, third, _ = tried.rates(said, True)
    assert first < 0.05
    assert second > 0.95
    assert third == pytest.approx(0.5)
    assert tried.rates(said, False) == pytest.approx([0.4, 0.5, 0.5, 1.0])
    assert tried.rates([0.9], False)[0] < 0.1  # 8, a guess
    tried.observe(Tree.chain([1, 2]), [0])  # says nothing of its chances


def test_drawn_trees_go_deep_where_unlikely_draws_are_accepted() -> None:
    """Of a draft like its target every first draw is accepted, however many tokens there are to draw from."""
    slots = Told(noise(0, 12, 0.5))
    own = DynamicTree(cache=slots, candidates=Repeatable(12))  # type: ignore[arg-type]
    text = SimpleNamespace(tokens=[1, 2], prompt=2)
    state = own.begin(text)
    depths = []
    for _ in range(40):
        (tree,) = own.draft([Ask(state, text, 10, 6, draw_of())])
        depths.append(max(tree.depths()))
        children, path = tree.children(), [0]
        while path[-1] in children:
            path.append(children[path[-1]][0])
        own.learn(state, SimpleNamespace(text=text, tree=tree, path=path))  # type: ignore[arg-type]
    assert depths[0] <= 3
    assert depths[-1] == 6
    own.reset()
    assert max(own.draft([Ask(state, text, 10, 6, draw_of())])[0].depths()) == depths[0]


# ---------------------------------------------------------------- drawn trees
class ByToken(model_tree.Growing):
    """Broken on purpose: what is kept is chosen by what was drawn."""

    def best(self) -> Tree:
        self._worth = self._reach
        return super().best()


def trusted() -> Tried:
    """Of first draws nearly all were accepted, whatever the draft said of them, and of second ones half."""
    tried = Tried()
    for said in (0.05, 0.15, 0.25, 0.35, 0.45):
        for round_ in range(60):
            tree = Tree([1, 2], [ROOT, ROOT], [said, said * (1 - said)], {ROOT: torch.ones(3) / 3})
            tried.observe(tree, [0] if round_ % 5 else [1] if round_ % 10 else [])
    return tried


def misfit_of(
    options: GenerationOptions, draws: int, level: int, kept: int | None = None, tried: Tried | None = None
) -> float:
    size = 5
    target, draft = table_logits(size, 1), table_logits(size, 2)

    def tree(last: int, source: torch.Generator) -> Tree:
        slots = Told(lambda path: draft[path[-1] if path else last])
        own = DynamicTree(cache=slots, candidates=Candidates(size), width=3, level=level)  # type: ignore[arg-type]
        own._tried = tried or own._tried
        text = SimpleNamespace(tokens=[last], prompt=1)
        (tree,) = own.draft([Ask(own.begin(text), text, 4, 3, Draw(options, source))])
        return tree if kept is None else tree.first(kept)

    return misfit(written(Exact(), tree, target, options, draws, 2), expected(target, options, 2))


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize(
    ("options", "level", "kept", "tried"),
    [
        (GenerationOptions(temperature=1.0), 1, None, None),
        (GenerationOptions(temperature=0.7, top_k=4), 2, None, None),
        (GenerationOptions(temperature=1.0), 8, 2, None),  # pages are short
        (GenerationOptions(temperature=1.0), 2, None, trusted()),
    ],
)
def test_drawn_trees_are_exact(options: GenerationOptions, level: int, kept: int | None, tried: Tried | None) -> None:
    assert misfit_of(options, 2000, level, kept, tried) < 4


def test_the_test_sees_a_choice_by_what_was_drawn(monkeypatch: Any) -> None:
    monkeypatch.setattr("runtime.drafting.drafters.model_tree.Growing", ByToken)
    assert misfit_of(GenerationOptions(temperature=1.0), 2500, 8) > 8
