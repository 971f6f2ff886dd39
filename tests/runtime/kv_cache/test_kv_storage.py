"""How older tokens are held: codecs against their definitions, stores against a list, storages in a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import padded_rows, random_llama

from runtime.kv_cache.budgets.adaptive import AdaptiveHeads
from runtime.kv_cache.budgets.base import EqualHeads, UniformLayers
from runtime.kv_cache.budgets.cake import Cake
from runtime.kv_cache.budgets.defensive import DefensiveLayers
from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.clusters import Clusters
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.offload import DiskOffload, HostOffload, OffloadPlan
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.region import Chosen, Queries, Region, merge, region_attention
from runtime.kv_cache.scores.duo import Duo
from runtime.kv_cache.scores.h2o import H2O
from runtime.kv_cache.scores.snapkv import SnapKV
from runtime.kv_cache.scores.streaming import Streaming
from runtime.kv_cache.scores.zipcache import Normalized
from runtime.kv_cache.selection.double_sparsity import DoubleSparsity
from runtime.kv_cache.selection.quest import Quest
from runtime.kv_cache.selection.recycled_attention import RecycledAttention
from runtime.kv_cache.storage.base import Codec, pack_codes, unpack_codes
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain
from runtime.kv_cache.storage.plan import StoragePlan, Tier
from runtime.kv_cache.token_store import TokenStore

CPU = torch.device("cpu")
INTEGERS = [Integer(bits, "channel") for bits in (2, 4, 8)] + [Integer(4, "token", 32), Integer(8, "token")]
CODECS: list[Codec] = [Plain(), Float8(), Bitmap(0.5), Bitmap(0.7), *INTEGERS]
KIVI = Tier(Integer(4, "channel"), Integer(4, "token", 32))
INT2 = Tier(Integer(2, "channel"), Integer(2, "token", 16))


def label(value: Any) -> str:
    return getattr(value, "name", None) or str(value)


# ---------------------------------------------------------------- codecs
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 140), st.integers(0, 2**32 - 1))
def test_codes_come_back(bits: int, size: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 2, size), generator=torch.Generator().manual_seed(seed))
    packed = pack_codes(codes, bits)
    assert packed.shape[-1] == -(-size // 32) * 4 * bits
    assert torch.equal(unpack_codes(packed, bits, size).long(), codes)


def test_a_block_of_codes_lies_as_kernels_read_it() -> None:
    codes = torch.arange(32) % 16
    packed = pack_codes(codes, 4)
    assert [int(byte) & 15 for byte in packed] == codes[:16].tolist()
    assert [int(byte) >> 4 for byte in packed] == codes[16:].tolist()


@pytest.mark.parametrize("codec", INTEGERS, ids=label)
@pytest.mark.parametrize("size", [8, 64, 80, 100])
def test_an_integer_is_within_half_a_step_of_the_float_where_nothing_is_clipped(codec: Integer, size: int) -> None:
    states = torch.rand(5, PAGE, size, generator=torch.Generator().manual_seed(size)) * 8 - 3
    found = codec.decode(codec.encode(states).parts, size, torch.float32)
    axis = 1 if codec.axis == "channel" else 2
    span = float((states.amax(axis) - states.amin(axis)).max())
    # Ranges may be cut (by 40 % at most, half on each side) where that makes the squared error smaller.
    assert float((found - states).abs().max()) <= span * (0.5 / (2**codec.bits - 1) + 0.2) + 1e-2
    whole = span / (2**codec.bits - 1) / 12**0.5
    assert float((found - states).square().mean().sqrt()) <= 1.05 * whole + 1e-3


@pytest.mark.parametrize("codec", INTEGERS, ids=label)
def test_constant_channels_and_tokens_are_exact(codec: Integer) -> None:
    states = torch.full((2, PAGE, 64), 3.25)
    assert torch.equal(codec.decode(codec.encode(states).parts, 64, torch.float32), states)


def test_keys_by_channel_survive_an_outlier_channel_and_by_token_do_not() -> None:
    states = torch.randn(4, PAGE, 64, generator=torch.Generator().manual_seed(3))
    states[..., 5] = 50 + states[..., 5]
    errors = []
    for codec in (Integer(4, "channel"), Integer(4, "token")):
        found = codec.decode(codec.encode(states).parts, 64, torch.float32)
        errors.append(float((found - states).square().mean().sqrt()))
    assert errors[0] < 0.12
    assert errors[1] > 5 * errors[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_what_the_scales_cannot_hold_is_said(bad: float) -> None:
    states = torch.zeros(1, PAGE, 8)
    states[0, 3, 2] = bad
    with pytest.raises(ValueError, match="65504"):
        Integer(4, "channel").encode(states)


def test_float8_is_e4m3_with_a_scale_a_token() -> None:
    states = torch.randn(2, PAGE, 64, generator=torch.Generator().manual_seed(0)) * 1000
    found = Float8().decode(Float8().encode(states).parts, 64, torch.float32)
    assert bool(((found - states).abs() <= states.abs() / 16 + states.abs().amax(-1, keepdim=True) / 2**15).all())


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.75])
def test_a_bitmap_keeps_the_largest_channels_exactly(sparsity: float) -> None:
    states = torch.randn(3, PAGE, 52, generator=torch.Generator().manual_seed(1))
    codec = Bitmap(sparsity)
    found = codec.decode(codec.encode(states).parts, 52, torch.float32)
    kept = found != 0
    assert bool((kept.sum(-1) == codec.kept(52)).all())
    assert torch.equal(found[kept], states[kept])
    smallest_kept = states.abs().masked_fill(~kept, float("inf")).amin(-1)
    assert bool((smallest_kept >= states.abs().masked_fill(kept, 0).amax(-1)).all())


# ---------------------------------------------------------------- attention over regions
def test_regions_together_are_attention_over_all() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(3, 96, 16, generator=generator), torch.randn(3, 96, 8, generator=generator)
    counts = torch.tensor([96, 40, 0])
    query = torch.randn(3, 5, 16, generator=generator)
    whole = Region(3, (16, 8), torch.float32, CPU)
    whole.append(whole.encoded(keys, values), counts)
    parts = [Region(3, (16, 8), torch.float32, CPU) for _ in range(3)]
    for region, (start, end) in zip(parts, [(0, 32), (32, 37), (37, 96)], strict=True):
        region.append(region.encoded(keys[:, start:end], values[:, start:end]), (counts - start).clamp(0, end - start))
    expected, _ = region_attention(Queries(query, 0.3), whole)
    torch.testing.assert_close(merge([region_attention(Queries(query, 0.3), part) for part in parts]), expected)
    assert not expected[2].any()
    plain = ((query[1] @ keys[1, :40].T) * 0.3).softmax(-1) @ values[1, :40]
    torch.testing.assert_close(expected[1], plain)


# ---------------------------------------------------------------- stores
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_holds_every_token_once_and_the_newest_as_they_are(prefix: int, tiers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = [Tier(Plain(), Plain(), 1 / tiers)] * tiers  # floats, so that tokens can be told apart
    plan = StoragePlan(tuple(plain), recent=40, prefix=prefix, saliency=H2O())
    store = TokenStore(3, (4, 4), torch.float32, CPU, plan)
    truth: list[list[torch.Tensor]] = [[], [], []]

    def saliency() -> torch.Tensor:
        return torch.rand(3, store.tail.longest, generator=generator)

    for _ in range(12):
        counts = torch.randint(0, 90, (3,), generator=generator)
        new = torch.randn(3, 90, 4, generator=generator)
        store.tail.append(store.tail.encoded(new, new), counts)
        for row, count in enumerate(counts.tolist()):
            truth[row] += list(new[row, :count])
        store.settle(saliency)
        assert store.tail.longest < 40 + plan.chunk + prefix
        keys, values, used, _ = store.states()
        assert torch.equal(keys, values)
        for row, tokens in enumerate(truth):
            found = keys[row, used[row]]
            assert len(found) == len(tokens)
            if not tokens:
                continue
            expected = torch.stack(tokens)
            newest = min(40, len(tokens))
            assert torch.equal(found[-newest:], expected[-newest:])
            assert torch.equal(found[:prefix], expected[:prefix])
            if tiers == 1:
                assert torch.equal(found, expected)
            else:
                assert torch.equal(found.sort(0).values, expected.sort(0).values)


def test_the_best_go_to_the_first_tier() -> None:
    plan = StoragePlan((Tier(Plain(), Plain(), 0.25), Tier(Plain(), Plain(), 0.75)), recent=32, saliency=H2O())
    store = TokenStore(1, (1, 1), torch.float32, CPU, plan)
    tokens = torch.randperm(32 + 256, generator=torch.Generator().manual_seed(0)).float()
    store.tail.append(store.tail.encoded(*tokens.view(1, -1, 1).expand(2, 1, -1, 1)), torch.tensor([len(tokens)]))
    store.settle(lambda: tokens.view(1, -1))
    best = store.tiers[0].states()[0].flatten().sort().values
    assert torch.equal(best, tokens[:256].sort().values[-64:])


def test_memory_is_what_the_codecs_say() -> None:
    store = TokenStore(4, (64, 64), torch.bfloat16, CPU, StoragePlan((KIVI,), recent=32))
    states = torch.randn(4, 32 + 1024, 64, dtype=torch.bfloat16)
    store.tail.append(store.tail.encoded(states, states), torch.full((4,), 32 + 1024))
    store.settle(lambda: states)
    full = 2 * states.numel() * 2
    # 4 bits and 16 + 16 bits of grid for 32 numbers, of 16.
    assert store.nbytes < 0.36 * full
    assert store.tiers[0].nbytes > 0.25 * full


# ---------------------------------------------------------------- clusters
def test_equal_keys_are_merged_without_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    clusters = Clusters(0.25, 128)
    base = torch.randn(1, 2, 16, generator=generator)
    values = torch.randn(1, 128, 8, generator=generator)
    query = torch.randn(1, 3, 16, generator=generator)
    two = torch.cat([base[:, :1].expand(-1, 64, -1), base[:, 1:2].expand(-1, 64, -1)], 1)
    merged_keys, merged_values, counts = clusters(two, values)
    assert counts.sum() == 128
    exact = (query @ two.transpose(1, 2)).softmax(-1) @ values
    found = (query @ merged_keys.transpose(1, 2) + counts.log()[:, None]).softmax(-1) @ merged_values
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("ratio", "chunk"), [(0.3, 128), (0.5, 100), (1.0, 128), (0.0, 128)])
def test_clusters_that_leave_no_whole_pages_are_refused(ratio: float, chunk: int) -> None:
    with pytest.raises(ValueError, match=r"clusters\."):
        Clusters(ratio, chunk)


# ---------------------------------------------------------------- in a model
@pytest.fixture(scope="module")
def llama() -> tuple[Any, torch.Tensor, torch.Tensor]:
    made = random_llama(wide=False, num_hidden_layers=3, max_position_embeddings=512, pad_token_id=0)
    prepare(made)
    return made, *padded_rows(200, (90, 7, 0))


def run(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, plan: CachePlan, steps: int = 60
) -> tuple[torch.Tensor, CompressedCache]:
    """Logits of a prompt's last position and of `steps` given tokens after it, one by one."""
    cache = CompressedCache(model, plan)
    following = torch.randint(1, 257, (len(ids), steps), generator=torch.Generator().manual_seed(2))
    logits = []
    with torch.no_grad():
        logits.append(model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1])
        for step in range(steps):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits.append(
                model(following[:, step : step + 1], attention_mask=mask, past_key_values=cache).logits[:, -1]
            )
    return torch.stack(logits, 1), cache


