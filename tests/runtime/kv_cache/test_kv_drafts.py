"""Tokens that are taken back: drafts leave no trace, whatever a cache evicts, stores or reads; and short pieces with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_models import padded_rows, random_llama

from runtime.kv_cache.budgets.base import EqualHeads, UniformLayers
from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.scores.snapkv import SnapKV
from runtime.kv_cache.scores.tova import Tova
from runtime.kv_cache.selection.double_sparsity import DoubleSparsity
from runtime.kv_cache.selection.quest import Quest
from runtime.kv_cache.selection.recycled_attention import RecycledAttention
from runtime.kv_cache.selection.tidal import Tidal
from runtime.kv_cache.selection.token_select import TokenSelect
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plan import StoragePlan, Tier

INT4 = Tier(Integer(4, "channel"), Integer(4, "token", 32))
#: With these only a part of the cache is left while drafts are verified, or few bits of it.
POLICIES: dict[str, Any] = {
    "tova": "tova",
    "h2o": "h2o",
    "snapkv every 8": {"evict": {"score": "snapkv", "observe": 8, "ratio": 0.5, "interval": 8}},
    "adaptive cake": {"evict": {"score": "snapkv", "observe": 8, "ratio": 0.5, "layers": "cake", "heads": "adaptive"}},
    **{f"int4, {recent} recent": {"keys": "int4", "values": "int4", "recent": recent} for recent in range(0, 9, 4)},
    "kivi": {"method": "kivi", "recent": 16},
    "zipcache": {"method": "zipcache", "recent": 16},
    "snapkv every 8 in int4": {
        "evict": {"score": "snapkv", "observe": 8, "ratio": 0.5, "interval": 8}, "keys": "int4", "values": "int4", "recent": 0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Any:
    made = random_llama(num_hidden_layers=3, max_position_embeddings=512, pad_token_id=0)
    prepare(made)
    return made


@pytest.fixture(scope="module")
def assistant(llama: Any) -> Any:
    """A model that often, and not always, says what the other does."""
    made = random_llama(num_hidden_layers=3, max_position_embeddings=512, pad_token_id=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    return made


class Pieces:
    """Notes what a model is given, and how much of it is taken back."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.given: list[tuple[torch.Tensor, int]] = []
        self._crop = cache.crop
        cache.crop = self._take_back
        self.hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.given.append((kwargs["input_ids"], 0))

    def _take_back(self, count: int) -> None:
        ids, gone = self.given[-1]
        self.given[-1] = ids, gone - count
        self._crop(count)

    def stayed(self) -> list[torch.Tensor]:
        return [ids[:, : ids.shape[1] - gone] for ids, gone in self.given]


def drafted(model: Any, prompt: torch.Tensor, plan: Any, steps: int = 60, **options: Any) -> tuple[Any, Any, Pieces]:
    """What is written with drafts, the cache behind it, and its pieces."""
    cache: Any = CompressedCache(model, plan)
    pieces = Pieces(model, cache)
    with torch.no_grad():
        found = model.generate(prompt, past_key_values=cache, max_new_tokens=steps, do_sample=False, **options)
    pieces.hook.remove()
    return found, cache, pieces


def assert_alike(found: Any, expected: Any) -> None:
    """The same tokens are held, in the same storages; scales of grids are rounded to 16 bits, and may be to the next number."""
    bound = 1e-2 if found.layers[0].store.tiers else 1e-4
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.store.lengths.tolist() == other.store.lengths.tolist()
        assert (one.seen, one.chunks, one.generated, one.arrived.tolist()) == (
            other.seen, other.chunks, other.generated, other.arrived.tolist()
        )  # fmt: skip
        for region, same in zip(one.store.regions, other.store.regions, strict=True):
            assert region.lengths.tolist() == same.lengths.tolist()
        for states, right in zip(one.store.states()[:2], other.store.states()[:2], strict=True):
            torch.testing.assert_close(states, right, atol=bound, rtol=bound)


