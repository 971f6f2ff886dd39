"""Heads on the target: exact whatever they propose, trees that are the best of their size, caches that are as if computed anew."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distribution_cases import accepted_in_drawn_texts
from head_students import KINDS, head_student, write_heads
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_engines import engines, model_of
from safetensors.torch import load_file, save_file
from speculation_cases import VOCABULARY, answers, model, prompts, speculation
from teachers import features_of

from compress.distill.draft.heads import HeadStudent, rank_rates
from compress.distill.draft.medusa import MedusaStudent
from compress.distill.train.data import TextRows
from runtime.api.model import Model
from runtime.config.settings import read_settings
from runtime.drafting.drafters.base import Ask, Draw, Verified
from runtime.drafting.drafters.heads import TargetParts, round_linears, rounded_linear
from runtime.drafting.drafters.medusa import Medusa, widened
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.mtp import MTP
from runtime.drafting.drafters.mtp_block import BlockSizes, Entries, MTPBlock, rotated
from runtime.drafting.drafters.tables.growth import grow_levels
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.drafting.rates import Rates
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import ArtifactError, RequestError
from runtime.kernels.cpu import library
from runtime.sampling.options import GenerationOptions
from runtime.sampling.tree import ROOT, Tree

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
CPU = torch.device("cpu")
START, DRAWN = [5, 6, 7], {"temperature": 0.8, "top_k": 4, "ignore_eos": True}


def builder(cls: Any) -> Any:
    """Builds the drafter of a directory from settings as they are written."""
    return lambda target, path, facts, settings: cls.build(target, path, facts, **read_settings(cls, settings))


BUILDERS: dict[str, Any] = {"medusa": builder(Medusa), "mtp": builder(MTP)}


@pytest.fixture(scope="module")
def plain() -> Any:
    return model()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [text[:12] for text in prompts(40, 60) if len(text) >= 12][:10]


def fit(student: HeadStudent, rows: TextRows, steps: int) -> None:
    """Learn the rows by heart. (`train` keeps what is best at temperature 1, which for a random target is to know nothing.)"""
    batch = rows.batch(range(len(rows)), [0] * len(rows))
    optimizer = torch.optim.Adam([each for each in student.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        loss, weight = student(batch, None)
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def students(plain: Any, texts: list[list[int]]) -> dict[str, HeadStudent]:
    """Heads that know the texts of these tests, more or less."""
    truth = answers(plain, texts, max_new_tokens=50, ignore_eos=True)
    drawn = plain.generate([START] * 10, max_new_tokens=62 - len(START), **DRAWN, seed=list(range(10)))
    rows = TextRows(torch.tensor([[*text, *new] for text, new in (*truth.items(), *((START, new) for new in drawn))]))
    found: dict[str, HeadStudent] = {}
    for name in KINDS:
        features = features_of(plain)
        features.teacher.fingerprint = "tiny"
        found[name] = head_student(name, features, 3, divergence="cross_entropy")
        fit(found[name], rows, 60)
    return found


def drafter(student: HeadStudent, **given: Any) -> Any:
    """What the builder makes of a student's directory, without the directory."""
    module = copy.deepcopy(student.draft.module)
    parts = TargetParts.of(engines(model_of("grouped"))[1])
    round_linears(module, torch.float32, CPU)
    if isinstance(student, MedusaStudent):
        rates = [[0.3, 0.1]] * student.levels
        return Medusa(parts, module, Candidates(VOCABULARY), rates, **given)
    return MTP(parts, module, Candidates(VOCABULARY), **given)


