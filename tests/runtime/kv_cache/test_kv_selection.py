"""Selections: what a step reads against each method's plain definition, on ragged rows, in all storages, whatever happens between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import padded_rows, random_llama

from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.clusters import Clusters
from runtime.kv_cache.layer import CompressedLayer
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.region import Chosen, Queries, Region
from runtime.kv_cache.scores.snapkv import SnapKV
from runtime.kv_cache.selection.double_sparsity import DoubleSparsity, quantized
from runtime.kv_cache.selection.layout import Layout
from runtime.kv_cache.selection.quest import Quest, page_bound
from runtime.kv_cache.selection.recycled_attention import RecycledAttention
from runtime.kv_cache.selection.tidal import Tidal
from runtime.kv_cache.selection.token_select import TokenSelect
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain
from runtime.kv_cache.storage.plan import StoragePlan, Tier

BATCH, HEADS, GROUPS, SIZE, LAYERS = 3, 2, 2, 16, 3
SCALE = SIZE**-0.5
INT4 = Tier(Integer(4, "channel"), Integer(4, "token"))
STORAGES = {
    "plain": StoragePlan(),
    "prefix": StoragePlan(prefix=5),
    "int4": StoragePlan((INT4,), recent=40),
    "int4 with a prefix": StoragePlan((INT4,), recent=40, prefix=36),
}
MIXED = {
    "two tiers": StoragePlan(
        (Tier(Integer(8, "channel"), Integer(8, "token"), 0.5), Tier(Plain(), Plain(), 0.5)), 40, saliency=SnapKV(8)
    ),
    "clusters": StoragePlan(recent=40, clusters=Clusters(0.5, 64)),
}
CHANNELS = tuple(tuple((layer, 4 + head, 9, 14) for head in range(HEADS)) for layer in range(LAYERS))
#: Storage, budget and newest tokens, and the cap of scores. (Steps of 2 and 3 tokens have more new ones than one.)
CASES: list[tuple[str, dict[str, Any], float]] = [
    ("plain", {"tokens": 100, "recent": 20}, 0.0),
    ("prefix", {"ratio": 0.4, "recent": 20}, 0.0),
    ("int4", {"tokens": 70, "recent": 20}, 0.0),
    ("int4", {"tokens": 70, "recent": 1}, 0.7),
    ("int4 with a prefix", {"ratio": 0.4, "recent": 20}, 0.0),
]
MIXED_CASES: list[tuple[str, dict[str, Any], float]] = [
    ("two tiers", {"tokens": 70, "recent": 20}, 0.0),
    ("clusters", {"ratio": 0.4, "recent": 20}, 0.0),
    ("clusters", {"ratio": 0.4, "recent": 1}, 0.7),
]

Rows = list[Any]  # of each row something


# ---------------------------------------------------------------- what a step read, and of what
def kept(regions: list[Region]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[list[int]]]:
    """Keys, values and biases of each row in the order of arrival, and where its regions begin."""
    keys: Rows = [[] for _ in regions[0].lengths]
    values: Rows = [[] for _ in keys]
    biases: Rows = [[] for _ in keys]
    starts: Rows = [[] for _ in keys]
    for region in regions:
        k, v = region.states()
        bias = region.bias()
        for row, length in enumerate(region.lengths.tolist()):
            starts[row].append(sum(map(len, keys[row])))
            keys[row].append(k[row, :length])
            values[row].append(v[row, :length])
            biases[row].append(torch.zeros(length) if bias is None else bias[row, :length])
    return [torch.cat(k) for k in keys], [torch.cat(v) for v in values], [torch.cat(b) for b in biases], starts


def places(regions: list[Region], chosen: list[Chosen | None]) -> list[list[int]]:
    """What each row reads, in the order of arrival."""
    result: Rows = [[] for _ in regions[0].lengths]
    starts = [0] * len(result)
    for region, some in zip(regions, chosen, strict=True):
        for row, length in enumerate(region.lengths.tolist()):
            if some is None:
                own = list(range(length))
            else:
                index = some.index[row, : int(some.counts[row])].tolist()
                assert index == sorted(set(index))
                own = [i * some.unit + j for i in index for j in range(some.unit) if i * some.unit + j < length]
                assert len(own) > (len(index) - 1) * some.unit
            result[row] += [starts[row] + i for i in own]
            starts[row] += length
    return result


class Recorder:
    """A selection that keeps what each step was given and what it read."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps: list[dict[str, Any]] = []

    def choose(self, layer: Any, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        chosen = self.inner.choose(layer, queries, regions)
        keys, values, biases, starts = kept(regions)
        self.steps.append(
            {"layer": layer.index, "query": queries.states, "count": queries.count, "softcap": queries.softcap,
             "keys": keys, "values": values, "biases": biases, "starts": starts,
             "lengths": [region.lengths.tolist() for region in regions], "changes": layer.changes, "seen": layer.seen,
             "taken": layer.taken_back,
             "chosen": chosen, "read": places(regions, chosen)}
        )  # fmt: skip
        return chosen

    def nbytes(self, index: int) -> int:
        return self.inner.nbytes(index)


class Life:
    """Layers with random states: prompts, steps and what else happens to a cache."""

    def __init__(
        self, options: Any, storage: StoragePlan, seed: int = 0, layers: int = LAYERS, softcap: float = 0.0
    ) -> None:
        self.softcap = softcap
        self.selection = options.begin(layers)
        self.recorder = Recorder(self.selection)
        self.layers = [CompressedLayer(index, None, storage, self.recorder) for index in range(layers)]
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def attend(self, count: int, valid: torch.Tensor | None = None, query: torch.Tensor | None = None) -> None:
        for layer in self.layers:
            batch = layer.shape[0] or BATCH
            key, value = self.random(batch, HEADS, count, SIZE), self.random(batch, HEADS, count, SIZE)
            layer.update(key, value)
            given = self.random(batch, HEADS * GROUPS, count, SIZE) if query is None else query
            before = len(self.recorder.steps)
            output = layer.attend(given, key, value, valid, SCALE, self.softcap)
            for step in self.recorder.steps[before:] if count > 1 or before % 5 == 0 else []:
                torch.testing.assert_close(output, attention(step, batch, count), atol=1e-5, rtol=1e-4)

    def full(self) -> list[int]:
        """For each layer how many steps read everything."""
        layers = [step["layer"] for step in self.recorder.steps if all(some is None for some in step["chosen"])]
        return [layers.count(layer) for layer in range(len(self.layers))]

    def prompt(self, *padding: int, count: int = 150) -> None:
        self.attend(count, torch.arange(count) >= torch.tensor(padding)[:, None])

    def go(self, *, count: int = 150, evict: bool = False) -> list[dict[str, Any]]:
        """All that can happen to a cache; returns its steps."""
        self.prompt(0, 61, 12, count=count)
        for _ in range(3):
            self.attend(1)
        self.attend(3)
        for layer in self.layers:
            layer.crop(-2)
        for _ in range(35):
            self.attend(1)
        for layer in self.layers:
            layer.batch_select_indices(torch.tensor([2, 0, 0, 1]))
        self.attend(1)
        self.prompt(3, 0, 20, 1, count=40)
        for _ in range(2):
            self.attend(2)
        if evict:
            self.evict()
            for _ in range(4):
                self.attend(1)
        return self.recorder.steps

    def evict(self) -> None:
        for layer in self.layers:
            assert layer.store is not None
            lengths = layer.store.lengths.view(layer.shape)
            score = torch.rand(*layer.shape, int(lengths.max()), generator=self.generator)
            score[..., :36] = 2  # a prefix is pinned
            score = score.masked_fill(torch.arange(score.shape[-1]) >= lengths[..., None], float("-inf"))
            layer.keep(score, lengths * 3 // 5 + torch.arange(HEADS) * 17)
            layer.settle()


def attention(step: dict[str, Any], batch: int, count: int) -> torch.Tensor:
    """Attention over what was read, row by row and query by query: `[batch, heads, q, size]`."""
    result = torch.zeros(batch, HEADS, GROUPS, count, SIZE)
    for row, read in enumerate(step["read"]):
        length = len(step["keys"][row])
        for number, query in enumerate(step["query"][row]):
            seen = [i for i in read if i < length - (count - 1 - number % count)]
            scores = scored(step, step["keys"][row][seen] @ query) + step["biases"][row][seen]
            out = scores.softmax(0) @ step["values"][row][seen]
            result[row // HEADS, row % HEADS, number // count, number % count] = out
    return result.view(batch, HEADS * GROUPS, count, SIZE)


# ---------------------------------------------------------------- plain definitions
def scored(step: dict[str, Any], products: torch.Tensor) -> torch.Tensor:
    """Scores without biases of products of queries and keys."""
    scores, cap = products * SCALE, step["softcap"]
    return torch.tanh(scores / cap) * cap if cap else scores


def newest(options: Any, step: dict[str, Any]) -> int:
    """Tokens that are read because they are new."""
    return max(options.recent, step["count"])


def weights(step: dict[str, Any], row: int) -> torch.Tensor:
    """Attention of all queries of a row to each token, summed: `[n]`."""
    logits = scored(step, step["query"][row] @ step["keys"][row].T) + step["biases"][row]
    return logits.softmax(-1).sum(0)


def assert_best(score: torch.Tensor, candidates: range, count: int, found: list[int], hidden: range = range(0)) -> None:
    """The `count` best candidates were found, but for those `hidden`; of equal ones, any."""
    plain = score.tolist()
    least = sorted(plain[candidates.start : candidates.stop], reverse=True)[count - 1] if count > 0 else float("inf")
    sure = {i for i in candidates if plain[i] > least + 1e-6} - set(hidden)
    assert sure <= set(found) <= {i for i in candidates if plain[i] >= least - 1e-6}
    assert len(found) == max(0, count) or hidden


def first_weights(step: dict[str, Any], row: int) -> torch.Tensor:
    """Attention of the first new token's queries of a row to each token, summed, zeros at the newer ones: `[n]`."""
    before = len(step["keys"][row]) - step["count"] + 1
    logits = scored(step, step["query"][row][:: step["count"]] @ step["keys"][row][:before].T)
    votes = (logits + step["biases"][row][:before]).softmax(-1).sum(0)
    return torch.cat([votes, votes.new_zeros(step["count"] - 1)])


def share(options: Any, length: int) -> int:
    return min(options.tokens, length) if options.tokens is not None else round(options.ratio * length)


def quest_pages(options: Quest, step: dict[str, Any], row: int) -> list[int]:
    length = len(step["keys"][row])
    starts = step["starts"][row]
    recent = newest(options, step)
    pages, always = [], []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        for begin in range(start, end, PAGE):
            tokens = list(range(begin, min(begin + PAGE, end)))
            keys = step["keys"][row][tokens]
            products = step["query"][row][:, None] * torch.stack([keys.amin(0), keys.amax(0)])[:, None, None]
            bound = scored(step, products.amax(0).sum(-1).amax()) + step["biases"][row][tokens].amax()
            pages.append((float(bound), tokens))
            if begin == 0 or len(tokens) < PAGE or tokens[-1] >= length - recent:
                always.append(tokens)
    left = share(options, length) - sum(map(len, always))
    others = sorted((page for page in pages if page[1] not in always), key=lambda page: -page[0])
    chosen = always + [tokens for _, tokens in others[: max(0, left) // PAGE]]
    return sorted(token for tokens in chosen for token in tokens)


@pytest.mark.parametrize(
    ("storage", "budget", "softcap"),
    [
        *((name, {"tokens": 150, "recent": 20}, 0.0) for name in ("plain", "prefix", "int4", *MIXED)),
        *((name, {"ratio": 0.55, "recent": 20}, 0.0) for name in ("plain", "prefix", "int4", *MIXED)),
        *((name, {"tokens": 150, "recent": 1}, 3.0) for name in ("plain", "clusters")),
    ],
    ids=str,
)
def test_quest_reads_the_pages_with_the_highest_bounds(storage: str, budget: dict[str, Any], softcap: float) -> None:
    options = Quest(**budget, skip_layers=1)
    life = Life(options, (STORAGES | MIXED)[storage], layers=2, softcap=softcap)
    free = 0  # rows that some, and not all, of the pages that could be left out were chosen for
    for step in life.go(count=280, evict=True):
        for row, read in enumerate(step["read"]):
            if step["layer"] == 0:
                assert read == list(range(len(step["keys"][row])))
            else:
                assert read == quest_pages(options, step, row)
                free += PAGE + 20 + PAGE < len(read) < len(step["keys"][row])
    assert free > 100


@pytest.mark.parametrize(
    "options",
    [Quest(tokens=64, skip_layers=0), DoubleSparsity(tokens=64, channels=CHANNELS[:1], skip_layers=0)],
    ids=str,
)
def test_a_prefix_that_fills_up_token_by_token(options: Any) -> None:
    """Every step moves what is in the tail of the shorter rows."""
    life = Life(options, StoragePlan(prefix=100), layers=1)
    life.prompt(0, 61, 142, count=230)
    for _ in range(34):
        life.attend(1)
    for step in life.recorder.steps if options.name == "quest" else []:
        for row, read in enumerate(step["read"]):
            assert read == quest_pages(options, step, row)
    plain = Life(options, StoragePlan(), layers=1)
    plain.prompt(0, 61, 142, count=230)
    for _ in range(34):
        plain.attend(1)
    if options.name != "quest":  # tokens know nothing of regions
        assert [s["read"] for s in life.recorder.steps] == [s["read"] for s in plain.recorder.steps]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e3]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_token_of_a_page_scores_above_its_bound(seed: int, factor: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = (torch.randn(2, 5, PAGE, 8, generator=generator) * factor).to(dtype)
    query = torch.randn(2, 3, 8, generator=generator)
    bound = page_bound(query, keys.amin(2), keys.amax(2))
    true = torch.einsum("rmc,rptc->rmpt", query, keys.float()).amax(-1)
    assert bool((bound >= true - 1e-5 * factor).all())


@pytest.mark.parametrize(("storage", "budget", "softcap"), CASES + MIXED_CASES, ids=str)
def test_double_sparsity_reads_what_scores_highest_in_few_channels(
    storage: str, budget: dict[str, Any], softcap: float
) -> None:
    options = DoubleSparsity(**budget, channels=CHANNELS[:2], skip_layers=1)
    life = Life(options, (STORAGES | MIXED)[storage], layers=2, softcap=softcap)
    labels: dict[tuple[int, int], torch.Tensor] = {}  # of a layer's row, as they were when tokens came
    known: dict[int, Any] = {}
    for step in life.go(evict=True):
        layer = step["layer"]
        if layer == 0:
            continue
        state = step["changes"], None if storage in STORAGES else step["lengths"][:-1]
        void = layer not in known or known[layer][0] != state
        back = 0 if void else step["taken"] - known[layer][1]
        known[layer] = state, step["taken"]
        for row, read in enumerate(step["read"]):
            keys = step["keys"][row][:, list(CHANNELS[layer][row % HEADS])]
            old = keys[:0] if void else labels[layer, row][: len(labels[layer, row]) - back]
            codes, scale = quantized(keys[len(old) :])
            label = labels[layer, row] = torch.cat([old, codes * scale.float()])
            query = step["query"][row][:, list(CHANNELS[layer][row % HEADS])]
            votes = (scored(step, query @ label.T) + step["biases"][row]).softmax(-1).sum(0)
            length, recent = len(keys), newest(options, step)
            assert read[-recent:] == list(range(length - recent, length))
            assert_best(votes, range(length - recent), share(options, length) - recent, read[:-recent])


@pytest.mark.parametrize(("storage", "budget", "softcap"), CASES, ids=str)
def test_token_select_reads_what_all_heads_vote_for(storage: str, budget: dict[str, Any], softcap: float) -> None:
    options = TokenSelect(**budget, similarity=1.1, sinks=3, skip_layers=1)
    life = Life(options, STORAGES[storage], layers=2, softcap=softcap)
    for step in life.go():
        if step["layer"] == 0:
            continue
        for first in range(0, len(step["read"]), HEADS):
            length = len(step["keys"][first])
            votes = torch.stack([weights(step, row) for row in range(first, first + HEADS)]).sum(0)
            read, recent = step["read"][first], newest(options, step)
            assert [*read[:3], *read[-recent:]] == [*range(3), *range(length - recent, length)]
            wanted = share(options, length) - 3 - recent
            assert_best(votes, range(3, length - recent), wanted, read[3:-recent])
            assert all(other == read for other in step["read"][first : first + HEADS])


def test_token_select_chooses_anew_only_for_sequences_whose_queries_changed() -> None:
    options = TokenSelect(tokens=60, similarity=0.9, sinks=3, recent=10, skip_layers=0)
    life = Life(options, STORAGES["int4"], layers=1)
    life.prompt(0, 40, 0)
    query = life.random(BATCH, HEADS * GROUPS, 1, SIZE)
    life.attend(1, query=query)
    assert life.selection.votes == [BATCH]
    for _ in range(40):  # tokens move into few bits meanwhile
        life.attend(1, query=query + 0.05 * life.random(*query.shape))
    assert life.selection.votes == [BATCH]
    steps = life.recorder.steps
    for row, read in enumerate(steps[-1]["read"]):
        length = len(steps[-1]["keys"][row])
        assert read[-10:] == list(range(length - 10, length))
        assert read[:-10] == steps[0]["read"][row][:-10]  # what was voted for is read still, the newest moved on
    other = query.clone()
    other[1] = -query[1]
    life.attend(1, query=other)
    assert life.selection.votes == [BATCH + 1]
    assert [read[:-10] != old[:-10] for read, old in zip(life.recorder.steps[-1]["read"], steps[0]["read"], strict=True)] == [
        False, False, True, True, False, False,
    ]  # fmt: skip
    life.attend(1, query=other)
    assert life.selection.votes == [BATCH + 1]
    life.layers[0].crop(-1)
    life.attend(1, query=other)  # what is older than what was taken back is where it was
    assert life.selection.votes == [BATCH + 1]


@pytest.mark.parametrize(("storage", "budget", "softcap"), CASES, ids=str)
def test_tidal_layers_read_what_the_last_choosing_one_looked_at(
    storage: str, budget: dict[str, Any], softcap: float
) -> None:
    options = Tidal(**budget, full_layers=1, select_layers=(1, 3))
    life = Life(options, STORAGES[storage], layers=5, softcap=softcap)
    steps = life.go()
    for number, step in enumerate(steps):
        everything = [list(range(len(keys))) for keys in step["keys"]]
        if step["layer"] not in (2, 4):
            assert step["read"] == everything
            continue
        chose = steps[number - 1]
        for first in range(0, len(everything), HEADS):
            length = len(everything[first])
            votes = torch.stack([weights(chose, row) for row in range(first, first + HEADS)]).sum(0)
            read, recent = step["read"][first], newest(options, step)
            assert read[-recent:] == list(range(length - recent, length))
            assert_best(votes, range(length - recent), share(options, length) - recent, read[:-recent])
            assert all(other == read for other in step["read"][first : first + HEADS])


def test_tidal_chooses_behind_the_full_layers_and_in_the_middle() -> None:
    assert Tidal(tokens=9).selecting(32) == (2, 16)
    assert Tidal(tokens=9).selecting(3) == (2,)
    assert Tidal(tokens=9).selecting(2) == ()
    with pytest.raises(ValueError, match="select_layers"):
        Tidal(tokens=9, select_layers=(1, 4)).begin(8)


@pytest.mark.parametrize(("storage", "budget", "softcap"), CASES + MIXED_CASES, ids=str)
def test_recycled_reads_what_the_last_full_step_looked_at(storage: str, budget: dict[str, Any], softcap: float) -> None:
    options = RecycledAttention(**budget, stride=6)
    life = Life(options, (STORAGES | MIXED)[storage], layers=2, softcap=softcap)
    full: dict[int, Any] = {}
    count = [0] * 2
    for step in life.go(evict=True):
        layer = step["layer"]
        state = step["changes"], None if storage in STORAGES else step["lengths"][:-1]
        if layer not in full or full[layer][0] != state or step["seen"] - full[layer][1]["seen"] >= 6:
            full[layer] = state, step
            count[layer] += 1
            assert step["read"] == [list(range(len(keys))) for keys in step["keys"]]
            continue
        noted = full[layer][1]
        for row, read in enumerate(step["read"]):
            before, length = len(noted["keys"][row]) - noted["count"] + 1, len(step["keys"][row])
            recent = newest(options, step)
            assert read[-recent:] == list(range(length - recent, length))
            wanted = share(options, before) - newest(options, noted)
            assert_best(
                first_weights(noted, row), range(before), wanted, read[:-recent], range(length - recent, length)
            )
    assert life.full() == count


def test_recycled_attends_to_everything_at_its_stride() -> None:
    life = Life(RecycledAttention(tokens=60, stride=7, recent=10), STORAGES["int4"], layers=1)
    life.prompt(0, 61, 12)
    for _ in range(22):
        life.attend(1)
    whole = [n for n, step in enumerate(life.recorder.steps) if step["chosen"] == [None] * len(step["chosen"])]
    assert whole == [0, 7, 14, 21]


# ---------------------------------------------------------------- drafts
DRAFT = 3  # tokens that are drafted, all wrongly


def with_drafts(options: Any, storage: str) -> list[tuple[Life, list[dict[str, Any]]]]:
    """The same text without drafts, and with drafts in two of three steps: each life, and its steps of one layer, the last."""
    lives = [Life(options, STORAGES[storage]) for _ in range(2)]
    for life in lives:
        life.prompt(0, 61, 12)
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    about = random(BATCH, HEADS * GROUPS, 1, SIZE)
    for number in range(45):
        if number == 22:  # a draft is verified, and queries are others from then on
            about = random(BATCH, HEADS * GROUPS, 1, SIZE)
        query = about + 0.05 * random(BATCH, HEADS * GROUPS, 1 + DRAFT, SIZE)
        states = [random(2, BATCH, HEADS, 1 + DRAFT, SIZE) for _ in range(LAYERS)]
        for life, count in zip(lives, (1, 1 + DRAFT if number % 3 else 1), strict=True):
            for layer, (key, value) in zip(life.layers, states, strict=True):
                layer.update(key, value)
                layer.attend(query[:, :, :count], key[:, :, :count], value[:, :, :count], None, SCALE, 0.0)
            for layer in life.layers:
                layer.crop(1 - count)
    return [(life, [step for step in life.recorder.steps if step["layer"] == LAYERS - 1]) for life in lives]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["quest", "double-sparsity", "token-select", "tidal", "recycled"])
@pytest.mark.parametrize("storage", STORAGES)
def test_drafts_that_are_taken_back_change_no_later_choice(storage: str, name: str) -> None:
    options = next(one for one in every(tokens=90, recent=20) if one.name == name)
    if name == "recycled":
        options = RecycledAttention(tokens=90, recent=20, stride=7)
    (plain, steps), (drafts, found) = with_drafts(options, storage)
    read_all = [n for n, step in enumerate(steps) if step["chosen"] == [None] * len(step["chosen"])]
    assert read_all == [n for n, step in enumerate(found) if step["chosen"] == [None] * len(step["chosen"])]
    for number, (step, drafted) in enumerate(zip(steps, found, strict=True)):
        if not number % 3:
            assert drafted["read"] == step["read"]
        elif name == "recycled" or (
            name == "token-select" and number != 22
        ):  # what was chosen before; the newest are others
            for old, new, keys in zip(step["read"], drafted["read"], step["keys"], strict=True):
                assert [i for i in old if i < len(keys) - 20] == [i for i in new if i < len(keys) - 20]
    if name == "recycled":
        assert plain.full() == drafts.full() == [7] * LAYERS
    if name == "token-select":
        assert plain.selection.votes == drafts.selection.votes == [2 * BATCH] * LAYERS


def test_what_looked_is_looked_for_again_when_it_was_taken_back() -> None:
    life = Life(RecycledAttention(tokens=60, stride=1000, recent=10), StoragePlan(), layers=1)
    life.prompt(0, 61, 12)
    for _ in range(2):
        life.attend(4)
        life.layers[0].crop(-4)
    life.attend(1)
    assert life.full() == [3]
    life.attend(4)
    life.layers[0].crop(-4)
    life.attend(1)
    assert life.full() == [3]


# ---------------------------------------------------------------- budgets, memory, refusals
def every(recent: int = 8, **budget: Any) -> list[Any]:
    return [
        Quest(**budget, skip_layers=0, recent=recent),
        DoubleSparsity(**budget, channels=CHANNELS, skip_layers=0, recent=recent),
        TokenSelect(**budget, skip_layers=0, recent=recent),
        Tidal(**budget, full_layers=0, select_layers=(0,), recent=recent),
        RecycledAttention(**budget, stride=1000, recent=recent),
    ]


@pytest.mark.parametrize("options", every(tokens=40)[1:], ids=lambda options: options.name)
def test_votes_are_of_scores_with_their_cap(options: Any) -> None:
    """A cap makes large scores alike, and so changes who has most of several queries' weights."""
    lives = [Life(options, StoragePlan(), softcap=softcap) for softcap in (0.0, 0.5)]
    for life in lives:
        life.prompt(0, 61, 12)
        for _ in range(3):
            life.attend(1)
    plain, capped = ([step["read"] for step in life.recorder.steps] for life in lives)
    assert plain != capped


@pytest.mark.parametrize("options", every(recent=1, tokens=40)[1:], ids=lambda options: options.name)
def test_what_is_new_is_read_and_no_more_for_its_sake(options: Any) -> None:
    """Five new tokens have ten queries of two heads each."""
    life = Life(options, StoragePlan())
    life.prompt(0, 61, 12)
    for _ in range(2):
        life.attend(5)
    steps = [step for step in life.recorder.steps if step["chosen"][0] is not None]
    assert steps
    others = 0
    for step in steps:
        for keys, read in zip(step["keys"], step["read"], strict=True):
            assert len(read) == 40
            assert read[-5:] == list(range(len(keys) - 5, len(keys)))
            others += len(set(range(len(keys) - 10, len(keys) - 5)) - set(read))
    assert others > 0


@pytest.mark.parametrize("options", every(ratio=0.25), ids=lambda options: options.name)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_share_read_is_the_one_asked_for(storage: str, options: Any) -> None:
    life = Life(options, STORAGES[storage])
    life.prompt(0, 61, 12, count=400)
    for _ in range(4):
        life.attend(1)
    read = held = 0
    for step in life.recorder.steps:
        lengths = [len(keys) for keys in step["keys"]]
        held += sum(lengths)
        read += sum(map(len, step["read"]))
        if step["chosen"][0] is not None:
            for length, tokens in zip(lengths, step["read"], strict=True):
                # A page may not fit any more, and what is always read must be there.
                assert 0.25 * length - PAGE <= len(tokens) <= 0.25 * length + 0.5
    assert life.selection.reads.share() == pytest.approx(read / held)
    last = LAYERS - 1
    assert life.selection.reads.share(last) < (0.45 if options.name == "recycled" else 0.26)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_kept_beside_the_cache_is_small_and_counted(storage: str) -> None:
    for options, most in (
        (Quest(ratio=0.2, skip_layers=1), 0.08),
        (DoubleSparsity(ratio=0.2, channels=CHANNELS, skip_layers=1), 0.08),
    ):
        life = Life(options, StoragePlan())
        life.prompt(0, 0, 0, count=2048)
        life.attend(1)
        assert life.selection.nbytes(0) == 0
        assert 0 < life.selection.nbytes(1) < most * life.layers[1].nbytes


def test_pages_and_labels_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of stored tokens is not worked out anew at every step."""
    opened = 0
    plain = Region.page_keys

    def page_keys(region: Region, ids: torch.Tensor) -> torch.Tensor:
        nonlocal opened
        opened += len(ids)
        return plain(region, ids)

    monkeypatch.setattr(Region, "page_keys", page_keys)
    for options in (
        Quest(tokens=64, skip_layers=0),
        DoubleSparsity(tokens=64, channels=CHANNELS[:1], skip_layers=0),
    ):
        for storage in ("plain", "int4"):
            life = Life(options, STORAGES[storage], layers=1)
            life.prompt(0, 0, 0, count=640)
            life.attend(1)
            assert opened >= 20 * BATCH * HEADS
            opened = 0
            for _ in range(40):
                life.attend(1)
            # The tail's few pages at most: those in few bits were not opened again.
            assert opened <= 40 * 3 * BATCH * HEADS
            opened = 0
            for _ in range(40):
                life.attend(4)
                life.layers[0].crop(-3)
            # With drafts those that they touch, besides.
            assert opened <= 40 * 5 * BATCH * HEADS
            opened = 0


def test_a_budget_is_one_of_two_numbers() -> None:
    with pytest.raises(ValueError, match="tokens"):
        Quest()
    with pytest.raises(ValueError, match="tokens"):
        Tidal(tokens=3, ratio=0.5)
    with pytest.raises(ValueError, match=r"recycled\.ratio"):
        RecycledAttention(ratio=1.5)
    with pytest.raises(ValueError, match=r"token-select\.tokens"):
        TokenSelect(tokens=0)


def test_channels_are_those_of_the_model() -> None:
    with pytest.raises(ValueError, match="channels"):
        DoubleSparsity(tokens=9, channels=(((1, 2), (3,)),))
    with pytest.raises(ValueError, match="channels"):
        DoubleSparsity(tokens=9, channels=CHANNELS).begin(4)
    for channels, words in ((((1,),), "those of 1 heads, and it has 2"), (((1,), (16,)), r"must be in \[0, 16\)")):
        life = Life(DoubleSparsity(tokens=9, channels=(channels,), skip_layers=0), StoragePlan(), layers=1)
        life.prompt(0, 0, 0)
        with pytest.raises(ValueError, match=words):
            life.attend(1)


@pytest.mark.parametrize("options", [TokenSelect(tokens=50, skip_layers=0), Tidal(tokens=50, full_layers=0)], ids=str)
def test_heads_that_hold_different_tokens_are_refused(options: Any) -> None:
    life = Life(options, StoragePlan())
    life.prompt(0, 0, 0)
    life.evict()
    with pytest.raises(ValueError, match="layer"):
        life.attend(1)
    life = Life(options, MIXED["two tiers"])
    life.prompt(0, 0, 0)
    with pytest.raises(ValueError, match="storages"):
        life.attend(1)


def test_layers_that_hold_different_tokens_are_refused() -> None:
    life = Life(Tidal(tokens=50, full_layers=0), StoragePlan())
    life.prompt(0, 0, 0)
    layer = life.layers[2]
    layer.keep(life.random(*layer.shape, 150), torch.full(layer.shape, 80))
    with pytest.raises(ValueError, match="than layer 1"):
        life.attend(1)


def test_places_are_found_in_regions_of_ragged_rows() -> None:
    life = Life(RecycledAttention(tokens=60), STORAGES["int4 with a prefix"], layers=1)
    life.prompt(0, 61, 130)
    store = life.layers[0].store
    assert store is not None
    layout = Layout(store.regions)
    assert layout.lengths.tolist() == store.lengths.tolist()
    query = Queries(life.random(BATCH * HEADS, 3, SIZE), SCALE, count=3)
    keys, _, _, _ = kept(store.regions)
    rows = torch.tensor([4, 1])
    logits, some = layout.logits(query), layout.logits(query.rows(rows), rows)
    for row, own in enumerate(keys):
        torch.testing.assert_close(logits[row, :, : len(own)], query.states[row] @ own.T * SCALE)
        assert bool((logits[row, :, len(own) :] == float("-inf")).all())
    torch.testing.assert_close(some, logits[rows])


# ---------------------------------------------------------------- a model
@pytest.fixture(scope="module")
def llama() -> tuple[Any, torch.Tensor, torch.Tensor]:
    made = random_llama(num_hidden_layers=LAYERS, max_position_embeddings=256, pad_token_id=0)
    prepare(made)
    return made, *padded_rows(90, (30, 7, 0))


def write(llama: Any, storage: StoragePlan, selection: Any) -> tuple[torch.Tensor, Any]:
    made, ids, mask = llama
    cache = CompressedCache(made, CachePlan(None, storage, selection))
    with torch.no_grad():
        found = made.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=cache)
    return found, cache


@pytest.mark.parametrize("storage", ["plain", "int4"])
def test_a_full_budget_changes_nothing(llama: Any, storage: str) -> None:
    plain, _ = write(llama, STORAGES[storage], None)
    for budget in ({"tokens": 1000}, {"ratio": 1.0}):
        for options in every(**budget):
            found, _ = write(llama, STORAGES[storage], options)
            assert torch.equal(found, plain), options


@pytest.mark.parametrize("storage", ["plain", "int4"])
def test_choosing_all_pages_or_tokens_is_reading_everything(storage: str) -> None:
    """Rows so ragged that the longest is cut while the others' choice is all they hold."""
    for options in every(tokens=120):
        life = Life(options, STORAGES[storage])
        life.prompt(0, 90, 61)
        life.attend(1)
        for step in life.recorder.steps:
            for row, read in enumerate(step["read"]):
                if row >= HEADS:
                    assert read == list(range(len(step["keys"][row])))


def test_a_small_budget_writes_something_else(llama: Any) -> None:
    plain, _ = write(llama, StoragePlan(), None)
    for options in every(tokens=40):
        if options.name == "recycled":
            continue
        found, cache = write(llama, StoragePlan(), options)
        assert not torch.equal(found, plain)
        assert cache.layers[1].selection.reads.share() < 0.8
