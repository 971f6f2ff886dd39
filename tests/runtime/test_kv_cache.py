"""Compressed caches: pages against a list, attention against transformers, scores and budgets against their plain definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.kv_cache.budgets.adaptive import AdaptiveHeads
from runtime.kv_cache.budgets.cake import Cake
from runtime.kv_cache.budgets.pyramid import Pyramid
from runtime.kv_cache.budgets.uniform import EqualHeads, UniformLayers
from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.pages import PAGE, Pages, Part
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.scores.defensive import Defensive
from runtime.kv_cache.scores.h2o import H2O
from runtime.kv_cache.scores.keyformer import Keyformer
from runtime.kv_cache.scores.snapkv import SnapKV
from runtime.kv_cache.scores.streaming import Streaming
from runtime.kv_cache.scores.tova import Tova

SCORES = [SnapKV(8), H2O(8), Tova(), Keyformer(8), Defensive(8), Streaming()]


# ---------------------------------------------------------------- pages
@pytest.mark.parametrize("seed", range(4))
def test_pages_hold_what_lists_would(seed: int) -> None:
    """Appends of ragged lengths, evictions, rows that leave or are doubled, in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = 5
    store = Pages(rows, {"keys": Part(3, torch.float32), "values": Part(2, torch.float32)}, torch.device("cpu"))
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
    store = Pages(2, {"keys": Part(64, torch.float32)}, torch.device("cpu"))
    store.append({"keys": torch.randn(2, 1000, 64)}, torch.tensor([1000, 1000]))
    before = store.nbytes
    places = torch.arange(1000).expand(2, -1)
    store.keep(places, torch.tensor([1000, 10]))
    assert store.nbytes < 0.6 * before


# ---------------------------------------------------------------- attention
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=257, max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    return made


@pytest.fixture(scope="module")
def llama() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, padded prompts with their mask, and what plain transformers writes after them."""
    made = model()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 257, (3, 70), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    mask[1, :7] = 0
    with torch.no_grad():
        written = made.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    prepare(made)
    return made, ids, mask, written


def plan(score: Any = None, **options: Any) -> EvictionPlan:
    settings: dict[str, Any] = {"layer_share": UniformLayers(), "head_share": EqualHeads(), **options}
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


@pytest.mark.parametrize("share", [UniformLayers(), Pyramid(), Cake(8)], ids=lambda s: s.name)
@pytest.mark.parametrize("heads", [EqualHeads(), AdaptiveHeads()], ids=lambda s: s.name)
@pytest.mark.parametrize("score", SCORES, ids=lambda s: s.name)
def test_the_budget_is_kept_and_memory_is_freed(llama: Any, score: Any, heads: Any, share: Any) -> None:
    made, ids, mask, _ = llama
    cache = CompressedCache(made, CachePlan(plan(score, ratio=0.4, layer_share=share, head_share=heads)))
    with torch.no_grad():
        logits = made(ids, attention_mask=mask, past_key_values=cache).logits
    assert bool(logits.isfinite().all())
    held = sum(int(layer.store.lengths.sum()) for layer in cache.layers)
    # Least counts of a head may lift small layers; never more than a tenth above the budget here.
    assert held <= 0.44 * int(mask.sum()) * 2 * 3 + 3 * 3 * 2 * (score.kept() + 1)
    assert cache.layers[0].get_seq_length() == 70


def test_a_plan_needs_the_attention_that_reads_it() -> None:
    with pytest.raises(ValueError, match=r"call runtime\.kv_cache\.prepare\(model\) first|reads no compressed cache"):
        CompressedCache(model(), None)


# ---------------------------------------------------------------- scores
def observation(width: int = 6, count: int = 20) -> Observation:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([[count, count], [count - 5, count - 9]])
    ages = lengths[..., None] - 1 - torch.arange(count)
    shape = (2, 2, count, 8)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return Observation(torch.randn(2, 4, width, 8, generator=generator), keys, values, ages, 8**-0.5)


def weights(seen: Observation) -> torch.Tensor:
    """`[batch, kv_heads, groups, w, n]`, query by query and key by key."""
    batch, heads, width, _ = seen.queries.shape
    count = seen.keys.shape[2]
    result = torch.zeros(batch, heads, width, count)
    for b in range(batch):
        for h in range(heads):
            for i in range(width):
                ages = seen.ages[b, h // seen.groups]
                allowed = (ages >= width - 1 - i).nonzero().flatten()
                scores = seen.keys[b, h // seen.groups, allowed] @ seen.queries[b, h, i] * seen.scale
                result[b, h, i, allowed] = scores.softmax(0)
    return result.view(batch, heads // seen.groups, seen.groups, width, count)


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

    facts = [LayerFacts(torch.zeros(1, 1, 100), torch.ones(1)) for _ in range(7)]
    shares = torch.cat(Pyramid(beta=20.0).shares(facts, 7, torch.full((1,), 50.0), 1))
    assert float(shares.mean()) == pytest.approx(1.0)
    assert float(shares[-1]) == pytest.approx(0.05)
    assert bool((shares[:-1] > shares[1:]).all())


def test_pyramid_gives_later_layers_what_the_first_cannot_use() -> None:
    from runtime.kv_cache.budgets.base import LayerFacts

    facts = [LayerFacts(torch.zeros(1, 1, 60), torch.ones(1)) for _ in range(5)]
    counts = 40 * torch.cat(Pyramid(beta=20.0).shares(facts, 5, torch.full((1,), 40.0), 1))
    assert counts.tolist() == pytest.approx([60, 50, 40, 30, 20])
    flat = torch.cat(Pyramid(beta=20.0).shares(facts, 5, torch.full((1,), 20.0), 17))
    assert flat.tolist() == pytest.approx([1.0] * 5)