# ---------------------------------------------------------------- texts
@pytest.mark.sampled(4, 5)
@pytest.mark.parametrize("given", [{}, {"shape": "fitted", "width": 3, "refit": 4}, {"width": 1}])
@pytest.mark.parametrize("lengths", [Fixed(depth=3, nodes=10), Fixed(depth=8, nodes=4), Goodput()])
@pytest.mark.parametrize("name", KINDS)
def test_greedy_texts_are_those_of_plain_decoding(
    plain: Any, texts: list[list[int]], students: Any, name: str, lengths: Any, given: Any
) -> None:
    if name == "mtp" and "shape" in given:
        given = {"confidence": 0.3, "window": 7}
    truth = answers(plain, texts, max_new_tokens=50)
    drafting = model(speculation(drafter(students[name], **given), lengths))
    assert drafting.generate(texts, max_new_tokens=50) == list(truth.values())
    if isinstance(lengths, Fixed):
        assert drafting.stats["accepted_tokens"] > 50
        assert drafting.stats["steps"] < plain.stats["steps"]
    assert "switched off" not in drafting.stats["drafter"]


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_gives_the_text_of_plain_decoding(plain: Any, texts: list[list[int]], students: Any, name: str) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7, "max_new_tokens": 30}
    drafting = model(speculation(drafter(students[name])))
    assert drafting.generate(texts[:5], **options) == plain.generate(texts[:5], **options)
    assert drafting.stats["drafted_tokens"] > 100


@pytest.mark.parametrize("name", KINDS)
def test_drawn_texts_are_distributed_as_those_of_plain_decoding(plain: Any, students: Any, name: str) -> None:
    drafting = model(speculation(drafter(students[name]), Fixed(depth=3, nodes=6)))
    assert accepted_in_drawn_texts(plain, drafting, START, 1000) > 80


@pytest.mark.parametrize("name", KINDS)
def test_little_memory_shared_beginnings_and_streams(plain: Any, students: Any, name: str) -> None:
    start = prompts(1, 400, seed=5)[0] * 10
    together = [start[:100] + end for end in prompts(6, 30)]
    truth = answers(plain, together, max_new_tokens=90, ignore_eos=True)
    own = drafter(students[name])
    drafting = model(speculation(own, Fixed(depth=3, nodes=6)))
    memory = 6 * drafting.engine.page_bytes
    found = drafting.generate(together, max_new_tokens=90, ignore_eos=True, cache_memory=memory, prefill_chunk=33)
    assert found == list(truth.values())
    assert drafting.stats["preemptions"] > 0
    assert drafting.stats["shared_prompt_tokens"] > 0
    assert list(drafting.stream(together[0], max_new_tokens=50, ignore_eos=True)) == found[0][:50]
    if name == "mtp":
        assert not own._open


@pytest.mark.parametrize("name", KINDS)
def test_transformers_modules_are_drafted_for_too(texts: list[list[int]], students: Any, name: str) -> None:
    def computed(together: Any = None) -> Model:
        engine, place = TorchEngine(model_of("grouped"), CPU), SimpleNamespace(path=Path("tiny"))
        return Model(engine, None, place, frozenset([3]), together)  # type: ignore[arg-type]

    truth = computed().generate(texts, max_new_tokens=40)
    drafting = computed(speculation(drafter(students[name]), Fixed(depth=3, nodes=8)))
    assert drafting.generate(texts, max_new_tokens=40) == truth
    assert drafting.stats["mean_accepted"] > 0.5


# ---------------------------------------------------------------- the fitted tree
def every_tree(paths: list[tuple[int, ...]], nodes: int) -> Any:
    for count in range(nodes + 1):
        for chosen in itertools.combinations(paths, count):
            whole = {(), *chosen}
            if all(path[:-1] in whole for path in chosen):
                yield chosen


rates = st.lists(st.floats(0, 1), min_size=1, max_size=3)


def fitted(table: list[list[float]], nodes: int, depth: int, least: float = 0.0) -> Tree:
    """The tree of ranks that is grown from rates by depth and rank."""
    levels = [[(rank, rate, 0, rate, None) for rank, rate in enumerate(ranks)] for ranks in table]
    return grow_levels(levels, nodes, depth, least).tree