STORAGES = {
    "plain pages": (StoragePlan((Tier(Plain(), Plain()),), recent=16), 1e-4),
    "prefix": (StoragePlan(prefix=4), 1e-4),
    "fp8": (StoragePlan((Tier(Float8(), Float8()),), recent=16), 0.05),
    "int8": (StoragePlan((Tier(Integer(8, "channel"), Integer(8, "token", 32)),), recent=16), 0.02),
    "kivi 4": (StoragePlan((KIVI,), recent=16, prefix=4), 0.2),
    "zipcache": (StoragePlan((replace(KIVI, share=0.4), replace(INT2, share=0.6)), 32, saliency=Normalized(16)), 0.6),
    "mikv": (StoragePlan((Tier(Plain(), Plain(), 0.5), replace(INT2, share=0.5)), 32, saliency=SnapKV(16)), 0.6),
    "mustafar": (StoragePlan((Tier(Bitmap(0.5), Bitmap(0.5)),), recent=32), 0.7),
    "clusters": (StoragePlan((KIVI,), recent=32, clusters=Clusters(0.75, 128)), 0.8),
}  # fmt: skip


@pytest.mark.parametrize("name", STORAGES)
def test_a_storage_changes_logits_no_more_than_its_bits_allow(llama: Any, name: str) -> None:
    model, ids, mask = llama
    storage, bound = STORAGES[name]
    expected, _ = run(model, ids, mask, CachePlan())
    found, cache = run(model, ids, mask, CachePlan(storage=storage))
    error = float((found - expected).norm() / expected.norm())
    assert error < bound
    # ... and something was stored, in all rows.
    older = cache.layers[0].store.regions[:-1]
    assert older
    assert int(torch.stack([region.lengths for region in older]).sum(0).min()) > 0


