"""Selection inside the native engine: the tokens that modules read and write with the same policy, whatever the batch, memory or drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside_cases import gentle
from llama_engines import CPU, model_of, native
from policy_models import memory_changes_nothing, native_model, texts, torch_model
from program_families import model_of as family_of
from speculation_cases import VOCABULARY, model_over, trees_change_nothing

from runtime.api.model import Model
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.selection import choose, read_tokens
from runtime.engines.native.storage import why_modules_store
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE
from runtime.kv_cache.pages import PAGE as HALF
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.selection.quest import Quest, page_bound
from runtime.kv_cache.storage.plan import StoragePlan
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

PLAIN: dict[str, dict[str, Any]] = {
    "tokens": {"select": {"method": "quest", "tokens": 128}},
    "a share, in all layers": {"select": {"method": "quest", "ratio": 0.25, "skip_layers": 0, "recent": 1}},
    "a share, many recent": {"select": {"method": "quest", "ratio": 0.5, "skip_layers": 1, "recent": 50}},
    "no more than it must": {"select": {"method": "quest", "tokens": 65, "skip_layers": 1, "recent": 32}},
}
EVICTING: dict[str, dict[str, Any]] = {
    "after snapkv": {"select": PLAIN["a share, in all layers"]["select"], "evict": {"score": "snapkv", "ratio": 0.6}},
    "between evictions": {
        "select": {"method": "quest", "tokens": 80, "skip_layers": 1, "recent": 10},
        "evict": {"score": "tova", "tokens": 160, "interval": 40},
    },
}
FEW_BITS: dict[str, dict[str, Any]] = {
    "int4": {"keys": "int4", "values": "int4", "recent": 64, "select": PLAIN["a share, in all layers"]["select"]},
    "int8, nothing recent": {"keys": "int8", "values": "int8", "recent": 0, "select": PLAIN["no more than it must"]["select"]},
    "fp8": {"keys": "fp8", "values": "fp8", "recent": 70, "select": PLAIN["tokens"]["select"]},
    "int2 values": {"values": "int2", "recent": 64, "select": PLAIN["a share, many recent"]["select"]},
    "int4, evicting": {"keys": "int4", "values": "int4", "recent": 64, **EVICTING["between evictions"]},
}  # fmt: skip
ALL = PLAIN | EVICTING | FEW_BITS
NEW = 90


@pytest.fixture(scope="module")
def module() -> Any:
    return model_of("grouped", head_dim=32, max_position_embeddings=2048)


def engine_of(module: Any, policy: dict[str, Any]) -> NativeEngine:
    engine = native(module)
    assert engine.hold(Policy.parse(policy)) is None
    return engine


def held(module: Any, policy: str) -> Model:
    return native_model(module, ALL[policy])


# ---------------------------------------------------------------- the tokens that modules read
@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", PLAIN | EVICTING)
def test_what_is_written_is_what_modules_write(module: Any, policy: str) -> None:
    prompts = texts(300, 20, 129, 64, 700)
    found = held(module, policy).generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    slow = torch_model(module, ALL[policy])
    assert found == [slow.generate(prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts]
    plain = model_over(native(module)).generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    assert found != plain, "it does something"


@pytest.mark.parametrize("policy", PLAIN)
@pytest.mark.parametrize(
    "name", ["every head its own keys", "odd heads, biases", "qwen2, some windows", "one key head"]
)
def test_models_read_what_their_modules_read(name: str, policy: str) -> None:
    module = model_of(name)
    (prompt,) = texts(330)
    settings = {"select": PLAIN[policy]["select"] | {"skip_layers": 0}}
    fast, slow = model_over(engine_of(module, settings)), torch_model(module, settings)
    found, wanted = (each.generate(prompt, max_new_tokens=60, ignore_eos=True) for each in (fast, slow))
    assert found == wanted
    shares = [each.stats["kv_cache_read_share"] for each in (fast, slow)]
    assert shares[0] == shares[1]
    assert shares[0] < 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", FEW_BITS)
def test_logits_over_few_bits_are_those_of_modules(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoragePlan, "chunk", PAGE)  # modules store 32 tokens at a time, pages here have 64
    settings = dict(FEW_BITS[policy])
    if "evict" in settings:
        settings["evict"] = {"score": "streaming", "tokens": 200, "interval": 40}
    module = model_of("grouped", head_dim=32, max_position_embeddings=1024)
    engine, slow = engine_of(module, settings), TorchEngine(module, CPU)
    slow.compress_cache(Policy.parse(settings))
    (text,) = texts(400)
    cache = slow.new_cache()  # one by one: a prompt in one piece is read plain by modules
    wanted = torch.stack([slow.forward(torch.tensor([[token]]), cache, None, None)[0, -1] for token in text])
    found = torch.cat(_read(engine, text, 1, 400))
    apart = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    # Where a last bit turns a code, or which half of a page is read, a token sees something else.
    assert float(apart.quantile(0.9)) < 1e-3
    assert float((found - wanted).norm() / wanted.norm()) < 0.02
    assert float((found - engine.logits(torch.tensor([text]))[0]).norm() / wanted.norm()) > 0.05, "it does something"


def _read(engine: NativeEngine, text: list[int], prompt: int, width: int) -> list[torch.Tensor]:
    """Logits of a text, its prompt in chunks of a width and the rest in steps of any."""
    pool, pages, retention = engine.new_pages(8), list(range(8)), engine.retention(prompt)
    assert retention is not None
    start, logits = 0, []
    while start < len(text):
        end = min(len(text), start + width, retention.boundary or len(text))
        logits.append(engine.read(pool, [Chunk(text[start:end], start, pages, retention=retention)], every=True))
        start = end
        if start == retention.boundary:
            engine.evict(pool, retention, pages, pages)
    return logits


# ---------------------------------------------------------------- against the definition
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["grouped", "odd heads, biases"])
@pytest.mark.parametrize("level", instruction_sets.available())
def test_halves_are_chosen_by_the_bounds_of_their_keys(
    level: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_library = library.load(level)
    monkeypatch.setattr(library, "load", lambda: chosen_library)
    rule = Quest(tokens=200, skip_layers=0, recent=20)
    engine = engine_of(
        model_of(name).to(dtype), {"select": {"method": "quest", "tokens": 200, "skip_layers": 0, "recent": 20}}
    )
    (text,) = texts(470, seed=7)
    pages, retention = [5, 0, 7, 1, 3, 6, 2, 4], engine.retention(1)
    pool = engine.new_pages(8)
    engine.read(pool, [Chunk(text[:463], 0, pages, retention=retention)])
    chunks = [Chunk(text[463:], 463, pages, retention=retention)]
    ready = engine.prepare(pool.decoder, chunks, range(7))
    reading = choose(ready.step, ready.tensors, chunks, rule, engine.parts.kv_heads)
    assert reading is not None
    heads, size = engine.parts.decoder.heads, engine.parts.head_dim
    queries, rows = torch.empty(3, 7, heads, size), torch.arange(7, dtype=torch.int32)
    ready.step.observed, ready.step.queries, ready.step.observed_count = rows.data_ptr(), queries.data_ptr(), 7
    engine.compute(ready.step, pool)
    keys = (
        pool.tensors[-2][pages].unflatten(-1, (size, 2, HALF)).permute(1, 0, 3, 4, 2).flatten(1, 2)
    )  # [kv, halves, HALF, size]
    low, high = keys.float().amin(2), keys.float().amax(2)
    total = 0
    for row in range(7):
        own = queries[-1, row].unflatten(0, (engine.parts.kv_heads, -1))
        scores, length = page_bound(own, low, high).amax(1), 464 + row
        begins = HALF * torch.arange(16)
        needed = (begins == 0) | (begins + HALF > length - rule.recent)
        there = (length - begins).clamp(0, HALF)
        room = (200 - int((there * needed).sum())) // HALF
        best = scores.masked_fill(needed, float("-inf")).topk(room).indices
        wanted = needed.expand_as(scores).scatter(1, best, value=True)
        found = torch.stack([reading.chosen[row] & 1, reading.chosen[row] >> 1], -1).bool().flatten(1)
        assert torch.equal(found, wanted)
        total += int((there * wanted[0]).sum())
    assert reading.read == total
    assert reading.held == sum(range(464, 471))


def test_tokens_that_are_read_are_those_of_the_definition() -> None:
    held_tokens = torch.arange(1, 600)
    for newest in (1, 31, 32, 33, 100):
        for budget in (1, 64, 65, 130, 300):
            rule = Quest(tokens=budget)
            counts = rule.counts(held_tokens)
            begins = HALF * torch.arange(20)
            there = (held_tokens[:, None] - begins).clamp(0, HALF)
            needed = ((begins == 0) | (begins + there > held_tokens[:, None] - newest)) & (there > 0)
            least = (there * needed).sum(1)
            more = torch.minimum((counts - least).clamp(min=0) // HALF, ((there > 0) & ~needed).sum(1))
            wanted = torch.where(counts < held_tokens, least + HALF * more, held_tokens)
            pairs = zip(held_tokens.tolist(), counts.tolist(), strict=True)
            assert [read_tokens(*pair, newest) for pair in pairs] == wanted.tolist()


# ---------------------------------------------------------------- bits
@pytest.mark.sampled(3, 4)
@pytest.mark.parametrize("policy", ALL)
def test_bits_depend_on_no_cut_and_no_threads(module: Any, policy: str) -> None:
    engine, (text,) = engine_of(module, ALL[policy]), texts(400, seed=1)
    whole = torch.cat(_read(engine, text, 230, 230))
    before = torch.get_num_threads()
    try:
        for threads, width in ((2, 7), (2, 1), (1, 100)):
            torch.set_num_threads(threads)
            assert torch.equal(torch.cat(_read(engine, text, 230, width)), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.sampled(4, 3)
@pytest.mark.parametrize("policy", ALL)
def test_a_batch_gives_what_each_prompt_gives_alone(module: Any, policy: str) -> None:
    prompts = texts(300, 20, 129, 64, 700, seed=2)
    prompts += [prompts[0][:200] + prompts[1], prompts[4][:640]]  # on pages of others
    alone = [held(module, policy).generate(prompt, max_new_tokens=NEW) for prompt in prompts]
    model = held(module, policy)
    assert model.generate(prompts, max_new_tokens=NEW) == alone
    for prompt, expected in zip(prompts, alone, strict=True):  # once more, on the pages of the first call
        assert model.generate(prompt, max_new_tokens=NEW) == expected


@pytest.mark.parametrize("policy", PLAIN)
def test_what_was_written_is_read_whole_as_a_prompt(module: Any, policy: str) -> None:
    (prompt,) = texts(250, seed=6)
    model = held(module, policy)
    written = model.generate(prompt, max_new_tokens=150, ignore_eos=True)
    longer = [*prompt, *written, *prompt[:30]]
    assert model.generate(longer, max_new_tokens=20) == held(module, policy).generate(longer, max_new_tokens=20)
    assert model.stats["shared_prompt_tokens"] == 192, "all pages of the prompt, and none of what was written"


@pytest.mark.sampled(5, 6)
@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("spare", [0, 6])
def test_within_any_memory_the_same(module: Any, policy: str, spare: int) -> None:
    memory_changes_nothing(lambda: held(module, policy), NEW, spare)


@pytest.mark.parametrize("policy", ALL)
def test_what_is_computed_again_is_the_same(module: Any, policy: str) -> None:
    (prompt,) = texts(100)
    options = {"max_new_tokens": 200, "ignore_eos": True}
    wanted = held(module, policy).generate(prompt, **options)
    model, found = held(module, policy), []
    for new in model.stream(prompt, **options):
        found.append(new)
        if len(found) in (20, 41, 70, 190):
            batch = model._scheduler.batch  # type: ignore[union-attr]
            batch.put_aside(batch.running[0])
    assert model.stats["recomputed_tokens"] > 0
    assert found == wanted


# ---------------------------------------------------------------- drafts
@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ALL)
def test_drafts_change_nothing(module: Any, policy: str) -> None:
    trees_change_nothing(lambda: held(module, policy), texts(300, 40, 129, seed=4), 120)


def test_a_branch_of_a_tree_reads_as_if_alone() -> None:
    policy = {"select": {"method": "quest", "tokens": 64, "skip_layers": 0, "recent": 1}}
    engine = engine_of(gentle(head_dim=32, max_position_embeddings=1024), policy)
    (text,) = texts(300)
    retention = engine.retention(100)
    whole = torch.cat([*_read(engine, text, 100, 300)])
    pool, at = engine.new_pages(6), 150
    engine.read(pool, [Chunk(text[:at], 0, range(6), retention=retention)])
    # The true branch is every second token of a tree that fills several halves.
    tokens, parents, path = [text[at]], [-1], [0]
    for token in text[at + 1 : at + 80]:
        tokens += [(token + 1) % VOCABULARY, token]
        parents += [path[-1], path[-1]]
        path.append(len(tokens) - 1)
    chunk = Chunk(tokens, at, range(6), outputs=len(tokens), parents=parents, retention=retention)
    logits, _ = engine.verify(pool, [chunk])
    assert torch.equal(logits[path], whole[at : at + 80])
    engine.keep(pool, chunk, path)
    rest = engine.read(pool, [Chunk(text[at + 80 :], at + 80, range(6), retention=retention)], every=True)
    assert torch.equal(rest, whole[at + 80 :])


# ---------------------------------------------------------------- what stays with the modules
@pytest.mark.parametrize("method", ["token-select", "tidal", "recycled"])
def test_selections_of_single_tokens_have_a_reason(method: str) -> None:
    reason = why_modules_store(Policy.parse({"select": {"method": method, "tokens": 256}}))
    assert f"select single tokens ({method})" in (reason or "")


@pytest.mark.parametrize("family", ["Gemma2", "GptOss", "DeepseekV3"])
def test_families_select(family: str) -> None:
    sizes = (
        {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
        if "Deep" in family
        else {"head_dim": 32}
    )
    engine = engine_of(family_of(family, **sizes), PLAIN["a share, in all layers"])
    (text,) = texts(200)
    whole = torch.cat(_read(engine, [token % 300 for token in text], 100, 100))
    assert torch.equal(torch.cat(_read(engine, [token % 300 for token in text], 100, 3)), whole)
    assert engine.explain()["kv_cache.1"].endswith("reads by quest")
