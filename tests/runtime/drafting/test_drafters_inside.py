"""Drafters that are a part of their target: exact, whatever of it they leave out, and in step with it over many rounds."""

from __future__ import annotations

import copy
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distribution_cases import accepted_in_drawn_texts
from inside_cases import SETTINGS, adapter, drafter_of, gentle, lean, loaded, with_drafter
from llama_engines import engines
from speculation_cases import answers, prompts

from runtime.drafting.config.build import Target
from runtime.drafting.drafters import early_exit, kangaroo
from runtime.drafting.drafters.base import Ask, Place, Verified
from runtime.drafting.drafters.composition import Fallback
from runtime.drafting.drafters.early_exit import DynamicExit, choose, spread
from runtime.drafting.drafters.lookup import Lookup
from runtime.drafting.drafters.skip import Skip
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.rates import Rates
from runtime.drafting.speculation import Speculation
from runtime.engines.base import Chunk
from runtime.errors import ArtifactError, RequestError
from runtime.kernels.cpu import library
from runtime.sampling.tree import Tree

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
KINDS = list(SETTINGS)


@pytest.fixture(scope="module")
def module() -> Any:
    return gentle()


@pytest.fixture(scope="module")
def plain(module: Any) -> Any:
    return loaded(module)


@pytest.fixture(scope="module")
def draft(module: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter's directory."""
    return str(adapter(tmp_path_factory.mktemp("draft"), module))


def drafting(module: Any, kind: str, draft: str, lengths: Any = None, **changes: Any) -> Any:
    """A model of its own that drafts in this way."""
    settings = {**SETTINGS[kind], **changes, **({"model": draft} if kind == "kangaroo" else {})}
    found = loaded(module)
    with_drafter(found, settings, lengths=lengths or Fixed(depth=5, nodes=5))
    return found


# ---------------------------------------------------------------- texts are those of plain decoding
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [Fixed(depth=5, nodes=10), Goodput()])
def test_greedy_texts(module: Any, plain: Any, draft: str, kind: str, lengths: Any) -> None:
    texts = prompts(8, 90)
    truth = answers(plain, texts, max_new_tokens=70)
    found = drafting(module, kind, draft, lengths)
    assert found.generate(texts, max_new_tokens=70) == list(truth.values())
    if isinstance(lengths, Fixed):
        assert found.stats["mean_accepted"] > 1
        assert found.stats["steps"] < plain.stats["steps"]
    assert "off" not in found.stats["drafter"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_text_of_plain_decoding(module: Any, plain: Any, draft: str, kind: str) -> None:
    texts = prompts(4, 30)
    options = {"temperature": 0.25, "top_p": 0.95, "seed": 7, "max_new_tokens": 40, "repetition_penalty": 1.05}
    found = drafting(module, kind, draft)
    assert found.generate(texts, **options) == plain.generate(texts, **options)
    assert found.stats["accepted_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_texts_are_distributed_as_those_of_plain_decoding(module: Any, plain: Any, draft: str, kind: str) -> None:
    drawing = drafting(module, kind, draft, Fixed(depth=3, nodes=3))
    assert accepted_in_drawn_texts(plain, drawing, [5, 6, 7], 1000) > 400


@pytest.mark.parametrize("kind", KINDS)
def test_little_memory_and_shared_beginnings(module: Any, plain: Any, draft: str, kind: str) -> None:
    start = prompts(1, 200, seed=5)[0]
    texts = [*prompts(5, 100), *(start * 2 + end for end in prompts(4, 30))]
    truth = answers(plain, texts, max_new_tokens=120, ignore_eos=True)
    found = drafting(module, kind, draft)
    memory = 14 * found.engine.page_bytes
    for _ in range(2):
        assert found.generate(texts, max_new_tokens=120, ignore_eos=True, cache_memory=memory) == list(truth.values())
        assert found.stats["preemptions"] > 0
        assert found.stats["mean_accepted"] > 1
        assert found.stats["shared_prompt_tokens"] > 0
        held, before = found.speculation.drafter.cache.nbytes, locals().get("held")
        assert before in (None, held)  # an adapter's pages come back


@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_texts_and_of_the_context(plain: Any, draft: str, kind: str) -> None:
    small = gentle(max_position_embeddings=60)
    texts = [text for text in prompts(10, 55, seed=7) if len(text) < 58]
    expected = loaded(small).generate(texts)
    assert drafting(small, kind, draft).generate(texts) == expected
    one = drafting(small, kind, draft)
    assert list(one.stream(texts[0], max_new_tokens=9)) == expected[0][:9]


def test_lossless_with_other_families(tmp_path: Any) -> None:
    for name in ("tied", "qwen3", "mistral, window"):
        module = gentle(name).to(torch.bfloat16)
        texts = prompts(3, 80)
        expected = loaded(module).generate(texts, max_new_tokens=50)
        folder = str(adapter(tmp_path / name.split(",")[0], module))
        for kind in KINDS:
            assert drafting(module, kind, folder).generate(texts, max_new_tokens=50) == expected


def test_parts_of_a_composition(module: Any, plain: Any, draft: str) -> None:
    texts = prompts(4, 40)
    texts = [text * 3 for text in texts]
    truth = answers(plain, texts, max_new_tokens=60)
    for kind in KINDS:
        found = drafting(module, kind, draft)
        found.speculation = Speculation(
            Fallback([Lookup(), found.speculation.drafter], least=3.0), lengths=Fixed(5, 10)
        )
        assert found.generate(texts, max_new_tokens=60) == list(truth.values())
        assert found.stats["accepted_tokens"] > 0
        assert "off" not in found.stats["drafter"]


# ---------------------------------------------------------------- what they propose
def turn(engine: Any, text: list[int], pool: Any = None, pages: list[int] | None = None, **others: Any) -> Ask:
    """The first turn of a text all of which but the last token is in the cache."""
    if pool is None:
        pages = list(range(-(-(len(text) + 20) // engine.page_size)))
        pool = engine.new_pages(len(pages))
        if len(text) > 1:
            engine.step(pool, [Chunk(text[:-1], 0, pages)])
    assert pages is not None
    room = len(pages) * engine.page_size - len(text) + 1
    state = SimpleNamespace(tokens=text, prompt=len(text))
    settings = {"nodes": 6, "depth": 6, **others}
    return Ask(None, state, place=Place(engine, pool, pages, len(text) - 1, room), **settings)


def drafted(drafter: Any, ask: Ask) -> Tree:
    from dataclasses import replace

    tree: Tree = drafter.draft([replace(ask, state=drafter.begin(ask.text))])[0]
    return tree


def test_a_fixed_exit_proposes_what_its_layers_say(module: Any) -> None:
    engine = engines(module)[1]
    part = copy.deepcopy(module)
    part.model.layers = part.model.layers[:2]
    part.config.num_hidden_layers = 2
    model = loaded(module)
    text = prompts(1, 70, seed=3)[0]
    tree = drafted(with_drafter(model, SETTINGS["exit"]), turn(lean(model), text))
    assert len(tree) == 6
    del engine
    # Layers read the text as the whole model does: below its exit both have the same keys and values.
    for count in range(6):
        with torch.no_grad():
            logits = part(torch.tensor([text + tree.tokens[:count]]), use_cache=False).logits[0, -1]
        assert int(logits.argmax()) == tree.tokens[count]
        assert abs(float(torch.softmax(logits, -1).max()) - tree.chances[count]) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_keeps_to_its_room(module: Any, draft: str, kind: str) -> None:
    model = drafting(module, kind, draft)
    drafter, engine = model.speculation.drafter, lean(model)
    text = list(range(20, 70))
    pool = engine.new_pages(1)
    engine.step(pool, [Chunk((text * 2)[:63], 0, [0])])
    for length in (50, 61, 62, 63, 64):  # the last one's place is the page's last
        more = (text * 2)[:length]
        ask = turn(engine, more, pool, [0])
        assert len(drafted(drafter, ask)) <= max(0, 64 - length)
    ask = turn(engine, text, pool, [0], nodes=2)
    assert len(drafted(drafter, ask)) <= 2


@pytest.mark.parametrize("kind", ["skip", "exit", "kangaroo"])
def test_unsure_drafts_end_early(module: Any, draft: str, kind: str) -> None:
    texts, found = prompts(12, 40, seed=4), []
    model = drafting(module, kind, draft, confidence=0.1)
    for text in texts:
        tree = drafted(model.speculation.drafter, turn(lean(model), text))
        assert all(chance >= 0.1 for chance in tree.chances[:-1])
        assert tree.chances[-1] < 0.1 or len(tree) == 6
        found.append(len(tree))
    assert len(set(found)) > 2
    always = drafting(module, kind, draft)
    for text in texts[:3]:
        tree = drafted(always.speculation.drafter, turn(lean(always), text, least=0.02))
        assert all(reach >= 0.02 for reach in tree.reach()[:-1])
        assert tree.reach()[-1] < 0.02 or len(tree) == 6


# ---------------------------------------------------------------- skip
def test_confidence_follows_acceptance(module: Any) -> None:
    drafter: Any = drafting(module, "skip", "", confidence=0.6, change=0.01).speculation.drafter
    state = drafter.begin(None)
    threshold, rate = 0.6, 0.9
    for accepted, count, unsure in (
        (1, 4, True),
        (0, 2, False),
        (5, 5, False),
        (5, 5, True),
        (6, 6, True),
        (3, 3, True),
    ):
        tokens = list(range(10, 10 + count))
        tree = Tree.chain(tokens)
        state.memory = Tree.chain(tokens, [1.0] * (count - 1) + [0.0 if unsure else 1.0])
        drafter.learn(state, verified(tree, list(range(accepted))))
        rate = 0.5 * rate + 0.5 * accepted / count
        wanted = threshold + 0.01 if rate <= 0.9 else threshold - (0.01 if unsure else 0)
        threshold = 0.9 * threshold + 0.1 * wanted
        assert abs(drafter.confidence - threshold) < 1e-12
    state.memory = Tree.chain([1, 2], [1.0, 0.0])
    drafter.learn(state, verified(Tree.chain([7, 8]), [0]))  # somebody else's
    assert abs(drafter.confidence - threshold) < 1e-12
    drafter.reset()
    assert drafter.confidence == 0.6


def verified(tree: Tree, path: list[int], new: list[int] | None = None) -> Verified:
    text: Any = SimpleNamespace(tokens=[0], prompt=1)
    return Verified(text, tree, path, new or [tree.tokens[node] for node in path] + [0], torch.zeros(1 + len(tree), 4))


# ---------------------------------------------------------------- dynamic exit
def test_the_best_exit_is_found() -> None:
    """From the third layer on nothing changes: drafts of two layers are always right, those of one seldom."""
    module = gentle(share=0.0, from_layer=2, num_hidden_layers=5)
    found = drafting(module, "dynamic exit", "")
    texts = prompts(3, 30)
    assert found.generate(texts, max_new_tokens=60, ignore_eos=True) == loaded(module).generate(
        texts, max_new_tokens=60, ignore_eos=True
    )
    drafter: Any = found.speculation.drafter
    assert drafter.layers == [1, 2, 3, 4]
    state = drafter.begin(None)
    rates = [state.rates.rate(place, layer / 5) for place, layer in enumerate(drafter.layers)]
    assert min(rates[1:]) > 0.95
    assert rates[0] < 0.7
    assert found.stats["acceptance_rate"] > 0.9
    assert found.stats["mean_accepted"] > 3
    assert choose([rates], [5], drafter.costs)[0] == 1


def test_where_no_exit_pays_looks_become_rare() -> None:
    module = gentle(share=1.0)
    found = drafting(module, "dynamic exit", "", every=2)
    text = prompts(1, 30)[0]
    expected = loaded(module).generate(text, max_new_tokens=300, ignore_eos=True)
    assert found.generate(text, max_new_tokens=300, ignore_eos=True) == expected
    assert 5 <= found.stats["drafted_tokens"] < 20
    assert found.stats["steps"] > 280


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}])
def test_looks_say_what_drafts_would_have_been(module: Any, draft: str, options: Any, monkeypatch: Any) -> None:
    """Every look at the exit that did draft agrees with what became of its draft."""
    looks: dict[Any, list[float]] = {}
    add = Rates.add

    def noted(self: Rates, kind: Any, right: float, count: float = 1.0) -> None:
        if self.parent is not None:
            looks.setdefault(kind, []).append(right)
        add(self, kind, right, count)

    monkeypatch.setattr(Rates, "add", noted)
    found = drafting(module, "dynamic exit", draft)
    drafter: Any = found.speculation.drafter
    learn, checked = DynamicExit.learn, []

    def checking(self: Any, state: Any, each: Verified) -> None:
        chosen, own = state.chosen, state.memory
        looks.clear()
        learn(self, state, each)
        if own is not None and len(own) and looks:
            assert list(looks) == list(range(len(drafter.layers)))
            right = looks[chosen]
            assert len(right) == len(each.new)
            if not options:
                accepted = len(each.path)
                assert right[:accepted] == [1.0] * accepted
                if accepted < len(each.tree) and len(each.new) > accepted:
                    assert right[accepted] == 0.0
            assert all(0 <= value <= 1 + 1e-6 for values in looks.values() for value in values)
            checked.append(len(right))

    monkeypatch.setattr(DynamicExit, "learn", checking)
    found.generate(prompts(3, 40), max_new_tokens=30, ignore_eos=True, **options)
    assert len(checked) > 5


def test_rates_forget() -> None:
    every = Rates(2.0, 0.9)
    own = Rates(2.0, 0.5, parent=every)
    assert own.rate(1, 0.5) == every.rate(1, 0.5) == 0.5
    for right in (1.0, 0.0, 1.0):
        own.add(1, right)
    total, seen = 0.9**2 + 1, 0.9**2 + 0.9 + 1
    assert abs(every.rate(1, 0.5) - (total + 2 * 0.5) / (seen + 2)) < 1e-12
    assert abs(own.rate(1, 0.5) - (1.25 + 2 * every.rate(1, 0.5)) / (1.75 + 2)) < 1e-12
    assert own.rate(0, 0.25) == 0.25


def test_the_exit_and_length_of_most_tokens() -> None:
    """Against all pairs, and the closed form of the expected number."""
    draw = random.Random(0)
    for _ in range(200):
        texts = draw.randint(1, 3)
        rates = [[draw.random() for _ in range(3)] for _ in range(texts)]
        limits = [draw.randint(0, 6) for _ in range(texts)]
        costs = sorted(draw.random() for _ in range(3))
        worth = {(0, 0): float(texts)}
        for place, depth in itertools.product(range(3), range(1, 7)):
            expected = 0.0
            for rate, limit in zip(rates, limits, strict=True):
                a, length = rate[place], min(depth, limit)
                expected += (1 - a ** (length + 1)) / (1 - a)
            if depth <= max(limits):
                worth[place, depth] = expected / (1 + depth * costs[place])
        found = choose(rates, limits, costs)
        assert abs(worth[found] - max(worth.values())) < 1e-9
        if max(limits):
            del worth[0, 0]
            assert abs(worth[choose(rates, limits, costs, plain=False)] - max(worth.values())) < 1e-9


def test_exits_are_spread() -> None:
    assert spread(3, 3) == [1, 2, 3]
    assert spread(21, 4) == [5, 10, 16, 21]
    assert spread(1, 1) == [1]


# ---------------------------------------------------------------- kangaroo
def test_an_adapter_is_in_step_with_its_texts(module: Any, plain: Any, draft: str) -> None:
    """What it proposes after many rounds is what it proposes when it reads the text anew."""
    model = drafting(module, "kangaroo", draft)
    drafter = model.speculation.drafter
    rounds: list[int] = []

    class Checked(kangaroo.Kangaroo):
        def draft(self, asks: Any) -> list[Tree]:
            trees = super().draft(asks)
            for ask, tree in zip(asks, trees, strict=True):
                fresh = drafted(drafter, ask)
                assert (fresh.tokens, fresh.chances) == (tree.tokens, tree.chances)
                rounds.append(len(tree))
            return trees

    checked = Checked(cache=drafter.cache, candidates=drafter.candidates, confidence=0.0)
    model.speculation = Speculation(checked, lengths=Fixed(4, 4))
    texts = [*prompts(4, 130), [9]]
    truth = answers(plain, texts, max_new_tokens=40)
    memory = 8 * model.engine.page_bytes
    assert model.generate(texts, max_new_tokens=40, cache_memory=memory) == list(truth.values())
    assert model.stats["mean_accepted"] > 1
    assert len(rounds) > 30
    assert "off" not in model.stats["drafter"]


def test_reading_again_leaves_the_cache_as_it_is(module: Any, draft: str) -> None:
    model = drafting(module, "kangaroo", draft)
    engine, text = lean(model), prompts(1, 150, seed=8)[0]
    ask = turn(engine, text)
    pool = ask.place.pool  # type: ignore[union-attr]
    before = [tensor.clone() for tensor in pool.tensors]
    drafted(model.speculation.drafter, ask)
    last = len(text) - 1
    heads, size = engine.parts.kv_heads, engine.parts.head_dim
    for at, (old, new) in enumerate(zip(before, pool.tensors, strict=True)):
        shape = (-1, heads, size, 64) if at % 2 == 0 else (-1, heads, 64, size)
        for position in range(last):
            page, place = divmod(position, 64)
            mine = [each.view(shape)[page].select(2 if at % 2 == 0 else 1, place) for each in (old, new)]
            assert torch.equal(*mine)


# ---------------------------------------------------------------- settings that cannot be
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "skip"}, "drafter: nothing is skipped"),
        ({"method": "skip", "skip_attention": [4]}, r"drafter.skip_attention\[0\]: the model has layers 0 to 3, not 4"),
        ({"method": "skip", "skip_mlp": [1, 2, 1]}, r"drafter.skip_mlp\[2\]: layer 1 is named twice"),
        ({"method": "skip", "skip_mlp": 3}, "drafter.skip_mlp: expected a list of integers"),
        ({"method": "skip", "skip_mlp": [-1]}, r"drafter.skip_mlp\[0\]: expected an integer"),
        ({"method": "skip", "skip_attention": [0, 1, 2, 3], "skip_mlp": [0, 1, 2, 3]}, "all 4 layers are skipped"),
        ({"method": "skip", "skip_mlp": [1], "confidence": 1.0}, "drafter.confidence: expected a number at least 0 and below 1"),
        ({"method": "skip", "skip_mpl": [1]}, "did you mean 'skip_mlp'"),
        ({"method": "early-exit", "layer": 4}, "an early exit is after layer 1 to 3 of this model's 4, not 4"),
        ({"method": "early-exit", "layer": 0}, "drafter.layer: expected an integer at least 1"),
        ({"method": "early-exit", "layer": "last"}, "drafter.layer: expected an integer at least 1 or auto"),
        ({"method": "early-exit", "every": 0}, "drafter.every: expected an integer at least 1"),
        ({"method": "early-exit", "layer": 2, "every": 3}, "drafter.every: is for an exit that is chosen anew"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(plain: Any, settings: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        drafter_of(Target(plain.artifact, plain.engine), settings)


def test_engines_that_cannot(plain: Any, module: Any, draft: str) -> None:
    for settings in ({"method": "skip", "skip_mlp": [1]}, {"method": "early-exit"}, {"model": draft}):
        with pytest.raises(
            RequestError, match=r"only the decoder in C.* computes with parts of a model.*this one runs on"
        ):
            drafter_of(Target(plain.artifact, engines(module)[0]), settings)

        class Streamed(type(plain.engine)):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

        with pytest.raises(RequestError, match="from disk"):
            drafter_of(Target(plain.artifact, Streamed()), settings)
    single = loaded(gentle(num_hidden_layers=1))
    with pytest.raises(RequestError, match=r"1 layer.* 2"):
        drafter_of(Target(single.artifact, single.engine), "early-exit")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "4567"}, "another target: it was made for fingerprint 4567, and that of tiny is 0123"),
        ({"method": "medusa"}, "holds a draft of the method medusa; leave the key out"),
        ({"schema_version": 2}, "has schema_version 2; this version reads 1"),
        ({"exit_layer": 4}, "exit_layer.*, got 4"),
        ({"exit_layer": True}, "exit_layer.*, got true"),
    ],
)
def test_adapters_of_other_models(plain: Any, module: Any, tmp_path: Any, change: Any, said: str) -> None:
    folder = adapter(tmp_path, module, **change)
    with pytest.raises(RequestError, match=said):
        drafter_of(Target(plain.artifact, plain.engine), {"model": str(folder), "method": "kangaroo"})
    (folder / kangaroo.ADAPTER).write_bytes(b"damaged")
    adapter(tmp_path / "other", module)
    (folder / "draft.json").write_text((tmp_path / "other" / "draft.json").read_text())
    with pytest.raises(ArtifactError, match="damaged or no safetensors file"):
        drafter_of(Target(plain.artifact, plain.engine), {"model": str(folder), "method": "kangaroo"})


def test_names_for_the_registry() -> None:
    assert (Skip.name, early_exit.EarlyExit.name, DynamicExit.name) == ("skip", "early-exit", "early-exit")
    assert kangaroo.Kangaroo.name == "kangaroo"
    for drafter in (Skip, early_exit.EarlyExit, DynamicExit, kangaroo.Kangaroo):
        assert drafter.inside
        assert drafter.draws