def test_nothing_is_lost_by_disk(llama: Any, tmp_path: Path) -> None:
    model, ids, mask = llama
    expected, near = run(model, ids, mask, CachePlan(storage=StoragePlan((KIVI,), recent=16)))
    plan = CachePlan(storage=StoragePlan((KIVI,), recent=16), offload=OffloadPlan("disk", str(tmp_path)))
    found, cache = run(model, ids, mask, plan)
    assert torch.equal(found, expected)
    assert not list(tmp_path.iterdir())
    # What is on disk does not count as memory.
    assert cache.offloaded_bytes > 0
    assert cache.nbytes == near.nbytes - cache.offloaded_bytes


def test_eviction_storage_and_disk_together_lose_nothing_more(llama: Any, tmp_path: Path) -> None:
    """DuoAttention, whose streaming heads evict while decoding, in 4 bits, on a disk."""
    model, ids, mask = llama
    plan = CachePlan(EVICTIONS["duo"], StoragePlan((KIVI,), recent=8, prefix=4))
    expected, near = run(model, ids, mask, plan)
    found, cache = run(model, ids, mask, replace(plan, offload=OffloadPlan("disk", str(tmp_path))))
    assert torch.equal(found, expected)
    assert not list(tmp_path.iterdir())
    assert cache.offloaded_bytes > 0
    assert cache.nbytes == near.nbytes - cache.offloaded_bytes
    lengths = cache.layers[0].store.lengths.view(3, 2)
    assert lengths[:, 1].tolist() == (mask.sum(1) + 60).tolist()
    assert int(lengths[:, 0].max()) < 4 + 32 + 16 + PAGE


