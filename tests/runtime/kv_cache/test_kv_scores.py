"""Scores, shares and what is evicted when, against few-line definitions of the papers; and the bounds of their fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from kv_observation import observation, weights
from random_models import padded_rows, random_llama
from transformers import AutoModelForCausalLM, Qwen3Config

from runtime.config.settings import built, settings_of
from runtime.errors import RequestError
from runtime.kv_cache.budgets.adaptive import AdaptiveHeads
from runtime.kv_cache.budgets.base import EqualHeads, LayerFacts, UniformLayers
from runtime.kv_cache.budgets.cake import Cake
from runtime.kv_cache.budgets.defensive import DefensiveLayers
from runtime.kv_cache.budgets.pyramid import Pyramid
from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.eviction import Eviction, EvictionPlan, GeneratedTokens
from runtime.kv_cache.layer import CompressedLayer
from runtime.kv_cache.layer_state import best_places
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.scores.base import Score
from runtime.kv_cache.scores.defensive import Defensive
from runtime.kv_cache.scores.duo import Duo
from runtime.kv_cache.scores.h2o import H2O
from runtime.kv_cache.scores.keyformer import Keyformer
from runtime.kv_cache.scores.rpc import ReasoningPath
from runtime.kv_cache.scores.snapkv import SnapKV
from runtime.kv_cache.scores.streaming import Streaming
from runtime.kv_cache.scores.tova import Tova
from runtime.kv_cache.scores.zipcache import Normalized
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain
from runtime.kv_cache.storage.plan import StoragePlan, Tier


# ---------------------------------------------------------------- scores
def rows(seen: Observation) -> Any:
    """Of each sequence and head: where it is, and how many tokens it has."""
    return [(b, h, int(seen.held[b, h].sum())) for b in range(2) for h in range(2)]


def check_ends(found: torch.Tensor, count: int, width: int) -> None:
    """The window is always kept, and behind the last token there is none."""
    assert bool(found[count - width : count].isposinf().all())
    assert bool(found[count:].isneginf().all())


@pytest.mark.parametrize("prior", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("width", "kernel"), [(6, 3), (1, 1), (4, 5)])
def test_defensive_is_the_worst_case_over_a_floor_times_the_values_length(
    width: int, kernel: int, prior: float
) -> None:
    seen = observation()
    found = Defensive(observe=width, kernel=kernel, prior=prior)(seen)
    plain = weights(seen)[..., -width:, :]
    for b, h, count in rows(seen):
        past = count - width
        worst = [0.0] * past
        for g in range(2):
            for i in range(width):
                row = plain[b, h, g, i, :past].tolist()
                padded = [0.0] * (kernel // 2) + row + [0.0] * (kernel // 2)
                pooled = [sum(padded[n : n + kernel]) / kernel for n in range(past)]
                worst = [max(w, p * sum(row) / sum(pooled)) for w, p in zip(worst, pooled, strict=True)]
        floor = prior * sum(worst) / past
        lengths = [math.sqrt(sum(x * x for x in seen.values[b, h, n].tolist())) for n in range(past)]
        expected = [max(w, floor) * length for w, length in zip(worst, lengths, strict=True)]
        torch.testing.assert_close(found[b, h, :past], torch.tensor(expected))
        check_ends(found[b, h], count, width)


def test_defensives_floor_is_the_papers() -> None:
    assert Defensive() == Defensive(observe=32, kernel=5, prior=1.0)


@pytest.mark.parametrize("observe", [1, 4, 20])
def test_normalized_is_the_mean_over_the_probes_that_could_look(observe: int) -> None:
    seen = observation(width=20)
    found = Normalized(observe=observe)(seen)
    plain = weights(seen)[..., -observe:, :]
    for b, h, count in rows(seen):
        for n in range(count - 1):
            probes = [
                i for i in range(observe) if n <= count - observe + i
            ]  # query i is that of token count - observe + i
            total = sum(float(plain[b, h, g, i, n]) for g in range(2) for i in probes) / 2
            assert float(found[b, h, n]) == pytest.approx(total / len(probes), rel=1e-4, abs=1e-7)
        check_ends(found[b, h], count, 1)


def plain_rpc(seen: Observation, b: int, h: int, past: int, width: int) -> list[float]:
    """Attention of a query head's window over the first `past` tokens and no others, summed over the window."""
    total = [0.0] * past
    for i in range(width):
        query = seen.queries[b, h, seen.queries.shape[2] - width + i]
        logits = [float(seen.keys[b, h // seen.groups, n] @ query) * seen.scale for n in range(past)]
        terms = [math.exp(logit - max(logits)) for logit in logits]
        total = [t + term / sum(terms) for t, term in zip(total, terms, strict=True)]
    return total


def test_rpc_is_attention_over_the_candidates_alone_pooled() -> None:
    seen, width, kernel = observation(), 5, 3
    found = ReasoningPath(observe=width, kernel=kernel)(seen)
    # The first sequence's heads hold the same tokens, the second's do not: then none has another's average.
    alike = replace(seen, queries=seen.queries[:1], keys=seen.keys[:1], values=seen.values[:1], ages=seen.ages[:1])
    together = ReasoningPath(observe=width, kernel=kernel)(alike)
    for score, case, b, h, heads in (
        *((found, seen, b, h, [2 * h, 2 * h + 1]) for b in range(2) for h in range(2)),
        *((together, alike, 0, h, [0, 1, 2, 3]) for h in range(2)),
    ):
        count = int(case.held[b, h].sum())
        past = count - width
        each = [plain_rpc(case, b, head, past, width) for head in heads]
        mean = [0.0, *(sum(row[n] for row in each) / len(each) / width for n in range(past)), 0.0]
        expected = [sum(mean[n : n + kernel]) / kernel for n in range(past)]
        torch.testing.assert_close(score[b, h, :past], torch.tensor(expected), rtol=1e-4, atol=1e-6)
        check_ends(score[b, h], count, width)


# ---------------------------------------------------------------- DuoAttention
GATES = ((0.0, 1.0),)


def fed(plan: EvictionPlan, storage: StoragePlan, pieces: list[int]) -> CompressedLayer:
    """One layer of two heads that was given these pieces of a text; channel 0 of a key is the token's place."""
    layer = CompressedLayer(0, Eviction(plan, 1), storage)
    generator = torch.Generator().manual_seed(1)
    place = 0
    for count in pieces:
        key, value = (torch.randn(1, 2, count, 32, generator=generator) for _ in range(2))
        key[..., 0] = torch.arange(place, place + count)
        place += count
        layer.update(key, value)
        layer.attend(torch.randn(1, 4, count, 32, generator=generator), key, value, None, 0.01, 0.0)
    return layer


def places(layer: CompressedLayer, head: int) -> list[int]:
    assert layer.store is not None
    keys, _, used, _ = layer.store.states()
    return keys[head, used[head], 0].round().long().tolist()


TIERS = {"floats": (), "pages": (Tier(Plain(), Plain()),)}


@pytest.mark.sampled(6, 12)
@pytest.mark.parametrize("heads", [EqualHeads(), AdaptiveHeads()], ids=lambda s: s.name)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("inner", [None, SnapKV(8)], ids=["all", "snapkv"])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 0.5, 1.0])
def test_a_streaming_head_never_loses_its_sinks(ratio: float, inner: Any, tiers: str, heads: Any) -> None:
    """Whatever the budget, the length of the prompt and how many recent tokens stay floats: whole pages may not take them."""
    for recent in (0, 16, 32, 65, 72, 79, 81, 128):
        for prompt in (17, 79, 81, 96, 200, 300):
            plan = EvictionPlan(Duo(GATES, inner=inner), UniformLayers(), heads, ratio=ratio, interval=8)
            layer = fed(plan, StoragePlan(TIERS[tiers], recent), [prompt, *[1] * 20])
            held, total = places(layer, 0), prompt + 20
            assert held[: min(16, total)] == list(range(min(16, total))), (recent, prompt)
            assert held[-min(64, total) :] == list(range(total))[-min(64, total) :], (recent, prompt)
            if tiers == "floats":  # and holds nothing else but what came since
                assert len(held) <= 80 + 4 or total <= 80 + 4
            if inner is None:  # the others hold them too
                assert places(layer, 1)[:16] == list(range(min(16, total)))


def test_what_duo_keeps_is_both_ends_or_what_its_inner_score_keeps() -> None:
    assert Duo(GATES, sinks=3, recent=5).kept() == 8
    assert Duo(GATES, sinks=3, recent=5, inner=SnapKV(4)).kept() == 8
    assert Duo(GATES, sinks=3, recent=5, inner=SnapKV(32)).kept() == 32


# ---------------------------------------------------------------- Layer-DefensiveKV
def cascade(share: DefensiveLayers, scores: list[torch.Tensor], mean: float, heads: Any, least: int) -> list[list[int]]:
    """Tokens that each head of each layer has left after all layers were seen, cut again after each."""
    facts: list[LayerFacts] = []
    budget = torch.tensor([mean]).double()
    counts: list[torch.Tensor] = []
    for score in scores:
        facts.append(LayerFacts.of(score, torch.ones(1)))
        shares = share.shares(facts, len(scores), budget, least)
        counts = [heads.counts(fact.score, budget * own, least) for fact, own in zip(facts, shares, strict=True)]
        for number, (fact, wanted) in enumerate(zip(facts, counts, strict=True)):
            chosen, used = best_places(fact.score, wanted)
            facts[number] = replace(fact, score=fact.score.gather(-1, chosen).masked_fill(~used, float("-inf")))
    return [wanted[0].tolist() for wanted in counts]


def ranked(scores: list[torch.Tensor], whole: int) -> list[int]:
    """How many of the `whole` best tokens each layer has, scores being shares of their layer's total."""
    total = [float(score[score.isfinite()].sum()) for score in scores]
    every = [(float(x) / total[n], -n) for n, score in enumerate(scores) for x in score.flatten().tolist()]
    best = sorted(every, reverse=True)[:whole]
    return [sum(layer == -n for _, layer in best) for n in range(len(scores))]


@pytest.mark.parametrize("seed", range(6))
def test_layers_get_what_a_ranking_of_all_tokens_at_once_would_give_them(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, mean = 200, (50.0, 31.5, 120.0)[seed % 3]
    # Layers of the same kind, and layers whose attention is narrow or wide: the budgets of these differ several times.
    widths = (1.0,) * 4 if seed < 3 else (0.3, 3.0, 1.0, 6.0)
    scores = [(torch.randn(1, 2, count, generator=generator) / width).exp() for width in widths]
    for score in scores:
        score[..., -3:] = float("inf")
    expected = ranked(scores, round(mean * 2 * len(scores)))
    heads = AdaptiveHeads(safeguard=0.0)
    found = cascade(DefensiveLayers(safeguard=0.0), scores, mean, heads, 4)
    assert [sum(layer) for layer in found] == expected
    if seed < 3:
        assert len(set(expected)) > 1
    safe = cascade(DefensiveLayers(safeguard=0.5), scores, mean, heads, 4)
    assert sum(map(sum, safe)) == round(mean * 2 * len(scores))
    assert min(map(sum, safe)) >= round(mean)


def test_a_layer_may_keep_more_than_the_mean_and_never_less_than_its_safeguard() -> None:
    first = torch.cat([torch.full((1, 2, 60), 1.0), torch.full((1, 2, 40), 1e-6)], -1)
    later = torch.cat([torch.full((1, 2, 1), 1.0), torch.full((1, 2, 99), 1e-6)], -1)
    found = cascade(DefensiveLayers(safeguard=0.25), [first, later, later], 40.0, AdaptiveHeads(0.0), 1)
    # All large ones, a quarter of the mean for the last layer; of the equal rest an earlier layer's go before.
    assert [sum(layer) for layer in found] == [120, 100, 20]


def test_a_models_layers_end_up_with_a_ranking_of_all_its_tokens() -> None:
    """Through real layers: counts of the last cut are those of all scores ranked at once."""
    made = prepared()
    ids = torch.randint(1, 257, (1, 120), generator=torch.Generator().manual_seed(7))
    seen: list[torch.Tensor] = []

    class Noted(SnapKV):
        def __call__(self, observed: Observation) -> torch.Tensor:
            seen.append(super().__call__(observed))
            return seen[-1]

    plan = EvictionPlan(Noted(8), DefensiveLayers(0.0), AdaptiveHeads(0.0), ratio=0.25)
    cache = CompressedCache(made, CachePlan(plan))
    with torch.no_grad():
        made(ids, past_key_values=cache)
    assert [int(layer.store.lengths.sum()) for layer in cache.layers] == ranked(seen, round(0.25 * 120 * 2 * 3))


# ---------------------------------------------------------------- prompts that stay
def prepared() -> Any:
    made = random_llama(num_hidden_layers=3, max_position_embeddings=512, pad_token_id=0)
    prepare(made)
    return made


@pytest.fixture(scope="module")
def llama() -> Any:
    return prepared()


def run(
    made: Any, plan: EvictionPlan, pieces: list[torch.Tensor], mask: torch.Tensor, **options: Any
) -> CompressedCache:
    cache = CompressedCache(made, CachePlan(plan, **options))
    seen = mask[:, :0]
    for ids in pieces:
        new = mask[:, : ids.shape[1]] if not seen.shape[1] else torch.ones_like(ids)
        seen = torch.cat([seen, new], 1)
        with torch.no_grad():
            made(ids, attention_mask=seen, past_key_values=cache)
    return cache


ALL = [SnapKV(4), H2O(4), Tova(), Keyformer(4), Defensive(4), Streaming(2), Normalized(4), ReasoningPath(4)]


@pytest.mark.sampled(6, 12)
@pytest.mark.parametrize("tiers", [(), (Tier(Plain(), Plain()),)], ids=["floats", "pages"])
@pytest.mark.parametrize("heads", [EqualHeads(), AdaptiveHeads()], ids=lambda s: s.name)
@pytest.mark.parametrize("score", ALL, ids=lambda s: s.name)
def test_a_prompt_stays_whole_and_what_is_generated_is_cut_to_the_budget(
    llama: Any, score: Any, heads: Any, tiers: Any
) -> None:
    """Prompts of several lengths, and a second piece of each after some steps."""
    prompt, mask = padded_rows(60, (25, 7, 0))
    generator = torch.Generator().manual_seed(3)
    new = torch.randint(1, 257, (3, 24 + 30 + 16), generator=generator)
    pieces = [prompt, *new[:, :24].split(1, 1), new[:, 24:54], *new[:, 54:].split(1, 1)]
    plan = EvictionPlan(score, UniformLayers(), heads, ratio=0.4, interval=8, prompt="keep")
    cache = run(llama, plan, pieces, mask, storage=StoragePlan(tiers, recent=16))
    whole = CompressedCache(llama, None)
    with torch.no_grad():
        llama(
            torch.cat([prompt, new], 1),
            attention_mask=torch.cat([mask, torch.ones_like(new)], 1),
            past_key_values=whole,
        )
    for row, padding in enumerate((25, 7, 0)):
        texts = [*range(60 - padding), *range(84 - padding, 114 - padding)]  # places of what came in prompts
        for layer, full in zip(cache.layers, whole.layers, strict=True):
            lengths = layer.store.lengths.view(layer.shape)[row]
            wanted = max(round(0.4 * 40), score.kept() + 1)
            if not tiers:
                assert int(lengths.sum()) == 2 * (len(texts) + wanted)
            if layer.index:  # keys of later layers depend on what was evicted before them
                continue
            for head in range(2):
                keys, _, used, _ = layer.store.states()
                held = keys[2 * row + head, used[2 * row + head]]
                true = full.store.states()[0][2 * row + head]
                distance = torch.cdist(true[texts], held, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
                assert float(distance.max()) < 1e-3  # every token of the prompts is there
                if not tiers:
                    assert len(held) - len(texts) < 40


def test_prompts_stay_when_rows_leave_and_tokens_are_taken_back(llama: Any) -> None:
    prompt, mask = padded_rows(50, (10, 0, 30))
    plan = EvictionPlan(ReasoningPath(2), UniformLayers(), EqualHeads(), tokens=4, interval=4, prompt="keep")
    cache = run(llama, plan, [prompt, *torch.ones(3, 8, dtype=torch.int64).split(1, 1)], mask)
    cache.batch_select_indices(torch.tensor([2, 0, 0]))
    lengths = [int(n) for n in cache.layers[0].store.lengths[::2]]
    assert lengths == [24, 44, 44]
    seen = torch.cat([mask[[2, 0, 0]], torch.ones(3, 8, dtype=mask.dtype)], 1)
    for _ in range(4):
        seen = torch.cat([seen, torch.ones(3, 1, dtype=mask.dtype)], 1)
        with torch.no_grad():
            llama(torch.ones(3, 1, dtype=torch.int64), attention_mask=seen, past_key_values=cache)
    assert [int(n) for n in cache.layers[0].store.lengths[::2]] == lengths
    assert cache.layers[0].note("given").sum(-1)[:, 0].tolist() == [20, 40, 40]


def test_scores_see_what_was_generated_and_nothing_else() -> None:
    seen = replace(observation(), mass=torch.rand(2, 2, 20), positions=torch.arange(20).expand(2, 2, -1), pinned=2)
    given = torch.zeros(2, 2, 20, dtype=torch.bool)
    given[..., :5] = given[..., 7:9] = True
    part = GeneratedTokens.of(seen, given)
    for b, h, count in rows(seen):
        left = [n for n in range(count) if n >= 2 and not given[b, h, n]]
        assert int(part.beside[b, h]) == count - len(left)
        assert part.seen.positions is not None
        assert part.seen.positions[b, h, : len(left)].tolist() == left
        assert torch.equal(part.seen.keys[b, h, : len(left)], seen.keys[b, h, left])
        assert torch.equal(part.seen.ages[b, h, : len(left)], seen.ages[b, h, left])
        assert bool((part.seen.ages[b, h, len(left) :] < 0).all())
    spread = part.spread(part.seen.positions.float(), torch.full((2, 2, 20), -7.0))
    for b, h, count in rows(seen):
        assert spread[b, h].tolist() == [float(n) if 2 <= n < count and not given[b, h, n] else -7.0 for n in range(20)]


def test_rpc_is_the_papers() -> None:
    plan = Policy.parse("rpc").plan().eviction
    assert plan is not None
    assert plan.keeps_prompt
    assert (plan.score, plan.ratio, plan.interval) == (ReasoningPath(observe=32, kernel=7), 0.25, 1024)
    policy = Policy.parse({"method": "rpc", "evict": {"tokens": 512}, "keys": "int4", "values": "int4"})
    assert Policy.parse(policy.resolved()) == policy
    assert "beside the prompt" in policy.describe()


@pytest.mark.parametrize(
    ("evict", "key", "reason"),
    [
        ({"score": "snapkv", "prompt": "keep"}, "prompt", "an interval"),
        ({"score": "snapkv", "prompt": "keep", "interval": 8, "layers": "pyramid"}, "prompt", "pyramid"),
        ({"score": "snapkv", "prompt": "kepe", "interval": 8}, "prompt", "did you mean 'keep'"),
        ({"score": "snapkv", "prompt": True, "interval": 8}, "prompt", "expected one of evict, keep, got true"),
    ],
)  # fmt: skip
def test_prompts_that_stay_need_something_else_to_cut(evict: Any, key: str, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"kv_cache\.evict\.{key}: .*{reason}"):
        Policy.parse({"evict": evict})


# ---------------------------------------------------------------- bounds
def rule(**options: Any) -> EvictionPlan:
    return EvictionPlan(**{"score": Tova(), "layers": UniformLayers(), "heads": EqualHeads(), **options})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: rule(ratio=1.5), r"ratio must be a number above 0 and at most 1, not 1\.5"),
        (lambda: rule(ratio=-1), "ratio must be a number above 0"),
        (lambda: rule(ratio=math.nan), "ratio must be a number above 0"),
        (lambda: rule(ratio=True), "ratio must be a number above 0 and at most 1, not true"),
        (lambda: rule(tokens=0), "tokens must be an integer at least 1, not 0"),
        (lambda: rule(tokens=1.5), r"tokens must be an integer at least 1, not 1\.5"),
        (lambda: rule(), "tokens"),
        (lambda: rule(ratio=0.5, tokens=5), "tokens"),
        (lambda: rule(ratio=0.5, interval=0), "interval must be an integer at least 1"),
        (lambda: rule(ratio=0.5, prompt="keep"), "prompt"),
        (lambda: rule(ratio=0.5, prompt="keep", interval=1, layers=Pyramid()), "prompt"),
        (lambda: SnapKV(kernel=4), r"snapkv\.kernel must be an integer at least 1 and odd, not 4"),
        (lambda: ReasoningPath(kernel=0), r"rpc\.kernel must be"),
        (lambda: SnapKV(observe=0), r"snapkv\.observe must be an integer at least 1"),
        (lambda: Defensive(prior=1.1), r"defensive\.prior must be a number between 0 and 1, not 1\.1"),
        (lambda: H2O(recent=-1), r"h2o\.recent must be an integer at least 0, not -1"),
        (lambda: Keyformer(temperature=0), r"keyformer\.temperature must be a number above 0"),
        (lambda: Keyformer(generation_length=0), r"generation_length must be an integer at least 1"),
        (lambda: Streaming(-1), r"streaming\.sinks"),
        (lambda: Normalized(0), r"normalized\.observe"),
        (lambda: Duo(GATES, streaming=2.0), r"duo\.streaming"),
        (lambda: Duo(GATES, recent=-1), r"duo\.recent"),
        (lambda: Pyramid(beta=1), r"pyramid\.beta must be a number above 1, not 1"),
        (lambda: Cake(entropy_temperature=0.0), r"cake\.entropy_temperature"),
        (lambda: DefensiveLayers(1.0), r"defensive\.safeguard must be a number at least 0 and below 1"),
        (lambda: AdaptiveHeads(-0.1), r"adaptive\.safeguard"),
        (lambda: Bitmap(1.0), r"bitmap\.sparsity must be a number above 0 and below 1"),
        (lambda: Integer(3, "token"), r"int3\.bits must be one of 2, 4, 8, not 3"),
        (lambda: Integer(4, "row"), r"int4\.axis must be token or channel"),
        (lambda: Integer(4, "token", -1), r"int4\.group must be an integer at least 0"),
        (lambda: Tier(Plain(), Plain(), 0.0), r"Tier\.share must be a number above 0"),
        (lambda: StoragePlan(recent=-1), r"StoragePlan\.recent must be an integer at least 0"),
    ],
)  # fmt: skip
def test_a_method_out_of_its_bounds_is_refused_in_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["evict.score", "evict.layers", "evict.heads", "keys, values"])
def test_every_method_holds_its_own_fields_to_its_bounds(key: str) -> None:
    """A new method is one file: it checks itself, and nothing else has to know its fields."""
    from runtime.kv_cache.policy.registries import AXES

    for method in AXES[key]:
        cls = method.load()
        given = {**method.fixed, **({"axis": "token"} if "axis" in {f.name for f in fields(cls)} else {})}
        numbers = [setting for setting in settings_of(cls, method.fixed).values() if setting.is_number]
        for setting in numbers:
            with pytest.raises(ValueError, match=setting.name):
                cls(**{**given, setting.name: type(setting.default)(-1)})


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_rounding_a_scale_to_float16_misses_the_top_by_an_eighth_of_a_step(axis: Any) -> None:
    states = torch.randn(64, 32, 32, generator=torch.Generator().manual_seed(5)) * 3
    codec = Integer(8, axis)
    packed = codec.encode(states).parts
    error = (codec.decode(packed, 32, torch.float32) - states).abs()
    dim = 1 if axis == "channel" else 2
    low, high = states.amin(dim, keepdim=True), states.amax(dim, keepdim=True)
    step = (high - low) / 255
    # Half a step of rounding, what the top misses, and what the lowest is off as a float16.
    assert bool((error <= (0.5 + 255 * 2**-11) * step * 1.001 + low.abs() * 2**-11).all())


