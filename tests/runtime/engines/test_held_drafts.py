"""Drafts over compressed caches: the text that plain decoding writes with the same policy, whatever it evicts, stores and when."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from random_models import random_llama
from speculation_cases import Reading, Scripted, ScriptedChain, answers, model_over, prompts, speculation

from runtime.drafting.lengths.fixed import Fixed
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError
from runtime.kv_cache import drafts
from runtime.kv_cache.cache import CompressedCache, prepare
from runtime.kv_cache.layer import STEP_TOKENS
from runtime.kv_cache.policy.calibrated import Calibrated, fingerprint
from runtime.kv_cache.policy.policy import Policy

CPU = torch.device("cpu")
SNAPKV = {"score": "snapkv", "observe": 8, "ratio": 0.5}
POLICIES: dict[str, Any] = {
    "nothing but a prefix": {"prefix": 4},
    "snapkv": {"evict": SNAPKV},
    "tova every 8": {"evict": {"score": "tova", "tokens": 40, "interval": 8}},
    "h2o every 5": {"evict": {"score": "h2o", "tokens": 40, "interval": 5}},
    "cake every 12, adaptive": {"evict": {**SNAPKV, "layers": "cake", "heads": "adaptive", "interval": 12}},
    "rpc every 16": {"evict": {"score": "rpc", "ratio": 0.25, "interval": 16, "prompt": "keep"}},
    "int4, nothing recent": {"keys": "int4", "values": "int4", "recent": 0},
    "kivi, 16 recent, prefix": {"method": "kivi", "recent": 16, "prefix": 4},
    "zipcache": {"method": "zipcache", "recent": 16},
    "adaptive snapkv in int4": {"evict": {**SNAPKV, "heads": "adaptive"}, "keys": "int4", "values": "int4", "recent": 8},
    "snapkv every 8 in int4": {"evict": {**SNAPKV, "interval": 8}, "keys": "int4", "values": "int4", "recent": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def module() -> Any:
    return random_llama(vocab_size=400, max_position_embeddings=512)


def model(module: Any, policy: Any, *arguments: Any, **changes: Any) -> Any:
    engine = TorchEngine(module, CPU)
    policy = policy if isinstance(policy, Policy) else Policy.parse(policy)
    engine.compress_cache(policy)
    return model_over(engine, *arguments, **changes)


# ---------------------------------------------------------------- texts
@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("name", POLICIES)
def test_texts_are_those_of_plain_decoding(module: Any, name: str) -> None:
    plain = model(module, POLICIES[name])
    assert plain.engine.why_not_drafts() is None
    texts = prompts(2, 120, seed=3)
    truth = {tuple(text): plain.generate(text, max_new_tokens=60) for text in texts}
    for lengths in (Fixed(depth=6, nodes=6), Fixed(depth=40, nodes=40)):
        drafting = model(module, POLICIES[name], speculation(ScriptedChain(truth, right=0.85), lengths))
        assert [drafting.generate(text, max_new_tokens=60) for text in texts] == list(truth.values())
        assert drafting.stats["mean_accepted"] > 1
        assert drafting.stats["cache_bytes"] > 0
    options = {"temperature": 0.8, "seed": 3, "max_new_tokens": 30}
    truth = {tuple(text): plain.generate(text, **options) for text in texts}
    drafting = model(module, POLICIES[name], speculation(Scripted(truth)))
    assert [drafting.generate(text, **options) for text in texts] == list(truth.values())


def test_layers_with_windows_beside_compressed_ones() -> None:
    from llama_engines import model_of

    module = model_of("qwen2, some windows")
    plain = model(module, POLICIES["tova every 8"])
    texts = prompts(3, 60)  # windows of 33
    truth = {tuple(text): plain.generate(text, max_new_tokens=60) for text in texts}
    drafting = model(module, POLICIES["tova every 8"], speculation(ScriptedChain(truth)))
    assert [drafting.generate(text, max_new_tokens=60) for text in texts] == list(truth.values())
    assert drafting.stats["mean_accepted"] > 1


def test_a_group_of_texts_is_decoded_together_without_drafts(module: Any) -> None:
    texts = prompts(4, 50)
    plain = model(module, POLICIES["snapkv"])
    truth = answers(plain, texts, max_new_tokens=20)
    drafting = model(module, POLICIES["snapkv"], speculation(ScriptedChain(truth)))
    assert drafting.generate(texts, max_new_tokens=20) == list(truth.values())
    assert drafting.stats["drafted_tokens"] == 0
    assert drafting.stats["steps"] == plain.stats["steps"]


def test_tokens_before_the_prompt_are_nobodys(module: Any) -> None:
    """Hidden states and positions count from the prompt's own first token."""
    policy = Policy.parse({"keys": "int4", "values": "int4", "recent": 8, "prefix": "calibrated"})
    policy = policy.with_calibrated(Calibrated(fingerprint(module.config), {"prefix_tokens": (7, 9, 11)}))
    plain = model(module, policy)
    texts = prompts(2, 60)
    truth = {tuple(text): plain.generate(text, max_new_tokens=40) for text in texts}

    class Chain(Reading, ScriptedChain):
        pass

    drafter = Chain(truth)
    drafting = model(module, policy, speculation(drafter))
    assert [drafting.generate(text, max_new_tokens=40) for text in texts] == list(truth.values())
    head = module.get_output_embeddings()
    with torch.inference_mode():
        for verified in drafter.verified:
            torch.testing.assert_close(head(verified.hidden), verified.logits, atol=1e-3, rtol=1e-3)
    assert [len(torch.cat(states)) for states in drafter.states.values()] == [len(text) for text in texts]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"select": "quest"}, "what a step reads of it is chosen for all tokens of the step together"),
        ({"evict": {"score": "tova", "tokens": 40, "interval": 1}}, "it evicts after every token"),
    ],
)
def test_policies_that_a_draft_would_change_are_refused(module: Any, policy: Any, reason: str) -> None:
    found = model(module, policy, speculation(Scripted({})))
    assert re.search(rf"the cache is compressed \(.*\): {reason}", str(found.engine.why_not_drafts()))
    with pytest.raises(RequestError, match=reason):
        found.generate([5, 6, 7])