def test_a_directory_that_cannot_be_written_is_said(llama: Any, tmp_path: Path) -> None:
    model, _, _ = llama
    plan = CachePlan(offload=OffloadPlan("disk", str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match=r"offload: .*nothing"):
        CompressedCache(model, plan)


EVICTIONS = {
    "snapkv + int4": EvictionPlan(SnapKV(16), UniformLayers(), EqualHeads(), ratio=0.5),
    "adaptive cake + int4": EvictionPlan(SnapKV(16), Cake(16), AdaptiveHeads(), ratio=0.5),
    "layer defensive + int4": EvictionPlan(SnapKV(16), DefensiveLayers(), AdaptiveHeads(), ratio=0.5),
    "h2o every 8 steps + int4": EvictionPlan(H2O(16), UniformLayers(), EqualHeads(), tokens=80, interval=8),
    "streaming every step": EvictionPlan(Streaming(), UniformLayers(), EqualHeads(), tokens=40, interval=1),
    "duo": EvictionPlan(Duo(((0.0, 1.0), (0.2, 0.9), (0.8, 0.1)), 0.5, 4, 32), UniformLayers(), EqualHeads(), ratio=1.0, interval=16),
}  # fmt: skip


@pytest.mark.parametrize("name", EVICTIONS)
def test_eviction_and_storage_compose(llama: Any, name: str) -> None:
    model, ids, mask = llama
    storage = StoragePlan((KIVI,), recent=32, prefix=4) if "int4" in name else StoragePlan()
    logits, cache = run(model, ids, mask, CachePlan(EVICTIONS[name], storage))
    assert bool(logits.isfinite().all())
    lengths = torch.stack([layer.store.lengths.view(3, 2) for layer in cache.layers])
    arrived = mask.sum(1) + 60
    assert cache.get_seq_length() == 260
    if name == "duo":
        assert lengths[0, :, 1].tolist() == arrived.tolist()
        assert lengths[1, :, 1].tolist() == arrived.tolist()
        assert lengths[2, :, 0].tolist() == arrived.tolist()
        assert int(lengths[0, :, 0].max()) < 4 + 32 + 16
    elif "every" in name:
        budget = 80 if "h2o" in name else 40
        assert int(lengths.max()) < budget + 8
    else:
        assert float(lengths.float().mean()) < 0.62 * float(arrived.float().mean()) + 30
    if "int4" in name:
        assert cache.layers[1].store.tiers[0].longest > 0


def test_heavy_hitters_by_sums_are_those_by_all_queries() -> None:
    """What is gathered in pieces, eviction by eviction, is what one look at all queries gives while nothing was evicted."""
    model = tiny(1)
    ids = torch.randint(0, 99, (2, 50), generator=torch.Generator().manual_seed(0))
    sums = []
    for pieces in ([50], [30, *[1] * 20]):
        cache = CompressedCache(
            model, CachePlan(EvictionPlan(H2O(4), UniformLayers(), EqualHeads(), ratio=1.0, interval=1))
        )
        with torch.no_grad():
            for piece in ids.split(pieces, 1):
                model(piece, past_key_values=cache)
        sums.append(cache.layers[0].note("mass"))
    torch.testing.assert_close(*sums)


def test_tokens_can_be_taken_back_until_they_are_stored(llama: Any) -> None:
    model, ids, mask = llama
    plan = CachePlan(storage=StoragePlan((KIVI,), recent=24))
    caches: list[Any] = [CompressedCache(model, plan), CompressedCache(model, plan)]
    cache, clean = caches
    with torch.no_grad():
        for target in (cache, clean):
            model(ids, attention_mask=mask, past_key_values=target)
        more = mask.new_ones(3, 5)
        model(torch.full((3, 5), 7), attention_mask=torch.cat([mask, more], 1), past_key_values=cache)
        cache.crop(-5)
        following = torch.full((3, 1), 9)
        grown = torch.cat([mask, mask.new_ones(3, 1)], 1)
        found = model(following, attention_mask=grown, past_key_values=cache).logits
        expected = model(following, attention_mask=grown, past_key_values=clean).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="taken back"):
        cache.layers[0].crop(-100)


