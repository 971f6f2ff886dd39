"""Draft models: chains and trees, exact whatever they propose, and no dearer than they must be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distribution_cases import accepted_in_drawn_texts
from draft_models import draft_model
from llama_engines import engines
from speculation_cases import VOCABULARY, accept_head, answers, model, prompts, speculation

from runtime.drafting.draft_cache import draft_cache_of
from runtime.drafting.drafters.base import Ask, Draw, Verified
from runtime.drafting.drafters.cascade import Cascade
from runtime.drafting.drafters.composition import Fallback, Merged
from runtime.drafting.drafters.confident import Confident, StateCache
from runtime.drafting.drafters.draft_model import DraftModel
from runtime.drafting.drafters.model import Candidates, ModelDrafter, Parallel
from runtime.drafting.drafters.model_tree import DynamicTree, LargeTree
from runtime.drafting.drafters.staged_speculation import StagedSpeculation
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.kernels.cpu import library
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import Tree

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
KINDS: dict[str, Any] = {
    "chain": ModelDrafter, "dynamic-tree": DynamicTree, "large-tree": LargeTree, "staged": StagedSpeculation, "parallel": Parallel,
    "confident": Confident, "cascade": None, "nested": None, "first": None, "merged": None,
}  # fmt: skip


def drafter(kind: str = "chain", slots: str = "paged", noise: float = 0.01, **settings: Any) -> Any:
    if kind == "cascade":
        return Cascade([drafter("chain", slots, 5 * noise), drafter("chain", slots, noise)], **settings)
    if kind == "first":  # guesses where they promise enough, draws otherwise
        return Fallback([drafter("large-tree", slots, 5 * noise), drafter("chain", slots, noise)], least=1.0)
    if kind == "merged":
        return Merged([drafter("dynamic-tree", slots, 5 * noise), drafter("chain", slots, noise)])
    plain, lean = engines(draft_model(noise))
    candidates = Candidates(VOCABULARY)
    if kind == "nested":
        draft = DraftModel(lean, None, {"depths": [1, 2, 3], "layers": 3})
        return Cascade.over(draft, Path("nowhere"), candidates, **{"sure": 0.3, **settings})
    if kind == "confident":
        head = accept_head(lean.module.config.hidden_size)
        return Confident(cache=StateCache(lean), candidates=candidates, head=head, **settings)
    held = draft_cache_of(lean if slots == "paged" else plain)
    return KINDS[kind](cache=held, candidates=candidates, **settings)


@pytest.fixture(scope="module")
def plain() -> Any:
    return model()


PAIRS = [(kind, "paged") for kind in KINDS] + [(kind, "plain") for kind in ("chain", "staged", "parallel", "cascade")]


@pytest.mark.sampled(6, 8)
@pytest.mark.parametrize(("kind", "slots"), PAIRS)
@pytest.mark.parametrize("lengths", [Fixed(depth=5, nodes=10), Goodput()])
def test_greedy_texts_are_those_of_plain_decoding(plain: Any, kind: str, slots: str, lengths: Any) -> None:
    texts = prompts(10, 90)
    truth = answers(plain, texts, max_new_tokens=50)
    drafting = model(speculation(drafter(kind, slots), lengths))
    assert drafting.generate(texts, max_new_tokens=50) == list(truth.values())
    if isinstance(lengths, Fixed) and kind != "parallel":  # an untrained one does not know its mask token
        assert drafting.stats["mean_accepted"] > (1.0 if kind in ("confident", "first", "merged") else 1.5)
        assert drafting.stats["steps"] < plain.stats["steps"]


def test_a_draft_like_the_target_is_always_right(plain: Any) -> None:
    texts = prompts(4, 30)
    truth = answers(plain, texts, max_new_tokens=60, ignore_eos=True)
    drafting = model(speculation(drafter(noise=0.0), Fixed(depth=5, nodes=5)))
    assert drafting.generate(texts, max_new_tokens=60, ignore_eos=True) == list(truth.values())
    assert drafting.stats["acceptance_rate"] == 1.0
    assert drafting.generate(texts, max_new_tokens=30, temperature=1.0) != list(truth.values())
    assert drafting.stats["acceptance_rate"] > 0.999


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_text_of_plain_decoding(plain: Any, kind: str) -> None:
    texts = prompts(5, 30)
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_new_tokens": 30}
    assert model(speculation(drafter(kind))).generate(texts, **options) == plain.generate(texts, **options)


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_texts_are_distributed_as_those_of_plain_decoding(plain: Any, kind: str) -> None:
    drafting = model(speculation(drafter(kind, noise=0.1), Fixed(depth=3, nodes=6)))
    accepted = accepted_in_drawn_texts(plain, drafting, [5, 6, 7], 1500)
    if kind not in ("large-tree", "parallel"):
        assert accepted > 300  # enough of them that a wrong rule would show


def test_little_memory_and_many_texts_keep_the_drafts_cache_in_step(plain: Any) -> None:
    texts = prompts(9, 100)
    truth = answers(plain, texts, max_new_tokens=120, ignore_eos=True)
    own = drafter()
    drafting = model(speculation(own, Fixed(depth=4, nodes=4)))
    memory = 9 * drafting.engine.page_bytes
    assert drafting.generate(texts, max_new_tokens=120, ignore_eos=True, cache_memory=memory) == list(truth.values())
    assert drafting.stats["preemptions"] > 0
    assert drafting.stats["mean_accepted"] > 2
    held = own.cache.nbytes
    drafting.generate(texts, max_new_tokens=120, ignore_eos=True, cache_memory=memory)
    assert own.cache.nbytes == held  # pages come back


@pytest.mark.parametrize("kind", ["chain", "dynamic-tree", "staged", "cascade"])
def test_prompts_are_read_for_texts_that_are_drafted_for_alone_and_in_one_pass(plain: Any, kind: str) -> None:
    own = drafter(kind)
    models = own.drafters if kind == "cascade" else [own]
    texts = [SimpleNamespace(tokens=ids) for ids in prompts(4, 60)]
    states = [own.begin(text) for text in texts]
    fed: list[list[int]] = []
    cache = models[0].cache
    feed = cache.feed

    def noted(which: Any, tokens: Any) -> Any:
        fed.append([len(each) for each in tokens])
        return feed(which, tokens)

    cache.feed = noted
    asks = [Ask(state, text, 4, 2) for state, text in zip(states, texts, strict=True)]
    trees = own.draft(asks[1:3])
    assert all(len(tree) for tree in trees)
    assert fed[0] == [len(text.tokens) - 1 for text in texts[1:3]]
    assert own.overhead > 0
    for text, tree in zip(texts[1:3], trees, strict=True):  # the next step reads no prompt
        text.tokens = [*text.tokens, *tree.tokens[:1]]
    fed.clear()
    own.draft(asks[1:3])
    assert max(map(max, fed), default=0) <= 2
    own.learn(states[0], Verified(texts[0], Tree(), [], texts[0].tokens[-1:], torch.zeros(1, VOCABULARY)))
    for untouched in (states[0], states[3]):
        slot = untouched[0] if kind == "cascade" else getattr(untouched, "slot", untouched)
        assert slot.tokens == []


def test_unsure_drafts_end_early(plain: Any) -> None:
    text = prompts(1, 30)[0]
    sure, always = drafter(confidence=0.9), drafter()
    state = SimpleNamespace(tokens=text, prompt=len(text))
    trees = [each.draft([Ask(each.begin(state), state, 8, 8)])[0] for each in (sure, always)]
    assert len(trees[1]) == 8
    assert all(chance >= 0.9 for chance in trees[0].chances[:-1])
    assert trees[0].tokens == trees[1].tokens[: len(trees[0])]
    reached = always.draft([Ask(always.begin(state), state, 8, 8, None, 0.5)])[0]
    assert reached.reach()[-1] < 0.5 or len(reached) == 8
    assert all(reach >= 0.5 for reach in reached.reach()[:-1])


@pytest.mark.parametrize("kind", ["dynamic-tree", "large-tree"])
def test_trees_hold_the_likeliest_nodes(kind: str) -> None:
    """Against every path that could be: the best set of nodes by probability of being reached."""
    own = drafter(kind, width=3, level=100)
    text = prompts(1, 10)[0]
    state = SimpleNamespace(tokens=text, prompt=len(text))
    tree = own.draft([Ask(own.begin(state), state, 7, 3)])[0]
    engine = engines(draft_model())[1]
    every: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(3):
        following = []
        for reach, path in level:
            logits = engine.logits(torch.tensor([[*text, *path]]))[0, -1]
            p = torch.softmax(logits, -1)
            values, ids = p.topk(3)
            following += [(reach * float(v), (*path, int(i))) for v, i in zip(values, ids, strict=True)]
        every += following
        level = following
    found = {tuple(tree.tokens[each] for each in tree.path(node)): reach for node, reach in enumerate(tree.reach())}
    assert set(found) == {path for _, path in sorted(every, reverse=True)[:7]}
    for reach, path in every:
        if path in found:
            assert abs(found[path] - reach) < 1e-4
    assert len(tree) == 7


def test_kept_tokens_are_those_of_the_target() -> None:
    kept = torch.tensor([3, 10, 11, 40])
    candidates = Candidates(50, kept)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, chances = candidates.best(logits, 2)
    assert ids == [[10, 40]]
    assert abs(chances[0][0] - float(torch.softmax(logits[0], -1)[1])) < 1e-6
    draw = Draw(GenerationOptions(temperature=1.0), torch.Generator().manual_seed(0))
    q = candidates.distribution(logits[0], draw, [])
    assert q.shape == (50,)
    assert set(q.nonzero()[:, 0].tolist()) == {3, 10, 11, 40}
    assert set(candidates.draw(q, draw, 9)) == {3, 10, 11, 40}
    wide = Candidates(3).distribution(torch.tensor([0.0, 1.0, 2.0, 9.0]), draw, [])
    assert wide.shape == (3,)  # padded embeddings propose nothing
    assert abs(float(wide.sum()) - 1) < 1e-6
    assert Candidates(3).best(torch.tensor([[0.0, 1.0, 2.0, 9.0]]), 1)[0] == [[2]]


@pytest.mark.parametrize("slots", ["paged", "plain"])
def test_a_staged_draft_says_what_it_would_have_said_alone(slots: str) -> None:
    text = [5, 6, 7, 8, 9] * 6 + [5, 6]
    state = SimpleNamespace(tokens=text, prompt=len(text))
    alone, staged = drafter("chain", slots, noise=0.0), drafter("staged", slots, noise=0.0)
    passes = []
    real = staged.cache.ahead
    staged.cache.ahead = lambda *arguments: passes.append(1) or real(*arguments)
    own, mine = alone.begin(state), staged.begin(state)
    for _ in range(6):
        expected = alone.draft([Ask(own, state, 6, 6)])[0]
        found = staged.draft([Ask(mine, state, 6, 6)])[0]
        assert found.tokens == expected.tokens
        assert found.chances == pytest.approx(expected.chances, rel=1e-5)
        text += [*expected.tokens, 11]  # the target agrees, then says something else
    assert len(passes) <= 6 * 6


def test_a_staged_draft_takes_fewer_passes_where_the_text_repeats() -> None:
    """A draft that says the same again and again is drafted for by what it said before."""
    truth = [20, 21, 22, 23]
    staged = drafter("staged")

    class Same:
        said = 0

        def next(self, logits: torch.Tensor, chain: Any) -> tuple[int, float]:
            self.said += 1
            return truth[(self.said - 1) % 4], 0.9

    staged.candidates = Same()
    passes = []
    real = staged.cache.ahead
    staged.cache.ahead = lambda *arguments: passes.append(1) or real(*arguments)
    text = truth * 5
    state = SimpleNamespace(tokens=text, prompt=len(text))
    tree = staged.draft([Ask(staged.begin(state), state, 8, 8)])[0]
    assert tree.tokens == truth * 2
    assert len(passes) <= 3


@pytest.mark.parametrize("slots", ["paged", "plain"])
def test_a_parallel_draft_reads_masks_once(slots: str) -> None:
    own = drafter("parallel", slots, mask_token=17, most=5)
    text = prompts(1, 30)[0]
    state = SimpleNamespace(tokens=text, prompt=len(text))
    slot = own.begin(state)
    engine = engines(draft_model())[0]
    for _ in range(3):
        tree = own.draft([Ask(slot, state, 9, 9)])[0]
        logits = engine.logits(torch.tensor([[*text, 17, 17, 17, 17]]))[0, -5:]
        assert tree.tokens == logits.argmax(-1).tolist()
        assert tree.is_chain
        text += [*tree.tokens[:2], 30]
    assert slot.tokens[: len(text) - 3] == text[:-3]


def counting(counts: list[int], place: int, real: Any) -> Any:
    """A function that counts its calls."""

    def counted(*arguments: Any) -> Any:
        counts[place] += 1
        return real(*arguments)

    return counted


def test_a_cascade_asks_the_next_only_where_it_is_unsure() -> None:
    text = prompts(1, 30)[0]
    state = SimpleNamespace(tokens=text, prompt=len(text))
    for sure, expected in ((0.0, [8, 0]), (1.0, [8, 8])):
        own = drafter("cascade", sure=sure)
        asked = [0, 0]
        for place, each in enumerate(own.drafters):
            each.candidates.next_if_sure = counting(asked, place, each.candidates.next_if_sure)
        tree = own.draft([Ask(own.begin(state), state, 8, 8)])[0]
        assert asked == expected
        best = own.drafters[expected.index(8) if sure == 0 else 1]
        assert tree.tokens == best.draft([Ask(best.begin(state), state, 8, 8)])[0].tokens