# ---------------------------------------------------------------- how many
def held(cache: Any) -> list[list[int]]:
    return [region.lengths.tolist() for layer in cache.layers for region in layer.store.every]


@pytest.mark.parametrize("name", POLICIES)
def test_room_ends_where_the_cache_changes(module: Any, name: str) -> None:
    """Counted on a cache that gets its tokens one by one; on one that gets them together it is the same, or less for once."""
    prepare(module)
    plan = Policy.parse(POLICIES[name]).plan()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 400, (1, 190), generator=generator)
    single, several = (CompressedCache(module, plan) for _ in range(2))
    rooms, changes = [], []
    with torch.no_grad():
        for cache in (single, several):
            module(ids[:, :60], past_key_values=cache)
        for place in range(60, 190):
            rooms.append(drafts.room(single))
            before = held(single)
            module(ids[:, place : place + 1], past_key_values=single)
            after = held(single)
            tails = range(len(before) // len(single.layers) - 1, len(before), len(before) // len(single.layers))
            grown = [[length + (number in tails) for length in row] for number, row in enumerate(before)]
            changes.append(grown != after)
        for start in range(len(changes) - STEP_TOKENS):
            until = next((count for count in range(STEP_TOKENS - 1) if changes[start + count]), STEP_TOKENS - 1)
            # A layer whose turn has come to evict may have nothing too many.
            assert rooms[start] <= until if "every" in name else rooms[start] == until
        place = 60
        zero = 0
        while place < 170:
            room = drafts.room(several)
            assert room in (0, rooms[place - 60])
            zero += room < rooms[place - 60]
            count = 1 + min(room, int(torch.randint(0, 8, (), generator=generator)))
            module(ids[:, place : place + count], past_key_values=several)
            place += count
    assert zero == 0 or "every" in name
