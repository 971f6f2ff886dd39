"""Eviction inside the native engine: the tokens that modules keep and write with the same policy, whatever the batch, memory or drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from inside_cases import gentle, with_drafter
from llama_engines import CPU, model_of, native
from policy_models import memory_changes_nothing, native_model, texts, torch_model
from program_families import model_of as family_of
from speculation_cases import model_over, trees_change_nothing

from runtime.api.model import Model
from runtime.config.settings import ConfigError
from runtime.decoding.pages import Pages
from runtime.decoding.sequence import Sequence
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.eviction import SequenceRetention
from runtime.engines.native.pool import Pool
from runtime.engines.native.storage import why_modules_store
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE
from runtime.kernels.cpu.decoder import OPS
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.storage.plan import StoragePlan

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

GATES = {"fingerprint": "0" * 16, "gates": [[0.1, 0.9], [0.9, 0.1], [0.2, 0.8]]}
POLICIES: dict[str, dict[str, Any]] = {
    "streaming, once": {"evict": {"score": "streaming", "ratio": 0.25}},
    "streaming": {"evict": {"score": "streaming", "tokens": 40, "interval": 8}},
    "snapkv": {"evict": {"score": "snapkv", "ratio": 0.25}},
    "snapkv, a window longer than the interval": {"evict": {"score": "snapkv", "tokens": 50, "interval": 8}},
    "tova after a prefix": {"evict": {"score": "tova", "tokens": 40, "interval": 8}, "prefix": 5},
    "h2o": {"evict": {"score": "h2o", "ratio": 0.3, "interval": 8}},
    "h2o, once": {"evict": {"score": "h2o", "normalize": True, "ratio": 0.3}},
    "normalized": {"evict": {"score": "normalized", "tokens": 70, "interval": 70}},
    "normalized, of queries whose tokens are gone": {"evict": {"score": "normalized", "tokens": 40, "interval": 5}},
    "pyramid": {"evict": {"score": "snapkv", "layers": {"share": "pyramid", "beta": 1.7}, "ratio": 0.3}},
    "pyramid, again and again": {"evict": {"score": "tova", "layers": {"share": "pyramid", "beta": 4}, "tokens": 60, "interval": 8}},
    "adaptive heads": {"evict": {"score": "snapkv", "heads": "adaptive", "ratio": 0.4, "interval": 20}},
    "adaptive heads of a pyramid": {"evict": {"score": "h2o", "layers": "pyramid", "heads": "adaptive", "tokens": 90, "interval": 16}},
    "cake": {"evict": {"score": "cake", "layers": "cake", "ratio": 0.3, "interval": 30}},
    "keyformer": {"evict": {"score": "keyformer", "ratio": 0.3, "interval": 16}},
    "defensive": {"evict": {"score": "defensive", "layers": "defensive", "heads": "adaptive", "ratio": 0.3}},
    "rpc of what is generated": {"evict": {"score": "rpc", "ratio": 0.5, "interval": 40, "prompt": "keep"}},
    "h2o of what is generated": {"evict": {"score": "h2o", "tokens": 40, "interval": 16, "prompt": "keep"}},
    "adaptive heads, generated": {"evict": {"score": "snapkv", "heads": "adaptive", "tokens": 45, "interval": 20, "prompt": "keep"}},
    "duo": {"method": "duoattention", "evict": {"sinks": 4, "recent": 20, "interval": 16}, "calibrated": GATES},
    "layers that compete": {"evict": {"score": "snapkv", "layers": "defensive", "heads": "adaptive", "ratio": 0.4, "interval": 40}},
}  # fmt: skip
FEW_BITS: dict[str, dict[str, Any]] = {
    "int4, snapkv": {"keys": "int4", "values": "int4", "recent": 64, "evict": {"score": "snapkv", "ratio": 0.4}},
    "int8, tova": {"keys": "int8", "values": "int8", "recent": 0, "evict": {"score": "tova", "tokens": 130, "interval": 20}},
    "fp8 after a prefix, streaming": {
        "keys": "fp8", "values": "fp8", "recent": 70, "prefix": 5, "evict": {"score": "streaming", "tokens": 180, "interval": 33}
    },
    "int4, h2o": {"keys": "int4", "values": "int4", "recent": 64, "evict": {"score": "h2o", "ratio": 0.5, "interval": 40}},
    "int8, keyformer of what is generated": {
        "keys": "int8", "values": "int8", "recent": 0,
        "evict": {"score": "keyformer", "tokens": 40, "interval": 30, "prompt": "keep"},
    },
    "int4 after a prefix, a pyramid": {
        "keys": "int4", "values": "int4", "recent": 64, "prefix": 5,
        "evict": {"score": "snapkv", "layers": {"share": "pyramid", "beta": 3}, "heads": "adaptive", "tokens": 170, "interval": 30},
    },
    "int2 values, normalized": {"values": "int2", "recent": 64, "evict": {"score": "normalized", "ratio": 0.5, "interval": 70}},
}  # fmt: skip
ALL = POLICIES | FEW_BITS
NEW = 90


@pytest.fixture(scope="module")
def module() -> Any:
    return model_of("grouped", head_dim=32, max_position_embeddings=2048)


def held(module: Any, policy: str) -> Model:
    return native_model(module, ALL[policy])


def modules(module: Any, policy: str) -> Model:
    return torch_model(module, POLICIES[policy])


# ---------------------------------------------------------------- the tokens that modules keep
@pytest.mark.sampled(3, 4)
@pytest.mark.sampled(8, 6)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_is_what_modules_write(module: Any, policy: str) -> None:
    prompts = texts(300, 20, 129, 64, 700)
    found = held(module, policy).generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    slow = modules(module, policy)
    assert found == [slow.generate(prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts]
    assert found != model_over(native(module)).generate(prompts, max_new_tokens=NEW, ignore_eos=True), (
        "it does something"
    )


@pytest.mark.sampled(10, 8)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "duo"])
@pytest.mark.parametrize("name", ["grouped", "every head its own keys", "odd heads, biases"])
def test_what_is_kept_is_what_modules_keep(name: str, policy: str) -> None:
    model = model_of(name, **({} if "odd" in name else {"head_dim": 32}))
    lean, slow = native(model), TorchEngine(model, CPU)
    parsed = Policy.parse(POLICIES[policy])
    assert lean.hold(parsed) is None
    slow.compress_cache(parsed)
    (text,) = texts(290)
    prompt, cache = 200, slow.new_cache()
    slow.forward(torch.tensor([text[:prompt]]), cache, None, None)
    for token in text[prompt:]:
        slow.forward(torch.tensor([[token]]), cache, None, None)
    _, pool, pages, retention = _read(lean, text, prompt, 77)
    lengths = torch.stack([layer.store.lengths for layer in cache.compressed])
    assert int(lengths.min()) < 290
    assert parsed.evict is not None
    uneven = parsed.evict.layers.name != "uniform" or parsed.evict.heads.name != "equal"
    assert bool((lengths != lengths[0, 0]).any()) == uneven, "it does something"
    positions = torch.arange(290).expand(*lengths.shape, 290)
    if retention.ragged is not None:
        positions = retention.ragged.layout.positions(positions)
    positions = torch.minimum(positions, positions.gather(-1, lengths.unsqueeze(-1) - 1))  # none behind a head's last
    slots = 290 - retention.evicted
    for layer, module_layer in enumerate(cache.compressed):
        states = module_layer.store.states()[:2]
        for head, count in enumerate(lengths[layer].tolist()):
            found = pool.tokens(pages, layer, positions[layer, :, :count], slots, retention.ragged)
            for ours, theirs in zip(found, states, strict=True):
                assert torch.allclose(ours[head], theirs[head, :count], atol=1e-4)


def _read(
    engine: NativeEngine, text: list[int], prompt: int, width: int
) -> tuple[list[torch.Tensor], Pool, list[int], SequenceRetention]:
    """The text through a cache, its prompt in chunks of a width and the rest in steps of any: logits, and what is in the pool."""
    pool, pages, others, retention = engine.new_pages(17), [*range(8)], [*range(16, 8, -1)], engine.retention(prompt)
    assert retention is not None
    start, logits = 0, []
    while start < len(text):
        end = min(len(text), start + width, retention.boundary or len(text))
        logits.append(engine.read(pool, [Chunk(text[start:end], start, pages, retention=retention)], every=True))
        start = end
        if start == retention.boundary:
            same = retention.fixed // PAGE
            into = pages[:same] + others[same:] if retention.moves else pages
            if engine.evict(pool, retention, pages, into) and retention.moves:
                pages, others = into, others[:same] + pages[same:]
    return logits, pool, pages, retention


@pytest.mark.sampled(3, 4)
@pytest.mark.parametrize("policy", FEW_BITS)
def test_logits_over_few_bits_are_those_of_modules(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoragePlan, "chunk", PAGE)  # modules store 32 tokens at a time, pages here have 64
    settings = {**FEW_BITS[policy], "evict": {"score": "streaming", "tokens": 200, "interval": 40}}
    settings |= {"prefix": PAGE} if "prefix" in settings else {}  # in C whole pages of a prefix stay plain
    model = model_of("grouped", head_dim=32, max_position_embeddings=1024)
    lean, slow = native(model), TorchEngine(model, CPU)
    assert lean.hold(Policy.parse(settings)) is None
    slow.compress_cache(Policy.parse(settings))
    (text,) = texts(450)
    cache = slow.new_cache()  # one by one: a prompt in one piece is read plain by modules
    wanted = torch.stack([slow.forward(torch.tensor([[token]]), cache, None, None)[0, -1] for token in text])
    found, pool, *_ = _read(lean, text, 1, 450)
    assert float((torch.cat(found) - wanted).norm() / wanted.norm()) < 5e-3
    assert pool.plain is not None
    assert torch.cat(found)[300:].ne(lean.logits(torch.tensor([text]))[0, 300:]).any(), "it does something"


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("policy", ["snapkv", "adaptive heads", "h2o", "keyformer", "rpc of what is generated"])
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "Cohere2"])
def test_layers_with_windows_stay_as_they_are(name: str, policy: str) -> None:
    module = family_of(name, head_dim=32, max_position_embeddings=1024)
    prompts = texts(300, 20, 129, seed=5)
    prompts = [[token % 300 for token in prompt] for prompt in prompts]
    model = held(module, policy)
    found = model.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    slow = modules(module, policy)
    assert found == [slow.generate(prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts]
    assert [held(module, policy).generate(prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts] == found


def test_scores_know_no_sinks() -> None:
    lean = native(family_of("GptOss", head_dim=32))
    assert "without sinks" in (lean.hold(Policy.parse(POLICIES["keyformer"])) or "")
    assert lean.hold(Policy.parse(POLICIES["adaptive heads"])) is None


# ---------------------------------------------------------------- sums of attention
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_sums_are_those_of_a_softmax(softcap: float, sinks: bool) -> None:
    engine = native(model_of("odd heads, biases"))
    pool, pages, slots = engine.new_pages(6), [4, 0, 5, 2], range(131, 209)
    draw = torch.Generator().manual_seed(1)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    heads, size = engine.parts.decoder.heads, engine.parts.head_dim
    logits = torch.randn(heads, generator=draw)
    scales = []
    for block in pool.blocks[:3]:
        attend = next(op.attend for op in block.ops[: block.count] if OPS[op.kind] == "attend")
        attend.softcap, attend.sinks = softcap, logits.data_ptr() if sinks else None
        scales.append(attend.scale)
    queries = torch.randn(3, len(slots), heads, size, generator=draw)
    sums = torch.zeros(3, 4, 4 * PAGE)
    for begin, end in ((0, 1), (1, 40), (40, 78)):  # however they come, in order
        pool.receive(pages, slots[begin:end], queries[:, begin:end].contiguous(), sums)
    whole = torch.zeros_like(sums)
    pool.receive(pages, slots, queries, whole)
    assert torch.equal(sums, whole)
    for layer, scale in enumerate(scales):
        keys = pool.tensors[2 * layer][pages].unflatten(-1, (size, PAGE)).permute(1, 0, 3, 2).flatten(1, 2).double()
        scores = torch.einsum("qhd,hnd->hqn", queries[layer].double(), keys.repeat_interleave(2, 0)) * scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        seen = torch.arange(4 * PAGE) <= torch.tensor(slots)[:, None]
        sink = (logits if sinks else torch.full_like(logits, float("-inf"))).double()[:, None, None]
        scores = torch.cat([scores.masked_fill(~seen, float("-inf")), sink.expand(-1, len(slots), 1)], -1)
        wanted = scores.softmax(-1)[..., :-1].sum(1).unflatten(0, (4, 2)).sum(1)
        assert torch.allclose(whole[layer].double(), wanted, atol=1e-5, rtol=1e-4)


def test_sums_over_stored_pages_are_near_those_over_plain_ones() -> None:
    model, (text,) = model_of("grouped", head_dim=32), texts(400)
    queries = torch.randn(3, 5, 8, 32, generator=torch.Generator().manual_seed(2))
    sums = torch.zeros(2, 3, 2, 7 * PAGE)
    for found, policy in zip(sums, ({}, {"keys": "int8", "values": "int8", "recent": 70}), strict=True):
        engine = native(model)
        assert engine.hold(Policy.parse(policy)) is None
        pool = engine.new_pages(7)
        engine.read(pool, [Chunk(text[:256], 0, range(7))])
        engine.read(pool, [Chunk(text[256:], 256, range(7))])
        pool.receive(range(7), range(395, 400), queries, found)
    plain, stored = sums[:, 0]  # the first layer's keys are the same
    assert not torch.equal(plain, stored)
    assert float((plain - stored).norm() / plain.norm()) < 0.02


@pytest.mark.sampled(3, 6)
# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("policy", ALL)
def test_bits_depend_on_no_cut_and_no_threads(module: Any, policy: str) -> None:
    engine, (text,) = native(module), texts(400, seed=1)
    assert engine.hold(Policy.parse(ALL[policy])) is None
    whole = torch.cat(_read(engine, text, 300, 300)[0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(torch.cat(_read(engine, text, 300, 7)[0]), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.sampled(2, 5)
@pytest.mark.parametrize("policy", ALL)
def test_a_batch_gives_what_each_prompt_gives_alone(module: Any, policy: str) -> None:
    prompts = texts(300, 20, 129, 64, 700, seed=2)
    prompts += [prompts[0][:200] + prompts[1], prompts[4][:640]]  # on pages of others
    alone = [held(module, policy).generate(prompt, max_new_tokens=NEW) for prompt in prompts]
    model = held(module, policy)
    assert model.generate(prompts, max_new_tokens=NEW) == alone
    for prompt, expected in zip(prompts, alone, strict=True):  # once more, on the pages of the first call
        assert model.generate(prompt, max_new_tokens=NEW) == expected
        shares = model.stats["shared_prompt_tokens"] > 0
        if policy in POLICIES:
            every = policy.startswith(("h2o", "keyformer", "adaptive heads of")) and "generated" not in policy
            assert shares == (not every and len(prompt) > 128), "some scores want every query of a prompt"


@pytest.mark.sampled(5, 5)
@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("spare", [0, 6])
def test_within_any_memory_the_same(module: Any, policy: str, spare: int) -> None:
    memory_changes_nothing(lambda: held(module, policy), NEW, spare)


@pytest.mark.sampled(5, 5)
@pytest.mark.parametrize("policy", ALL)
def test_what_is_computed_again_is_the_same(module: Any, policy: str) -> None:
    (prompt,) = texts(100)
    options = {"max_new_tokens": 200, "ignore_eos": True}
    wanted = held(module, policy).generate(prompt, **options)
    model = held(module, policy)
    found: list[int] = []
    for new in model.stream(prompt, **options):
        found.append(new)
        batch = model._scheduler.batch  # type: ignore[union-attr]
        if len(found) in (20, 41, 70, 190):
            batch.put_aside(batch.running[0])
    assert model.stats["recomputed_tokens"] > 0
    assert found == wanted
    pages = -(-model.engine.slots(100, 200) // PAGE)
    assert model._scheduler.batch.pages.touched <= pages + 2  # type: ignore[union-attr] # the prompt's, and one more as it is evicted from


def test_pages_are_given_back(module: Any) -> None:
    model, (prompt,) = held(module, "streaming"), texts(1000)
    engine, seen = model.engine, []
    stream = model.stream(prompt, max_new_tokens=NEW, ignore_eos=True)
    for _ in stream:
        batch = model._scheduler.batch  # type: ignore[union-attr]
        seen.append(max((len(sequence.pages) for sequence in batch.running), default=0))
    assert seen[0] == 1, "40 tokens and those to come"
    assert engine.slots(1000, NEW) == 1000


def test_pages_that_others_hold_are_not_written() -> None:
    pages, unread = Pages(4, 4), cast(Any, None)
    one, other = (Sequence(range(9), unread, None) for _ in range(2))
    retention: Any = SimpleNamespace(
        evicted=0, boundary=9, prompt=9, left=5, own=1, moves=False, fixed=0, most=lambda new: 9 + new
    )
    moves = []

    def gather(which: Any, held: list[int], into: list[int]) -> bool:
        moves.append((list(held), list(into)))
        which.evicted, which.boundary = 4, None
        return True

    assert one.enter(pages, 0, retention)
    one.advance(9, pages)
    assert other.enter(pages, 0, None)
    assert other.pages[:2] == one.pages[:2] == [0, 1]
    assert one.reach == 0
    assert not one.evict(pages, gather), "two pages are the other's too, and none is free"
    assert not moves
    other.leave(pages)
    assert one.evict(pages, gather)
    # Of two that others may begin on, one stays: there is room for one.
    assert moves == [([0, 1, 2], [3, 1])]
    assert (one.held, one.pages, pages.available) == (5, [3, 1], 2)
    assert [content.page for content in pages.find(list(range(8)))] == [0]


@pytest.mark.sampled(8, 8)
# ---------------------------------------------------------------- drafts
@pytest.mark.parametrize("policy", ALL)
def test_drafts_change_nothing(module: Any, policy: str) -> None:
    trees_change_nothing(lambda: held(module, policy), texts(300, 40, 129, seed=4), 120)


def test_layers_of_the_model_do_not_draft() -> None:
    model = held(gentle(head_dim=32, max_position_embeddings=1024), "snapkv")
    with pytest.raises(ConfigError, match="policy evicts tokens"):
        with_drafter(model, {"method": "early-exit", "layer": 2})


# ---------------------------------------------------------------- what stays with the modules
@pytest.mark.parametrize(
    ("evict", "reason"),
    [
        ({"score": "h2o", "layers": "cake", "ratio": 0.5}, "by h2o, of layers that share the budget as cake says"),
    ],
)
def test_what_is_evicted_by_the_modules_has_a_reason(evict: dict[str, Any], reason: str) -> None:
    assert reason in (why_modules_store(Policy.parse({"evict": evict})) or "")