@pytest.mark.sampled(4, 8)
@pytest.mark.parametrize("by", ["lookup", "assistant"])
@pytest.mark.parametrize("name", POLICIES)
def test_rejected_drafts_leave_no_trace(llama: Any, assistant: Any, name: str, by: str) -> None:
    """As though only the tokens that stayed had ever come: the same is held, and the same said of what comes next."""
    plan = Policy.parse(POLICIES[name]).plan()
    ids, _ = padded_rows(60, (0,))
    prompt = ids.repeat(1, 2)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    if by == "assistant":
        assistant.generation_config.num_assistant_tokens = 5
        options = {"assistant_model": assistant}
    found, cache, pieces = drafted(llama, prompt, plan, **options)
    stayed = pieces.stayed()
    rejected = sum(gone for _, gone in pieces.given)
    assert rejected > 0
    if by == "assistant":  # some were right
        assert sum(piece.shape[1] for piece in stayed[1:]) > len(stayed[1:])
    clean: Any = CompressedCache(llama, plan)
    with torch.no_grad():
        for piece in stayed:
            logits = llama(piece, past_key_values=clean).logits
        assert int(logits[0, -1].argmax()) == int(found[0, -1])
        last = found[:, -1:]
        got, expected = (llama(last, past_key_values=held).logits for held in (cache, clean))
        # Once more, so that nothing is put off any longer.
        got, expected = (llama(last, past_key_values=held).logits for held in (cache, clean))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert_alike(cache, clean)


@pytest.mark.sampled(4, 8)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_where_no_draft_is_right_it_is_as_without(llama: Any, name: str, recorded: bool) -> None:
    """Tokens are evicted and stored at the same steps as in plain decoding, which is drafting nothing; if the cache knows that there
    will be drafts, one may be behind the prompt too."""
    plan = Policy.parse(POLICIES[name]).plan()
    ids, _ = padded_rows(100, (0,))
    following = torch.randint(1, 257, (1, 50), generator=torch.Generator().manual_seed(3))
    wrong = torch.randint(1, 257, (1, 3), generator=torch.Generator().manual_seed(4))
    plain, drafts = (CompressedCache(llama, plan) for _ in range(2))
    with torch.no_grad():
        llama(ids, past_key_values=plain)
        if recorded:
            drafts.activate_past_recording()
            llama(torch.cat([ids, wrong], 1), past_key_values=drafts)
            drafts.crop(-3)
        else:
            llama(ids, past_key_values=drafts)
        for token in following.split(1, 1):
            expected = llama(token, past_key_values=plain).logits
            found = llama(torch.cat([token, wrong], 1), past_key_values=drafts).logits[:, :1]
            drafts.crop(-3)
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        for held in (plain, drafts):
            llama(following[:, :1], past_key_values=held)
            held.crop(0)
        drafts.layers[0]._finish_all()
    assert_alike(drafts, plain)


def test_what_was_drafted_with_transformers_own_cache_is_drafted_with_everything_kept(llama: Any) -> None:
    ids, _ = padded_rows(60, (0,))
    options = {"max_new_tokens": 40, "do_sample": False, "prompt_lookup_num_tokens": 4}
    expected = llama.generate(ids.repeat(1, 2), **options)
    evicts = CachePlan(EvictionPlan(Tova(), UniformLayers(), EqualHeads(), ratio=1.0, interval=8))
    found, _, _ = drafted(llama, ids.repeat(1, 2), evicts, 40, prompt_lookup_num_tokens=4)
    assert torch.equal(found, expected)


def test_tokens_that_an_interval_counted_and_lost_do_not_count() -> None:
    made = random_llama(num_hidden_layers=1, max_position_embeddings=512)
    prepare(made)
    plan = CachePlan(EvictionPlan(Tova(), UniformLayers(), EqualHeads(), tokens=40, interval=6))
    cache: Any = CompressedCache(made, plan)
    ids, _ = padded_rows(100, (0,))
    lengths = []
    with torch.no_grad():
        made(ids[:, :80], past_key_values=cache)
        for step in range(5):
            made(ids[:, step : step + 1], past_key_values=cache)
        cache.crop(-3)  # 2 of 6
        for step in range(5):
            made(ids[:, step : step + 1], past_key_values=cache)
            lengths.append(cache.layers[0].store.lengths.tolist())
    assert lengths == [[43] * 2, [44] * 2, [45] * 2, [40] * 2, [41] * 2]