@settings(max_examples=60, deadline=None)
@given(table=st.lists(rates, min_size=1, max_size=3), nodes=st.integers(0, 4), depth=st.integers(0, 4))
def test_a_fitted_tree_is_the_best_of_all_trees(table: list[list[float]], nodes: int, depth: int) -> None:
    levels = table[:depth]

    def reach(path: tuple[int, ...]) -> float:
        product = 1.0
        for level, rank in zip(table, path, strict=False):
            product *= level[rank]
        return product

    paths = [
        path
        for size in range(1, len(levels) + 1)
        for path in itertools.product(*(range(len(each)) for each in levels[:size]))
    ]
    best = max(sum(map(reach, chosen)) for chosen in every_tree(paths, nodes))
    tree = fitted(table, nodes, depth)
    assert len(tree) <= nodes
    assert abs(sum(tree.reach()) - best) < 1e-9
    own: list[tuple[int, ...]] = []
    for parent, rank, chance in zip(tree.parents, tree.tokens, tree.reach(), strict=True):
        own.append((*(own[parent] if parent != ROOT else ()), rank))
        assert abs(reach(own[-1]) - chance) < 1e-12
    assert len(set(own)) == len(own)
    assert tree.reach() == sorted(tree.reach(), reverse=True)


def test_branches_end_where_they_are_unlikely() -> None:
    table = [[0.5, 0.3], [0.9], [0.9]]
    assert fitted(table, 9, 3).tokens == [0, 0, 0, 1, 0, 0]
    assert fitted(table, 9, 3, least=0.42).reach() == pytest.approx([0.5, 0.45, 0.405, 0.3])
    assert fitted(table, 9, 3, least=0.6) == Tree([0, 1], [ROOT, ROOT], [0.5, 0.3])
    assert widened([[0.4, 0.2], []], 3) == [[0.4, 0.2, 0.1], [0.5, 0.25, 0.125]]


def test_rates_are_learned_and_forgotten() -> None:
    known, start = Rates(10, memory=50), {"first": 0.5, "second": 0.1, "other": 0.2}
    assert {kind: known.rate(kind, expected) for kind, expected in start.items()} == start
    for place in range(1000):
        known.add("first", False)
        known.add("second", place % 4 == 0)
    assert known.rate("first", 0.5) == pytest.approx(0.5 * 10 / 45, abs=0.1)
    assert known.rate("second", 0.1) == pytest.approx(0.25, abs=0.1)
    assert known.rate("other", 0.2) == 0.2
    known.reset()
    assert {kind: known.rate(kind, expected) for kind, expected in start.items()} == start


# ---------------------------------------------------------------- what is drafted
def hidden_of(tokens: list[int]) -> torch.Tensor:
    """The target's states of a text, in one pass of transformers' modules."""
    found = model_of("grouped")
    with torch.no_grad():
        states: torch.Tensor = found.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return states


def ready(own: Any, tokens: list[int], start: int = 0, draw: Any = None, nodes: int = 8, depth: int = 3) -> Ask:
    """A text whose prompt was read from `start` on, all but its last token, which the target has just chosen."""
    text = SimpleNamespace(tokens=tokens[:-1], prompt=len(tokens) - 1)
    hidden = hidden_of(tokens)
    state = own.begin(text)
    for first in range(start, len(tokens) - 1, 5):
        piece = tokens[first : min(first + 5, len(tokens) - 1)]
        for _ in range(2 if first % 3 else 1):  # put aside, and read again
            own.read(state, first, piece, hidden[first : first + len(piece)])
    text.tokens = list(tokens)
    row = hidden[len(tokens) - 2][None]
    own.learn(state, Verified(text, Tree(), [], tokens[-1:], torch.zeros(1, VOCABULARY), row))
    return Ask(state, text, nodes, depth, draw)


def test_heads_guess_what_their_states_say(students: Any, texts: list[list[int]]) -> None:
    own, student = drafter(students["medusa"], width=3), students["medusa"]
    own.module = copy.deepcopy(student.draft.module)  # not rounded
    asks = [ready(own, text) for text in texts[:4] if len(text) > 3]
    together = own.draft(asks)
    for ask, tree in zip(asks, together, strict=True):
        alone = own.draft([ask])[0]
        assert alone.tokens == tree.tokens
        assert alone.chances == pytest.approx(tree.chances, abs=1e-4)
        with torch.no_grad():
            said = student.said(student.draft.module(hidden_of(ask.text.tokens)[-2]))
        chances, tokens = torch.softmax(said, -1).topk(3, -1)
        depths = tree.depths()
        for token, depth, chance in zip(tree.tokens, depths, tree.chances, strict=True):
            place = tokens[depth - 1].tolist().index(token)
            assert abs(float(chances[depth - 1, place]) - chance) < 1e-3
        assert len(tree) == 8
        assert max(depths) <= 3
        own.learn(ask.state, Verified(ask.text, Tree(), [], [], torch.zeros(1, 1), torch.zeros(1, 64)))
    empty = own.begin(asks[0].text)
    assert len(own.draft([Ask(empty, asks[0].text, 8, 3)])[0]) == 0


