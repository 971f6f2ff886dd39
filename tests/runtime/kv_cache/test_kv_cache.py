"""Compressed caches: pages against a list, attention against transformers, scores and budgets against their plain definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_observation import observation, weights
from random_models import padded_rows, random_llama

from runtime.kv_cache.budgets.adaptive import AdaptiveHeads
from runtime.kv_cache.budgets.base import EqualHeads, UniformLayers
from runtime.kv_cache.budgets.cake import Cake
from runtime.kv_cache.budgets.defensive import DefensiveLayers
from runtime.kv_cache.budgets.pyramid import Pyramid
from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.pages import PAGE, Pages, PageTensor
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.scores.cake import CakeIndicator
from runtime.kv_cache.scores.defensive import Defensive
from runtime.kv_cache.scores.h2o import H2O
from runtime.kv_cache.scores.keyformer import Keyformer, gumbel
from runtime.kv_cache.scores.rpc import ReasoningPath
from runtime.kv_cache.scores.snapkv import SnapKV
from runtime.kv_cache.scores.streaming import Streaming
from runtime.kv_cache.scores.tova import Tova

SCORES = [SnapKV(8), H2O(8), Tova(), Keyformer(8), Defensive(8), Streaming(), CakeIndicator(8), ReasoningPath(8)]


# ---------------------------------------------------------------- pages
@pytest.mark.parametrize("seed", range(4))
def test_pages_hold_what_lists_would(seed: int) -> None:
    """Appends of ragged lengths, evictions, rows that leave or are doubled, in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = 5
    store = Pages(
        rows, {"keys": PageTensor(3, torch.float32), "values": PageTensor(2, torch.float32)}, torch.device("cpu")
    )
    truth: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    for _ in range(25):
        action = int(torch.randint(0, 6, (1,), generator=generator))
        if action <= 1:
            counts = torch.randint(0, 2 * PAGE, (len(truth),), generator=generator)
            new = torch.randn(len(truth), 2 * PAGE, 5, generator=generator)
            store.append({"keys": new[..., :3], "values": new[..., 3:]}, counts)
            for row, count in enumerate(counts.tolist()):
                truth[row] += list(new[row, :count])
        elif action == 2:
            most = max(len(row) for row in truth)
            counts = torch.tensor([int(torch.randint(0, len(row) + 1, (1,), generator=generator)) for row in truth])
            places = torch.zeros(len(truth), max(1, int(counts.max())), dtype=torch.int64)
            for row, count in enumerate(counts.tolist()):
                chosen = torch.randperm(len(truth[row]), generator=generator)[:count].sort().values
                places[row, :count] = chosen
                truth[row] = [truth[row][i] for i in chosen.tolist()]
            store.keep(places, counts)
            assert most >= store.longest
        elif action == 4:
            counts = torch.tensor([int(torch.randint(0, len(row) + 1, (1,), generator=generator)) for row in truth])
            store.crop(counts)
            truth = [row[:count] for row, count in zip(truth, counts.tolist(), strict=True)]
        elif action == 5:
            for _ in range(40):
                new = torch.randn(len(truth), 5, generator=generator)
                store.append_one({"keys": new[:, :3], "values": new[:, 3:]})
                for row, tokens in enumerate(truth):
                    tokens.append(new[row])
        else:
            chosen = torch.randint(0, len(truth), (len(truth),), generator=generator)
            store.select_rows(chosen)
            truth = [list(truth[i]) for i in chosen.tolist()]
        assert store.lengths.tolist() == [len(row) for row in truth]
        keys, values, used = store.dense("keys"), store.dense("values"), store.used()
        for row, tokens in enumerate(truth):
            assert used[row].sum() == len(tokens)
            if tokens:
                assert torch.equal(torch.cat([keys, values], -1)[row, : len(tokens)], torch.stack(tokens))


def test_what_is_evicted_is_freed() -> None:
    store = Pages(2, {"keys": PageTensor(64, torch.float32)}, torch.device("cpu"))
    store.append({"keys": torch.randn(2, 1000, 64)}, torch.tensor([1000, 1000]))
    before = store.nbytes
    places = torch.arange(1000).expand(2, -1)
    store.keep(places, torch.tensor([1000, 10]))
    assert store.nbytes < 0.6 * before