def test_tokens_of_a_prefix_are_not_taken_back(llama: Any) -> None:
    model, ids, _ = llama
    cache: Any = CompressedCache(model, CachePlan(storage=StoragePlan(prefix=16)))
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        with pytest.raises(ValueError, match="taken back"):
            cache.crop(-1)
        model(ids[:, 10:30], past_key_values=cache)
        cache.crop(-3)
    assert cache.layers[0].store.lengths.tolist() == [27] * 6


@pytest.mark.parametrize("name", ["clusters", "zipcache"])
def test_later_pieces_of_a_text_do_not_evict_what_cannot_be_told_apart(llama: Any, name: str) -> None:
    """Centroids keep the weight of the tokens that they stand for, and tiers their tokens."""
    model, ids, _ = llama
    eviction = EvictionPlan(SnapKV(16), UniformLayers(), EqualHeads(), ratio=0.9)
    cache: Any = CompressedCache(model, CachePlan(eviction, STORAGES[name][0]))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        first = cache.layers[0].store
        lengths, tokens = first.lengths.clone(), [tier.pools["keys.codes"].clone() for tier in first.tiers]
        model(ids[:, :20], past_key_values=cache)
    assert torch.equal(first.lengths, lengths + 20)
    for before, tier in zip(tokens, first.tiers, strict=True):
        assert torch.equal(tier.pools["keys.codes"][: len(before)], before)