def test_ranks_that_are_right_more_often_get_more_of_the_tree(students: Any) -> None:
    own = drafter(students["medusa"], width=2, shape="fitted", refit=1)
    ask = ready(own, prompts(1, 30)[0], nodes=3)
    first = own.draft([ask])[0]
    for _ in range(600):  # the second guess of the first head is right each time
        own.draft([ask])
        new = [ask.state.tokens[0][1]]
        ask.text.tokens = [*ask.text.tokens, *new]
        own.learn(ask.state, Verified(ask.text, Tree(), [], new, torch.zeros(1, 1), ask.state.hidden[None]))
    ask.text.tokens = ask.text.tokens[: ask.state.length]
    second = own.draft([ask])[0]
    assert second.tokens[0] != first.tokens[0]
    assert second.tokens[0] == ask.state.tokens[0][1]
    own.reset()
    assert own.draft([ask])[0].tokens == first.tokens


def naive_chain(
    student: HeadStudent, tokens: list[int], start: int, window: int, length: int
) -> list[tuple[int, float]]:
    """Greedy recursion from nothing: every entry computed anew for every token."""
    block: Any = student.draft.module
    parts, hidden = student.features.parts, hidden_of(tokens)
    states = list(hidden[start : len(tokens) - 1])
    known, found = list(tokens), []
    for _ in range(length):
        x = block.mixed(torch.stack(states), parts.embed(torch.tensor(known[start + 1 :])))
        places = torch.arange(start, start + len(x))
        keys, values = block.keys_values(x, block.turns(places))
        queries = block.queries(x[-1:], block.turns(places[-1:]))[0]
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", queries, keys[-window:]), -1)
        last = block.finish(x[-1], torch.einsum("hgn,nhd->hgd", weights, values[-window:]))
        p = torch.softmax(student.said(last), -1)
        states.append(last)
        known.append(int(p.argmax()))
        found.append((known[-1], float(p.max())))
    return found


@pytest.mark.parametrize("start", [0, 1, 13, 37])
@pytest.mark.parametrize("window", [5, 2048])
def test_a_cache_that_grows_is_one_computed_anew(students: Any, start: int, window: int) -> None:
    student, tokens = students["mtp"], prompts(1, 400, seed=1)[0][:40]
    own = drafter(student, width=1, window=window)
    own.module = copy.deepcopy(student.draft.module)  # not rounded
    tree = own.draft([ready(own, tokens, start, nodes=6, depth=6)])[0]
    with torch.no_grad():
        expected = naive_chain(student, tokens, start, window, 6)
    assert tree.tokens == [token for token, _ in expected]
    assert tree.chances == pytest.approx([chance for _, chance in expected], abs=1e-4)
    assert tree.is_chain


@pytest.mark.parametrize("window", [6, 64])
def test_drafts_do_not_depend_on_what_was_drafted_before(plain: Any, students: Any, window: int) -> None:
    """Of a whole call: each turn's chain against one from nothing."""

    class Spy(MTP):
        seen: list[tuple[list[int], Tree]]

        def draft(self, asks: Any) -> list[Tree]:
            trees = super().draft(asks)
            self.seen += [(list(ask.text.tokens), tree) for ask, tree in zip(asks, trees, strict=True)]
            return trees

    made = drafter(students["mtp"], window=window)
    own = Spy(made.parts, copy.deepcopy(students["mtp"].draft.module), made.candidates, 2, window)
    own.seen = []
    drafting = model(speculation(own, Fixed(depth=3, nodes=5)))
    drafting.generate(prompts(3, 80, seed=4), max_new_tokens=25, ignore_eos=True, prefill_chunk=16)
    assert len(own.seen) > 30
    for tokens, tree in own.seen[::3]:
        with torch.no_grad():
            expected = naive_chain(students["mtp"], tokens, 0, window, 1)
        assert tree.tokens[0] == expected[0][0]
        assert abs(tree.chances[0] - expected[0][1]) < 1e-3