# ---------------------------------------------------------------- attention
def model() -> Any:
    return random_llama(num_hidden_layers=3, max_position_embeddings=256, pad_token_id=0)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, padded prompts with their mask, and what plain transformers writes after them."""
    made = model()
    ids, mask = padded_rows(70, (30, 7, 0))
    with torch.no_grad():
        written = made.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    prepare(made)
    return made, ids, mask, written


def plan(score: Any = None, **options: Any) -> EvictionPlan:
    settings: dict[str, Any] = {"layers": UniformLayers(), "heads": EqualHeads(), **options}
    return EvictionPlan(score or SnapKV(8), **settings)


@pytest.mark.parametrize("interval", [None, 1, 3])
@pytest.mark.parametrize("score", [None, *SCORES], ids=lambda s: getattr(s, "name", "none"))
def test_a_full_budget_is_plain_attention(llama: Any, score: Any, interval: int | None) -> None:
    made, ids, mask, written = llama
    cache = CompressedCache(made, None if score is None else CachePlan(plan(score, ratio=1.0, interval=interval)))
    with torch.no_grad():
        found = made.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=cache)
    assert torch.equal(found, written)


def test_a_text_in_pieces_gives_the_logits_of_the_whole(llama: Any) -> None:
    made, ids, _, _ = llama
    with torch.no_grad():
        whole = made(ids).logits
        cache = CompressedCache(made, None)
        pieces = [made(part, past_key_values=cache).logits for part in ids.split([20, 1, 30, 19], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.95])
@pytest.mark.parametrize("share", [UniformLayers(), Pyramid(), Cake(8), DefensiveLayers()], ids=lambda s: s.name)
@pytest.mark.parametrize("heads", [EqualHeads(), AdaptiveHeads()], ids=lambda s: s.name)
@pytest.mark.parametrize("score", SCORES, ids=lambda s: s.name)
def test_the_budget_is_kept_and_memory_is_freed(llama: Any, score: Any, heads: Any, share: Any, ratio: float) -> None:
    """Layer by layer and row by row exactly as many tokens as the shares say, and the shares are those of one budget."""
    made, ids, mask, _ = llama
    cache = CompressedCache(made, CachePlan(plan(score, ratio=ratio, layers=share, heads=heads)))
    with torch.no_grad():
        logits = made(ids, attention_mask=mask, past_key_values=cache).logits
    assert bool(logits.isfinite().all())
    lengths, least = mask.sum(1).tolist(), score.kept() + 1
    shares = [
        torch.ones(3).double() if layer.share is None else layer.share.double() for layer in cache.layers
    ]  # `[batch]` each
    for row, tokens in enumerate(lengths):
        if isinstance(share, DefensiveLayers):  # as many tokens as the best of all layers are, if there are as many
            whole = round(max(ratio * tokens, least) * 2 * 3)
            assert sum(float(of[row]) for of in shares) * 2 * ratio * tokens == pytest.approx(min(whole, 6 * tokens))
        else:
            assert sum(float(of[row]) for of in shares) == pytest.approx(3, abs=1e-5)
        for layer, of in zip(cache.layers, shares, strict=True):
            mean = max(ratio * tokens * float(of[row]), least)
            held = layer.store.lengths.view(layer.shape)[row].tolist()
            if isinstance(heads, EqualHeads):
                assert held == [min(round(mean), tokens)] * 2
            else:
                assert sum(held) == min(round(mean * 2), tokens * 2)
                assert min(held) >= min(least, tokens)
    assert cache.layers[0].get_seq_length() == 70


def test_a_plan_needs_the_attention_that_reads_it() -> None:
    with pytest.raises(ValueError, match=r"prepare\(model\)|eager"):
        CompressedCache(model(), None)


def test_slices_of_attention_are_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.kv_cache import observation as module

    seen = observation()
    whole = torch.cat([part for _, part in seen.weights()], 3)
    torch.testing.assert_close(whole, weights(seen))
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    torch.testing.assert_close(torch.cat([part for _, part in seen.weights()], 3), whole)


def test_h2o_is_the_sum_and_tova_the_last_row() -> None:
    seen = observation()
    plain = weights(seen)
    heavy = H2O(recent=2)(seen)
    old = seen.ages >= 2
    torch.testing.assert_close(heavy[old], plain.sum(3).mean(2)[old])
    assert bool(heavy[(seen.ages < 2) & seen.held].isinf().all())
    last = Tova()(seen)
    torch.testing.assert_close(last[seen.ages >= 1], plain[..., -1, :].mean(2)[seen.ages >= 1])


def plain_gumbel(seed: int, layer: int, head: int, place: int) -> float:
    """The noise of one token, in Python's integers."""
    word = 0
    for part in (seed, layer, head, place):
        word ^= part
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            word = ((word ^ (word >> shift)) * factor) % 2**32
        word ^= word >> 15
    return -math.log(-math.log((word + 0.5) / 2**32))