def test_floats_may_be_held_in_fewer_bits(llama: Any) -> None:
    model, ids, mask = llama
    expected, plain = run(model, ids, mask, CachePlan(), 8)
    found, half = run(model, ids, mask, CachePlan(storage=StoragePlan(floats=torch.bfloat16)), 8)
    assert half.nbytes < 0.52 * plain.nbytes
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.02


def test_what_is_intact_is_what_was_kept() -> None:
    """Sinks and a few recent tokens stay; of those only the recent ones can be taken back, and all of them."""
    made = tiny(1)
    ids = torch.randint(0, 99, (2, 60), generator=torch.Generator().manual_seed(0))
    for tokens, newest in ((5, 1), (40, 36)):
        plan = EvictionPlan(Streaming(4), UniformLayers(), EqualHeads(), tokens=tokens, interval=1)
        cache: Any = CompressedCache(made, CachePlan(plan))
        with torch.no_grad():
            made(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=f"only the newest {newest} are"):
            cache.crop(-newest - 1)
        cache.crop(-newest)
        assert cache.layers[0].store.lengths.tolist() == [4] * 4


def test_a_budget_in_whole_pages_never_costs_the_window() -> None:
    made = tiny(2)
    ids = torch.randint(0, 99, (1, 400), generator=torch.Generator().manual_seed(0))
    plan = EvictionPlan(SnapKV(observe=200), UniformLayers(), EqualHeads(), tokens=201)
    cache: Any = CompressedCache(made, CachePlan(plan, StoragePlan((Tier(Plain(), Plain()),), recent=128)))
    plain: Any = CompressedCache(made, CachePlan())
    with torch.no_grad():
        made(ids, past_key_values=cache)
        made(ids, past_key_values=plain)
    for layer, whole in zip(cache.layers, plain.layers, strict=True):
        keys, _, used, _ = layer.store.states()
        every, *_ = whole.store.states()
        for row in range(2):
            assert torch.equal(keys[row, used[row]][-200:], every[row, -200:])


@pytest.mark.parametrize("share", [Cake(8), DefensiveLayers()], ids=lambda s: s.name)
def test_a_second_piece_leaves_no_layer_waiting(share: Any) -> None:
    """Layers of small shares store nothing of the first piece; they must go on storing all the same."""
    made = tiny(6)
    ids = torch.randint(0, 99, (1, 400), generator=torch.Generator().manual_seed(0))
    plan = EvictionPlan(SnapKV(8), share, EqualHeads(), ratio=0.5)
    cache: Any = CompressedCache(made, CachePlan(plan, STORAGES["mikv"][0]))
    with torch.no_grad():
        for piece in (ids[:, :300], ids[:, 300:], *ids[:, :150].split(1, 1)):
            made(piece, past_key_values=cache)
    assert max(layer.store.tail.longest for layer in cache.layers) < 32 + 128


def test_padding_on_the_right_is_refused(llama: Any) -> None:
    model, ids, mask = llama
    with pytest.raises(ValueError, match="padding_side"), torch.no_grad():
        model(ids, attention_mask=mask.flip(1), past_key_values=CompressedCache(model))


def test_a_model_that_loses_the_mark_is_noticed(llama: Any) -> None:
    model, _, _ = llama
    cache: Any = CompressedCache(model)
    states = torch.randn(1, 2, 3, 16)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match="cache"):
        cache.update(states, states, 0)


@pytest.mark.parametrize("event", ["none", "rows", "repeat", "piece"])
def test_what_was_fetched_from_the_host_before_a_change_is_fetched_again(llama: Any, event: str) -> None:
    """The host's side of offloading without a GPU: copies are made early, and must not outlive what they are of."""
    model, ids, _ = llama
    outputs = []
    for offload in (None, _Copies()):
        cache: Any = CompressedCache(model, CachePlan(storage=StoragePlan((KIVI,), recent=16), offload=offload))
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
            if event == "rows":
                cache.batch_select_indices(torch.tensor([2, 0]))
            elif event == "repeat":
                cache.batch_repeat_interleave(2)
            elif event == "piece":
                model(ids[:, :50], past_key_values=cache)
            rows = cache.layers[0].shape[0]
            outputs.append([model(ids[:1, i : i + 1].expand(rows, 1), past_key_values=cache).logits for i in range(3)])
    torch.testing.assert_close(*outputs)