def test_guesses_beside_the_chain_are_the_likeliest(students: Any) -> None:
    own = drafter(students["mtp"], width=5)
    tokens = prompts(1, 400, seed=2)[0][:30]
    tree = own.draft([ready(own, tokens, nodes=7, depth=4)])[0]
    whole = own.draft([ready(own, tokens, nodes=20, depth=4)])[0]
    reach = whole.reach()
    assert len(tree) == 7
    assert len(whole) == 20
    assert sorted(tree.reach(), reverse=True) == pytest.approx(sorted(reach, reverse=True)[:7])
    assert tree.reach() == sorted(tree.reach(), reverse=True)
    inner = set(whole.parents) - {ROOT}
    assert len(inner) == 3  # one chain, leaves beside it


def test_what_is_drawn_is_drawn_from_what_is_said(students: Any) -> None:
    own = drafter(students["mtp"])
    draw = Draw(GenerationOptions(temperature=1.0, top_k=3), torch.Generator().manual_seed(0))
    tree = own.draft([ready(own, prompts(1, 30)[0], draw=draw)])[0]
    assert tree.is_chain
    assert set(tree.proposals) == {-1, 0, 1}
    for node, token in enumerate(tree.tokens):
        q = tree.proposals[node - 1]
        assert q.shape == (VOCABULARY,)
        assert int((q > 0).sum()) == 3
        assert tree.chances[node] == pytest.approx(float(q[token]))