def plain_keyformer(score: Keyformer, seen: Observation, noisy: bool = True) -> torch.Tensor:
    """The paper's sum, query by query and token by token."""
    batch, heads, width, _ = seen.queries.shape
    result = torch.zeros(seen.keys.shape[:3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv, ages = h // seen.groups, seen.ages[b, h // seen.groups].tolist()
            for i in range(width):
                step = seen.generated - (width - 1 - i)
                share = min(max(step / score.generation_length, 0), 1)
                tau = score.temperature + share * (score.last_temperature - score.temperature)
                terms = {}
                for n, age in enumerate(ages):
                    if age < width - 1 - i:  # none there, or newer than the query
                        continue
                    place = n if seen.positions is None else int(seen.positions[b, kv, n])
                    noise = plain_gumbel(score.seed, seen.layer, h, place) if noisy else 0.0
                    logit = float(seen.keys[b, kv, n].double() @ seen.queries[b, h, i].double()) * seen.scale
                    terms[n] = math.exp((logit + noise) / tau)
                for n, term in terms.items():
                    result[b, kv, n] += term / sum(terms.values()) / seen.groups
    return result.float()


@pytest.mark.parametrize("generated", [0, 3, 500])
def test_keyformer_is_the_papers_sum(generated: int) -> None:
    score = Keyformer(recent=2, temperature=0.5, last_temperature=3.0, generation_length=7, seed=5)
    prompt = replace(observation(width=20), layer=2, generated=generated)
    torch.testing.assert_close(score.added(prompt), plain_keyformer(score, prompt))
    # Of what was evicted from: tokens lie elsewhere than where they came.
    gone = torch.tensor([3, 40])[:, None, None] + torch.arange(20) * 2
    later = replace(observation(width=6), layer=2, generated=generated, positions=gone.expand(2, 2, -1))
    torch.testing.assert_close(score.added(later), plain_keyformer(score, later))
    torch.testing.assert_close(
        score.added(replace(later, positions=None)), plain_keyformer(score, replace(later, positions=None), noisy=False)
    )


def test_noise_is_a_gumbel_distribution_and_differs_from_head_to_head_layer_and_seed() -> None:
    places = torch.arange(20000).view(1, 1, -1)
    noise = gumbel(places, 2, 7, 3).double()
    ordered = noise[0, 0, 0].sort().values
    expected = (-(-ordered).exp()).exp()  # the distribution function
    assert (
        float((expected - (torch.arange(20000) + 0.5) / 20000).abs().max()) < 0.015
    )  # Kolmogorov-Smirnov, p about 1e-4
    others = [
        noise[0, 0, 1],
        gumbel(places, 2, 8, 3)[0, 0, 0],
        gumbel(places, 2, 7, 4)[0, 0, 0],
        noise[0, 0, 0].roll(1),
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([noise[0, 0, 0], other.double()]))[0, 1])) < 0.03