# ---------------------------------------------------------------- how far back
def test_no_more_is_taken_back_than_the_shortest_row_has(llama: Any) -> None:
    ids, mask = padded_rows(70, (30, 7, 0))
    cache, clean = (CompressedCache(llama) for _ in range(2))
    with torch.no_grad():
        llama(ids, attention_mask=mask, past_key_values=cache)
        llama(ids[:, :30], attention_mask=mask[:, :30], past_key_values=clean)
        for count in (70, 60, 41):
            with pytest.raises(ValueError, match=f"{count} tokens cannot be taken back .* only the newest 40 are"):
                cache.crop(-count)
        cache.crop(-40)
        assert cache.layers[0].store.lengths.tolist() == [0, 0, 23, 23, 30, 30]
        grown = torch.cat([mask[:, :30], mask.new_ones(3, 1)], 1)
        found, expected = (
            llama(ids[:, :1], attention_mask=grown, past_key_values=held).logits for held in (cache, clean)
        )
    torch.testing.assert_close(found, expected)


def test_padding_of_a_later_piece_is_not_taken_back_either(llama: Any) -> None:
    """Rows count the same newest tokens only as far as none of them has padding between."""
    ids, mask = padded_rows(40, (5, 0))
    cache: Any = CompressedCache(llama)
    with torch.no_grad():
        llama(ids, attention_mask=mask, past_key_values=cache)
        for length, padding in ((12, (0, 8)), (30, (3, 10))):
            new, more = padded_rows(length, padding)
            mask = torch.cat([mask, more], 1)
            llama(new, attention_mask=mask, past_key_values=cache)
            least = length - max(padding)
            with pytest.raises(ValueError, match=f"only the newest {least} are"):
                cache.crop(-least - 1)
    before = cache.layers[0].store.lengths
    cache.crop(-20)
    assert cache.layers[0].store.lengths.tolist() == (before - 20).tolist()


# ---------------------------------------------------------------- short pieces with padding
CHANNELS = (((0, 3, 5, 9),) * 2,) * 3
RAGGED: dict[str, CachePlan] = {
    "plain": CachePlan(),
    "int4": CachePlan(storage=StoragePlan((INT4,), recent=8, prefix=4)),
    "two tiers": CachePlan(storage=Policy.parse({"method": "mikv", "recent": 8}).plan().storage),
    "snapkv": CachePlan(EvictionPlan(SnapKV(8), UniformLayers(), EqualHeads(), tokens=40)),
    "quest": CachePlan(selection=Quest(tokens=64, skip_layers=1, recent=12)),
    "double sparsity": CachePlan(
        selection=DoubleSparsity(tokens=24, channels=CHANNELS, skip_layers=1, recent=12),
        storage=StoragePlan((INT4,), recent=8),
    ),
    "recycled": CachePlan(selection=RecycledAttention(tokens=24, stride=1000, recent=12)),
    "token-select": CachePlan(selection=TokenSelect(tokens=24, similarity=1.1, skip_layers=1, recent=12)),
    "tidal": CachePlan(selection=Tidal(tokens=24, full_layers=1, select_layers=(1,), recent=12)),
}


def read(model: Any, plan: CachePlan, pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Logits of pieces of a text, each with its own mask; positions are places among a row's tokens."""
    cache: Any = CompressedCache(model, plan)
    mask = pieces[0][1][:, :0]
    found = []
    for ids, own in pieces:
        mask = torch.cat([mask, own], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            given = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
            found.append(model(ids, **given).logits)
    return found


# (Rows of recycled attention look at everything in the same step: one that has no token in it makes all of them look again.)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "short"), [(n, s) for n in RAGGED for s in (1, 10) if (n, s) != ("recycled", 1)])
def test_a_short_piece_does_not_depend_on_its_neighbours_padding(llama: Any, name: str, short: int) -> None:
    rows = 3
    padding = (0, 4, 7) if short > 1 else (0, 1, 0)
    pieces = [padded_rows(90, (25, 0, 9)), padded_rows(short, padding)]
    pieces += [padded_rows(1, (0,) * rows)] * 3 + [padded_rows(5, (1, 0, 2))] + [padded_rows(1, (0,) * rows)] * 30
    together = read(llama, RAGGED[name], pieces)
    for row in range(rows):
        alone = [(ids[row : row + 1, own[row] > 0], own[row : row + 1, own[row] > 0]) for ids, own in pieces]
        expected = read(llama, RAGGED[name], [(ids, own) for ids, own in alone if ids.numel()])
        found = [logits[row : row + 1, own[row] > 0] for logits, (_, own) in zip(together, pieces, strict=True)]
        for got, right in zip([part for part in found if part.numel()], expected, strict=True):
            torch.testing.assert_close(got, right, atol=2e-3, rtol=2e-3)