# ---------------------------------------------------------------- inputs of attention
@dataclass(frozen=True)
class Watching(Score):
    """Keeps what it sees."""

    name: ClassVar[str] = "watching"
    wants: ClassVar[frozenset[str]] = frozenset(["hidden"])
    seen: list[Observation] = built(default=None)

    def window(self, count: int) -> int:
        return 6

    def __call__(self, seen: Observation) -> torch.Tensor:
        self.seen.append(seen)
        return seen.finish(-seen.ages.float(), 6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_score_may_see_hidden_states_weights_and_queries_before_their_rotation(family: str) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 99,
    }  # fmt: skip
    model = random_llama() if family == "llama" else AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
    prepare(model)
    score = Watching([])
    cache = CompressedCache(model, CachePlan(EvictionPlan(score, UniformLayers(), EqualHeads(), tokens=12, interval=4)))
    asked: list[torch.Tensor] = []
    module = next(each for each in model.modules() if hasattr(each, "q_proj"))
    module.register_forward_pre_hook(lambda _, args, given: asked.append(given["hidden_states"]), with_kwargs=True)
    ids = torch.arange(40)[None] % 90
    with torch.no_grad():
        for start, stop in ((0, 30), *((at, at + 1) for at in range(30, 34))):
            model(input_ids=ids[:, start:stop], past_key_values=cache)
    first, later = (seen for seen in score.seen if seen.layer == 0)
    for seen, last in ((first, 30), (later, 34)):
        assert seen.inputs is not None
        assert seen.inputs.module is module
        torch.testing.assert_close(seen.inputs.hidden, torch.cat(asked, 1)[:, last - 6 : last])
        plain = seen.inputs.queries(seen.keys.shape[-1])
        assert plain.shape == seen.queries.shape
        torch.testing.assert_close(plain.norm(dim=-1), seen.queries.norm(dim=-1))
        assert not torch.allclose(plain, seen.queries, atol=1e-3), "these are rotated"
    assert seen.newest(2).inputs.hidden.shape[1] == 2