def test_keyformer_of_a_sequence_is_the_same_in_any_batch() -> None:
    """Longer rows beside it, and padding before its queries, change nothing."""
    score, together = Keyformer(recent=2), observation(width=20)
    alone = replace(
        together, queries=together.queries[1:, :, 5:], keys=together.keys[1:, :, :15], values=together.values[1:, :, :15],
        ages=together.ages[1:, :, :15],
    )  # fmt: skip
    torch.testing.assert_close(score(alone), score(together)[1:, :, :15])


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("gamma", [0.0, 200.0])
def test_cake_is_mean_and_variance_of_the_window(gamma: float, width: int) -> None:
    seen = observation()
    found = CakeIndicator(observe=width, kernel=3, gamma=gamma)(seen)
    plain = weights(seen)[..., -width:, :]
    for b in range(2):
        for h in range(2):
            count = int(seen.held[b, h].sum())
            raw = []
            for n in range(count - width):
                own = [plain[b, h, g, :, n].tolist() for g in range(2)]
                means = [sum(row) / width for row in own]
                spread = [
                    sum((w - mean) ** 2 for w in row) / (width - 1) if width > 1 else 0.0
                    for row, mean in zip(own, means, strict=True)
                ]
                raw.append((sum(means) + gamma * sum(spread)) / 2)
            padded = [0.0, *raw, 0.0]
            pooled = [sum(padded[n : n + 3]) / 3 for n in range(len(raw))]
            torch.testing.assert_close(found[b, h, : count - width], torch.tensor(pooled))
            assert bool(found[b, h, count - width : count].isposinf().all())
            assert bool(found[b, h, count:].isneginf().all())
    if not gamma:
        torch.testing.assert_close(found, SnapKV(observe=width, kernel=3)(seen))


def test_cakes_preference_is_entropy_times_variance() -> None:
    seen = observation()
    plain = weights(seen)
    for b, preferred in enumerate(Cake(6, entropy_temperature=2.0, variance_temperature=0.5).prefer(seen).tolist()):
        entropy, variance = 0.0, 0.0
        for h in range(2):
            for n in range(int(seen.held[b, h].sum()) - 6):
                for g in range(2):
                    row = plain[b, h, g, :, n].tolist()
                    mean = sum(row) / 6
                    entropy -= sum(w * math.log(w) for w in row) / 6 / 4
                    variance += sum((w - mean) ** 2 for w in row) / 6 / 4
        assert preferred == pytest.approx(entropy**0.5 * variance**2, rel=1e-3)


def test_streaming_keeps_sinks_and_the_newest() -> None:
    score = Streaming(sinks=3)(observation())
    kept = score[1, 1].argsort(descending=True)[:6].sort().values.tolist()
    assert kept == [0, 1, 2, 8, 9, 10]


def test_adaptive_heads_keep_the_best_of_all_and_a_share_each() -> None:
    score = torch.tensor([[[9.0, 8, 7, 6, 5], [1, 2, 3, 0, 0.5]]])
    counts = AdaptiveHeads(0.34).counts(score, torch.tensor([3]), 0)
    assert counts.tolist() == [[5, 1]]


def test_pyramid_averages_one() -> None:
    from runtime.kv_cache.budgets.base import LayerFacts

    facts = [LayerFacts.of(torch.zeros(1, 1, 100), torch.ones(1)) for _ in range(7)]
    shares = torch.cat(Pyramid(beta=20.0).shares(facts, 7, torch.full((1,), 50.0), 1))
    assert float(shares.mean()) == pytest.approx(1.0)
    assert float(shares[-1]) == pytest.approx(0.05)
    assert bool((shares[:-1] > shares[1:]).all())


def test_pyramid_gives_later_layers_what_the_first_cannot_use() -> None:
    from runtime.kv_cache.budgets.base import LayerFacts

    facts = [LayerFacts.of(torch.zeros(1, 1, 60), torch.ones(1)) for _ in range(5)]
    counts = 40 * torch.cat(Pyramid(beta=20.0).shares(facts, 5, torch.full((1,), 40.0), 1))
    assert counts.tolist() == pytest.approx([60, 50, 40, 30, 20])
    flat = torch.cat(Pyramid(beta=20.0).shares(facts, 5, torch.full((1,), 20.0), 17))
    assert flat.tolist() == pytest.approx([1.0] * 5)