SELECTIONS = [
    Quest(tokens=64, skip_layers=1, recent=8),
    DoubleSparsity(tokens=12, channels=(((0, 3, 5, 9),) * 2,) * 3, skip_layers=1, recent=8),
    RecycledAttention(tokens=12, stride=4, recent=8),
]


@pytest.mark.parametrize("options", SELECTIONS, ids=label)
@pytest.mark.parametrize("floats", [False, True])
def test_of_what_the_host_holds_only_chosen_pages_are_fetched(llama: Any, options: Any, floats: bool) -> None:
    model, ids, mask = llama
    copies = _Copies()
    tier = Tier(Plain(), Plain()) if floats else KIVI
    plan = CachePlan(storage=StoragePlan((tier,), recent=16), selection=options)
    expected, _ = run(model, ids, mask, plan, steps=12)
    found, _ = run(model, ids, mask, replace(plan, offload=copies), steps=12)
    torch.testing.assert_close(found, expected)
    few = 0
    for some, pages, held in copies.steps:
        if some is None:
            assert pages == held
            continue
        unit = PAGE // some.unit
        rows = zip(some.index.tolist(), some.counts.tolist(), strict=True)
        wanted = max(1, sum(len({column // unit for column in row[:count]}) for row, count in rows))
        assert wanted < held
        assert pages in (wanted, held)
        few += pages == wanted
    # Of 12 steps of 3 layers. In advance a layer is fetched if it read everything in the step before, or has had none: layer 0, which
    # reads everything (the last time for nothing), and the others once; or (recycled) each of them twice every fourth step.
    assert (few, copies.fetched) == ((18, 18) if options.name == "recycled" else (22, 15))


@pytest.mark.parametrize("options", SELECTIONS, ids=label)
def test_of_what_a_disk_holds_nothing_is_read_ahead_of_a_choice(
    llama: Any, tmp_path: Path, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, mask = llama
    fetched: list[Region] = []
    monkeypatch.setattr(DiskOffload, "fetch", lambda self, regions: fetched.extend(regions))
    plan = CachePlan(storage=StoragePlan((KIVI,), recent=16), selection=options)
    expected, _ = run(model, ids, mask, plan, steps=12)
    found, cache = run(model, ids, mask, replace(plan, offload=OffloadPlan("disk", str(tmp_path))), steps=12)
    assert torch.equal(found, expected)
    of_layers = [sum(region is layer.store.tiers[0] for region in fetched) for layer in cache.layers]
    # The first step does not know yet; then layer 0 alone reads everything, or (recycled) each layer every fourth time.
    assert of_layers == ([3, 4, 4] if options.name == "recycled" else [12, 1, 1])


class _Copies:
    """HostOffload with clones for copies to a GPU.

    Attributes:
        steps: of each layer's turn what was chosen of its tier, how many pages were near then, and how many it holds.
        fetched: how often a whole tier was copied.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Chosen | None, int, int]] = []
        self.fetched = 0

    def begin(self, device: torch.device) -> Any:
        copies = self

        class Stream:
            def wait_stream(self, other: Any) -> None: ...
            def wait_event(self, other: Any) -> None: ...

        class Offload(HostOffload):
            def __init__(self) -> None:
                self.device, self._stream, self._copies = device, Stream(), {}  # type: ignore[assignment]

            def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype)

            def fetched(self, regions: list[Region], chosen: list[Chosen | None]) -> list[Region]:
                result = super().fetched(regions, chosen)
                for some, region, far in zip(chosen, result, regions, strict=True):
                    copies.steps.append((some, region.pages, far.pages))
                return result

            def _copied(self, pools: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
                copies.fetched += 1
                return {name: pool.clone() for name, pool in pools.items()}, None

            def _current(self) -> Any:
                return Stream()

        return Offload()


def tiny(layers: int) -> Any:
    made = random_llama(
        hidden_size=32, intermediate_size=32, num_hidden_layers=layers, vocab_size=99, max_position_embeddings=1024
    )
    prepare(made)
    return made


@pytest.mark.parametrize("beams", [3])
def test_beam_search_is_as_with_transformers_own_cache(llama: Any, beams: int) -> None:
    model, ids, mask = llama
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "attention_mask": mask}
    with torch.no_grad():
        expected = model.generate(ids, **options)
        found = model.generate(
            ids, past_key_values=CompressedCache(model, CachePlan(storage=StoragePlan(prefix=4))), **options
        )
    assert torch.equal(found, expected)


BEAMS = {
    "int4": CachePlan(storage=StoragePlan((KIVI,), recent=8)),
    "h2o every 4 steps": CachePlan(EvictionPlan(H2O(8), UniformLayers(), EqualHeads(), tokens=60, interval=4)),
    "h2o every 8 steps in int4": CachePlan(
        EvictionPlan(H2O(8), UniformLayers(), EqualHeads(), tokens=80, interval=8), StoragePlan((KIVI,), recent=8)
    ),
}


@pytest.mark.parametrize("name", BEAMS)
def test_reordered_rows_are_those_that_were_there(llama: Any, name: str) -> None:
    """Codes, grids, sums of attention and queries go with their rows, and rows that are doubled go their own ways."""
    model, ids, mask = llama
    caches: list[Any] = [CompressedCache(model, BEAMS[name]) for _ in range(2)]
    orders = [torch.tensor(order) for order in ([2, 0, 0], [0, 2, 1], [1, 1, 2])]
    total = orders[0][orders[1]][orders[2]]
    tokens = torch.randint(1, 257, (3, 40), generator=torch.Generator().manual_seed(5))
    cache, straight = caches
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        for order in orders:
            before = [layer.store.states() for layer in cache.layers]
            cache.reorder_cache(order)
            picked = (order[:, None] * 2 + torch.arange(2)).flatten()
            for layer, states in zip(cache.layers, before, strict=True):
                for one, other in zip(layer.store.states()[:3], states[:3], strict=True):
                    assert torch.equal(one, other[picked][:, : one.shape[1]])
        model(ids[total], attention_mask=mask[total], past_key_values=straight)
        for step in range(40):
            new = tokens[:, step : step + 1]
            grown = torch.cat([mask[total], mask.new_ones(3, step + 1)], 1)
            found, expected = (model(new, attention_mask=grown, past_key_values=one).logits for one in caches)
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", BEAMS)
def test_a_beam_is_as_likely_as_its_text_alone(llama: Any, name: str) -> None:
    model, ids, _ = llama
    prompt = ids[2:]
    options = {"max_new_tokens": 40, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    with torch.no_grad():
        found = model.generate(
            prompt, past_key_values=CompressedCache(model, BEAMS[name]), return_dict_in_generate=True,
            output_scores=True, **options,
        )  # fmt: skip
        for text, score in zip(found.sequences, found.sequences_scores.tolist(), strict=True):
            cache: Any = CompressedCache(model, BEAMS[name])
            logits, likelihood = model(prompt, past_key_values=cache).logits[0, -1], 0.0
            for token in text[prompt.shape[1] :]:
                likelihood += float(logits.log_softmax(-1)[token])
                logits = model(token.view(1, 1), past_key_values=cache).logits[0, -1]
            assert likelihood / 40 == pytest.approx(score, abs=1e-3)
    assert len({tuple(text.tolist()) for text in found.sequences}) == 3


def test_a_speculative_draft_is_as_with_transformers_own_cache(llama: Any) -> None:
    model, ids, _ = llama
    options = {"max_new_tokens": 30, "do_sample": False, "prompt_lookup_num_tokens": 4}
    prompt = ids[:1, :60].repeat(1, 2)
    with torch.no_grad():
        expected = model.generate(prompt, **options)
        cache = CompressedCache(model, CachePlan(storage=StoragePlan((Tier(Plain(), Plain()),), recent=32)))
        found = model.generate(prompt, past_key_values=cache, **options)
    assert torch.equal(found, expected)