def test_what_is_drawn_counts_as_written(students: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a repetition penalty."""
    own = drafter(students["mtp"])
    seen: list[list[int]] = []
    plainly = Candidates.distribution

    def noting(self: Any, logits: torch.Tensor, draw: Draw, before: Any) -> torch.Tensor:
        seen.append(list(before))
        return plainly(self, logits, draw, before)

    monkeypatch.setattr(Candidates, "distribution", noting)
    tokens = prompts(1, 30)[0]
    draw = Draw(GenerationOptions(temperature=1.0, repetition_penalty=1.3), torch.Generator().manual_seed(0))
    tree = own.draft([ready(own, tokens, draw=draw)])[0]
    assert seen == [tokens, [*tokens, tree.tokens[0]], [*tokens, *tree.tokens[:2]]]


def test_heads_are_judged_where_those_before_were_right(students: Any) -> None:
    own = drafter(students["medusa"], width=2)
    ask = ready(own, prompts(1, 30)[0])
    own.draft([ask])
    guesses = ask.state.tokens
    wrong = next(token for token in range(VOCABULARY) if token not in guesses[0])
    before = own.rates()
    ask.text.tokens = [*ask.text.tokens, wrong, guesses[1][0]]
    verified = Verified(ask.text, Tree(), [], ask.text.tokens[-2:], torch.zeros(1, 1), torch.zeros(1, 64))
    own.learn(ask.state, verified)
    after = own.rates()
    assert after[0] < before[0]
    assert after[1] == before[1]
    own.draft([ask])
    right = [ask.state.tokens[0][0], ask.state.tokens[1][1]]
    ask.text.tokens = [*ask.text.tokens, *right]
    own.learn(ask.state, Verified(ask.text, Tree(), [], right, torch.zeros(1, 1), torch.zeros(1, 64)))
    assert own.rates()[1][1] > after[1][1]


def test_prompts_are_read_once_and_only_as_far_as_they_are_seen(students: Any) -> None:
    tokens = prompts(1, 400, seed=3)[0]
    tokens = (tokens * 20)[:400]
    own = drafter(students["mtp"], window=10)
    hidden = hidden_of(tokens)
    text = SimpleNamespace(tokens=tokens, prompt=len(tokens))
    state = own.begin(text)
    for first in range(0, 400, 64):
        for _ in range(2):  # put aside, and read again
            own.read(state, first, tokens[first : first + 64], hidden[first : first + 64])
    assert state.end == 399
    assert state.entries.count <= 300
    assert own.memory_bytes > state.entries.nbytes > 0
    own.end(state)
    assert own.memory_bytes < 64 * 1024 * 8


# ---------------------------------------------------------------- parts
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), window=st.integers(1, 9), turns=st.integers(1, 60))
def test_entries_are_a_list_of_the_last_ones(seed: int, window: int, turns: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = BlockSizes(8, 8, 4, 2, 4, 4)
    own = Entries(sizes, window, torch.float32, CPU)
    keys, values = torch.empty(0, 2, 4), torch.empty(0, 2, 4)
    for _ in range(turns):
        new, more = int(torch.randint(1, 30, (), generator=draw)), int(torch.randint(0, 6, (), generator=draw))
        own.reserve(new + more)
        key, value = torch.randn(2, new + more, 2, 4, generator=draw)
        own.add(key, value)
        own.drop(more)  # what was drafted
        keys, values = torch.cat([keys, key[:new]]), torch.cat([values, value[:new]])
        queries = torch.randn(2, 2, 4, generator=draw)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", queries, keys[-window:]), -1)
        expected = torch.einsum("hgn,nhd->hgd", weights, values[-window:])
        torch.testing.assert_close(own.attend(queries), expected, atol=1e-5, rtol=1e-4)
    assert own.nbytes <= 2 * 2 * 4 * 4 * max(128, 8 * window + 70)


@pytest.mark.parametrize("shape", [(8, 64), (33, 100), (400, 64)])
def test_lean_layers_are_nearly_their_originals(shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=draw), torch.randn(shape[0], generator=draw)
    weight[1] = 0
    x = torch.randn(2, 3, shape[1], generator=draw)
    layer = rounded_linear(weight.to(torch.bfloat16), bias, torch.float32, CPU)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert float((layer(x) - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(layer(x)[1, 2], layer(x[1, 2]))


def test_rotations_are_those_of_the_target() -> None:
    found = model_of("grouped")
    block = MTPBlock(BlockSizes(64, 96, 8, 2, 8, 8))
    block.frequencies = found.model.rotary_emb.inv_freq
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, places = torch.randn(1, 5, 2, 8), torch.tensor([[0, 1, 7, 300, 511]])
    cosine, sine = found.model.rotary_emb(x, places)
    expected = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cosine, sine)[0].transpose(1, 2)
    torch.testing.assert_close(rotated(x, block.turns(places)), expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- directories
def target(fingerprint: str = "tiny", path: str = "tiny") -> Any:
    checkpoint = SimpleNamespace(fingerprint=lambda: fingerprint)
    artifact = SimpleNamespace(path=Path(path), checkpoint=checkpoint)
    return SimpleNamespace(artifact=artifact, engine=engines(model_of("grouped"))[1])


@pytest.fixture(scope="module")
def directories(students: Any, texts: Any, tmp_path_factory: Any) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("heads")
    rows = TextRows(torch.tensor([(text * 40)[:20] for text in texts]))
    for name, student in students.items():
        content = {"method": name, "target": "tiny", "facts": {"note": 1}, "rates": rank_rates(student, rows, 4)}
        write_heads(path / name, student, content, torch.float32)
    return {name: path / name for name in students}


@pytest.mark.parametrize("name", KINDS)
def test_a_directory_gives_the_drafter_that_was_written(directories: Any, students: Any, name: str) -> None:
    facts = json.loads((directories[name] / "draft.json").read_text())
    assert facts["method"] == name
    made = BUILDERS[name](target(), directories[name], facts, {"width": 3})
    assert made.width == 3
    if name == "medusa":
        assert [list(ranks) for ranks in made.start] == facts["rates"]
    tokens = prompts(1, 50)[0]
    same = drafter(students[name], width=3)
    trees = [own.draft([ready(own, tokens)])[0] for own in (made, same)]
    assert trees[0] == trees[1]
    assert made.memory_bytes > 1000
    assert name in made.describe()


@pytest.mark.parametrize("name", KINDS)
def test_directories_that_do_not_fit_are_refused(directories: Any, name: str, tmp_path: Path) -> None:
    path = directories[name]
    facts = json.loads((path / "draft.json").read_text())
    build = BUILDERS[name]
    with pytest.raises(RequestError, match=r"fingerprint tiny.*elsewhere.*other"):
        build(target("other", "elsewhere"), path, facts, {})
    for key, size in (("vocabulary", 400), ("hidden", 64)):
        with pytest.raises(RequestError, match=f"{key} size of 7, and tiny has {size}"):
            build(target(), path, {**facts, key: 7}, {})
    with pytest.raises(RequestError, match="expected 'm"):
        build(target(), path, {**facts, "method": "else"}, {})
    with pytest.raises(RequestError, match="unknown key 'widht'; did you mean 'width'"):
        build(target(), path, facts, {"widht": 3})
    with pytest.raises(RequestError, match="width"):
        build(target(), path, facts, {"width": 0})
    first = next(iter(facts["heads"]))
    with pytest.raises(ArtifactError, match=f"heads.{first}"):
        build(target(), path, {**facts, "heads": {**facts["heads"], first: "x"}}, {})
    stored = load_file(path / "heads.safetensors")
    odd = next(iter(stored))
    for tensors, said in (
        ({key: value for key, value in stored.items() if key != odd}, f"has no tensor {odd}"),
        ({**stored, odd: torch.zeros(3)}, f"tensor {odd} is torch.float32 .3., expected"),
        ({**stored, "kept_tokens": torch.tensor([3, 2], dtype=torch.int32)}, "ascending int32 ids below 400"),
    ):
        save_file(tensors, tmp_path / "heads.safetensors")
        with pytest.raises(ArtifactError, match=said):
            build(target(), tmp_path, facts, {})
    content = (path / "heads.safetensors").read_bytes()
    (tmp_path / "heads.safetensors").write_bytes(content[:-9])
    with pytest.raises(ArtifactError, match=r"heads\.safetensors"):
        build(target(), tmp_path, facts, {})
    (tmp_path / "heads.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"has no heads\.safetensors"):
        build(target(), tmp_path, facts, {})
    if name == "medusa":
        with pytest.raises(ArtifactError, match="rates"):
            build(target(), path, {**facts, "rates": [[0.1]]}, {})
    hidden = SimpleNamespace(engine=SimpleNamespace(description="an engine"), artifact=target().artifact)
    with pytest.raises(RequestError, match=r"engine.* head"):
        build(hidden, path, facts, {})


def test_only_kept_tokens_are_proposed(plain: Any, texts: Any, tmp_path: Path) -> None:
    kept = torch.arange(0, VOCABULARY, 3, dtype=torch.int32)
    for name in KINDS:
        features = features_of(plain)
        features.teacher.fingerprint = "tiny"
        student = head_student(name, features, 2, kept=kept)
        path = tmp_path / name
        write_heads(path, student, {"method": name, "target": "tiny", "facts": {}, "rates": [[0.2], [0.1]]})
        made = BUILDERS[name](target(), path, json.loads((path / "draft.json").read_text()), {})
        tree = made.draft([ready(made, texts[0], nodes=12)])[0]
        assert len(tree) == 12
        assert set(tree.tokens) <= set(kept.tolist())
        drafting = model(speculation(made, Fixed(depth=2, nodes=6)))
        assert drafting.generate(texts[:3], max_new_tokens=10) == plain.generate(texts[:3], max_new_tokens=10)


def test_an_engine_without_hidden_states_switches_heads_off(students: Any) -> None:
    for student in students.values():
        own = drafter(student)
        text = SimpleNamespace(tokens=[1, 2, 3], prompt=2)
        with pytest.raises(RequestError, match="hidden states"):
            own.learn(own.begin(text), Verified(text, Tree(), [], [3], torch.zeros(1, 1), None))