# ---------------------------------------------------------------- places and steps
def test_layers_tell_scores_where_tokens_were_and_how_many_were_generated(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under evictions, beams and tokens that are taken back: a token's key is that of its place."""
    from runtime.kv_cache.layer import CompressedLayer

    made, ids, mask, _ = llama
    full = CompressedCache(made, None)
    with torch.no_grad():
        made(ids, attention_mask=mask, past_key_values=full)
    score = Keyformer(recent=4)
    cache = CompressedCache(made, CachePlan(plan(score, ratio=0.4, interval=3, heads=AdaptiveHeads())))
    seen: list[tuple[int, Observation]] = []
    own = CompressedLayer.observe

    def observe(self: Any, *args: Any) -> Observation:
        found = own(self, *args)
        if self.index == 0:  # later layers' keys differ once something was evicted
            seen.append((self.generated, found))
        return found

    monkeypatch.setattr(CompressedLayer, "observe", observe)
    order = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        made(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_select_indices(order)
        new = torch.randint(1, 257, (4, 8), generator=torch.Generator().manual_seed(4))
        longer = torch.cat([mask[order], torch.ones(4, 8, dtype=mask.dtype)], 1)
        texts = torch.cat([ids[order], new], 1)
        for step in range(4):
            made(new[:, step : step + 1], attention_mask=longer[:, : 71 + step], past_key_values=cache)
        cache.crop(-1)
        for step in range(3, 8):
            made(new[:, step : step + 1], attention_mask=longer[:, : 71 + step], past_key_values=cache)
        full = CompressedCache(made, None)
        made(texts, attention_mask=longer, past_key_values=full)
    assert [generated for generated, _ in seen] == [0, 3, 6]  # a token taken back is no step
    lengths = longer.sum(1)
    true = full.layers[0].store.states()[0].view(4, 2, 78, -1)
    for generated, found in seen[1:]:
        assert found.generated == generated
        for b in range(4):
            for h in range(2):
                held = found.held[b, h]
                places = found.positions[b, h, held]
                assert bool((places.diff() > 0).all())
                assert int(places[-1]) < int(lengths[b])
                torch.testing.assert_close(found.keys[b, h, held], true[b, h, places], atol=1e-4, rtol=1e-4)


def test_keyformer_keeps_the_same_of_a_text_in_any_batch(llama: Any) -> None:
    made, ids, mask, _ = llama

    def held(ids: torch.Tensor, mask: torch.Tensor) -> list[Any]:
        cache = CompressedCache(made, CachePlan(plan(Keyformer(recent=4), ratio=0.5, interval=2)))
        with torch.no_grad():
            made.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, past_key_values=cache)
        return [(layer.store.lengths.view(layer.shape)[0], layer.note("place")[0]) for layer in cache.layers]

    for (lengths, places), (own, alone) in zip(held(ids, mask), held(ids[:1, 30:], mask[:1, 30:]), strict=True):
        assert torch.equal(lengths, own)
        assert torch.equal(places[:, : alone.shape[1]], alone)


@pytest.mark.parametrize("share", [UniformLayers(), Pyramid(), Cake(4), DefensiveLayers()], ids=lambda s: s.name)
def test_a_prompt_shorter_than_the_budget_leaves_room_for_what_is_decoded(llama: Any, share: Any) -> None:
    """Shares of layers are found when a prompt has been read, which may be far shorter than what layers may keep later."""
    made, ids, _, _ = llama
    cache = CompressedCache(made, CachePlan(plan(tokens=30, interval=1, layers=share)))
    with torch.no_grad():
        made(ids[2:, :10], past_key_values=cache)
        for step in range(10, 70):
            made(ids[2:, step : step + 1], past_key_values=cache)
    kept = [int(layer.store.lengths.sum()) for layer in cache.layers]
    assert sum(kept) == pytest.approx(len(kept) * 2 * 30, abs=2 * len(kept)), kept
