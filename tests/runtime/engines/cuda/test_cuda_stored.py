"""Stored pages in the engine with CUDA graphs: logits of modules with the same policy, whatever the batch, cut, draft or sharing."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_models import build, engine
from fake_graph import Fake
from llama_engines import model_of

from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.engines.base import Chunk
from runtime.engines.blueprint import Blueprint
from runtime.engines.choose import why_modules
from runtime.engines.cuda import CudaEngine, ops, take_over
from runtime.engines.cuda import engine as engine_module
from runtime.engines.cuda.cache import Chunks
from runtime.engines.cuda.storage import Storage, storage_of, why_modules_store
from runtime.engines.llama_structure import Program, read_program
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError
from runtime.kernels.triton import gpu
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.storage.plan import StoragePlan

PAGE = 64
POLICIES: dict[str, dict[str, Any]] = {
    "int4": {"keys": "int4", "values": "int4", "recent": 64},
    "nothing recent": {"keys": "int4", "values": "int8", "recent": 0},
    "int2 values": {"keys": "plain", "values": "int2", "recent": 70},
    "fp8, first page plain": {"keys": "fp8", "values": "fp8", "recent": 64, "prefix": 64},
    "values in groups": {"keys": "int4", "values": {"codec": "int4", "group": 16}, "recent": 10, "prefix": 64},
}


def held(policy: dict[str, Any], name: str = "grouped", **options: Any) -> CudaEngine:
    """The engine over a random model, with a policy."""
    found = engine(model_of(name, head_dim=32, max_position_embeddings=512), **{"page_size": PAGE, **options})
    assert found.hold(Policy.parse(policy)) is None
    return found


def text(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(6, 400), k=count)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for codes that the last bit of a key or value turns: a page that is read in another way changes 20 times as much."""
    assert float((found - wanted).norm() / wanted.norm()) < 3e-3


@pytest.mark.parametrize("name", POLICIES)
def test_logits_are_those_of_modules_with_the_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoragePlan, "chunk", PAGE)  # modules store 32 tokens at a time, pages here have 64
    modules = TorchEngine(model_of("grouped", head_dim=32, max_position_embeddings=512), torch.device("cpu"))
    modules.compress_cache(Policy.parse(POLICIES[name]))
    ids, which = text(230), held(POLICIES[name])
    cache, expected = modules.new_cache(), []
    for token in ids:  # one by one: a prompt in one piece is read plain by modules
        expected.append(modules.forward(torch.tensor([[token]]), cache, None, None)[0, -1])
    wanted = torch.stack(expected)
    found = which.read(which.new_pages(6), [Chunk(ids, 0, range(6))], every=True)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2
    best = wanted.max(-1).values - wanted.gather(-1, found.argmax(-1, keepdim=True))[:, 0]
    assert float((best > 1e-3 * wanted.abs().max()).float().mean()) < 0.02
    plain = engine(model_of("grouped", head_dim=32, max_position_embeddings=512), page_size=PAGE)
    other = plain.read(plain.new_pages(6), [Chunk(ids, 0, range(6))], every=True)
    assert float((found - other).norm() / wanted.norm()) > 2e-2, "nothing was stored"
    assert torch.equal(which.logits(torch.tensor([ids])), plain.logits(torch.tensor([ids]))), "which no cache is for"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POLICIES)
def test_logits_depend_on_no_cut_and_no_neighbour(name: str) -> None:
    """Prompts in chunks, single steps and drafts beside another sequence; decode steps are graphs."""
    fake = Fake()
    which, ids, other = held(POLICIES[name], capture=fake, buckets=(2, 8)), text(330), text(270, 1)
    whole = which.read(which.new_pages(6), [Chunk(ids, 0, range(6))], every=True)
    pool, parts = which.new_pages(12), []
    pages, others = [7, 1, 9, 0, 11, 3], [2, 4, 5, 6, 8]
    cuts = [0, 1, 64, 100, 128, 129, 130, 140, 191, 192, 193, 194, 320, 321, 328, 330]
    for count, (start, end) in enumerate(itertools.pairwise(cuts)):
        mine = Chunk(ids[start:end], start, pages, outputs=end - start)
        beside = Chunk(other[15 * count : 15 * count + 15], 15 * count, others)
        parts.append(which.verify(pool, [beside, mine])[0][1:])
    near(torch.cat(parts), whole)
    assert len(fake.replays) >= 7


def test_memory_is_that_of_few_bits_and_what_is_recent() -> None:
    which = held(POLICIES["int4"])
    pool = which.new_pages(8)
    ids = text(500)
    for start in range(0, 500, 50):
        which.read(pool, [Chunk(ids[start : start + 50], start, range(8))])
    memory = pool.memory
    assert memory.plain is not None
    assert memory.stored is not None
    assert memory.plain.most <= 4
    full = 3 * 2 * 2 * 32 * PAGE * 4  # layers, heads, a key and a value in float32
    stored = sum(tensor[:, :8].nbytes for tensor in memory.stored.pools.values())
    assert stored < 0.25 * 8 * full
    assert which.page_bytes == int(stored / 8 * 9 / 8), "a page and its share of plain ones"
    taken = sum(tensor.nbytes for tensor in memory.tensors)
    assert which.usage(pool, 8).bytes == stored + taken, "all places are taken, whether needed or not"
    assert taken == 9 * full, "8 at most, and scratch"
    large = which.new_pages(400).memory
    assert large.stored is not None
    assert large.stored.keys.shape[1] - 1 == 32 + 3, "of a step and a sequence"
    larger = which.new_pages(4000).memory
    assert larger.stored is not None
    assert larger.plain_bytes - full <= 4000 * (which.page_bytes - stored // 8) < larger.plain_bytes, (
        "an eighth of the pages"
    )


def test_a_prompt_that_needs_more_places_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the pages before hold, and with graphs over the new memory."""
    ids, more, fake = text(200), text(440, 2), Fake()
    which = held(POLICIES["int4"], capture=fake, buckets=(1,))
    whole = which.read(which.new_pages(4), [Chunk(ids, 0, range(4))], every=True)
    which.trim()
    monkeypatch.setattr(Storage, "places", lambda *_: 3)
    pool = which.new_pages(20)
    near(which.read(pool, [Chunk(ids[:180], 0, range(4))], every=True), whole[:180])
    near(which.step(pool, [Chunk(ids[180:181], 180, range(4))]), whole[180:181])
    assert pool.memory.stored is not None
    assert pool.memory.stored.keys.shape[1] == 4
    which.read(pool, [Chunk(more, 0, range(4, 11))])
    assert pool.memory.stored.keys.shape[1] >= 10
    for at in range(181, 200):
        near(which.step(pool, [Chunk([ids[at]], at, range(4))]), whole[at : at + 1])


@pytest.mark.parametrize("name", ["int4", "nothing recent"])
def test_drafts_that_are_taken_back_leave_nothing(name: str) -> None:
    which, ids = held(POLICIES[name]), text(300)
    whole = which.read(which.new_pages(6), [Chunk(ids, 0, range(6))], every=True)
    pool = which.new_pages(6)
    which.read(pool, [Chunk(ids[:125], 0, range(6))])
    assert which.draft_room(pool) == POLICIES[name]["recent"]
    at = 125
    while at < 205:  # a chain of drafts: two are right, then wrong ones fill the page
        wrong = [(token + 1) % 400 for token in ids[at + 2 : at + 5]]
        chunk = Chunk([*ids[at : at + 2], *wrong], at, range(6), outputs=5)
        logits, _ = which.verify(pool, [chunk])
        near(logits[:2], whole[at : at + 2])
        which.keep(pool, chunk, [0, 1])
        at += 2
    near(which.step(pool, [Chunk([ids[at]], at, range(6))])[0], whole[at])


def test_sequences_share_only_pages_that_they_can_begin_after() -> None:
    which = held(POLICIES["int4"])
    pool = which.new_pages(12)
    sharing = which.sharing(pool)
    assert sharing is not None
    ids, end = text(256), text(20, 5)
    alone = which.read(which.new_pages(8), [Chunk([*ids[:192], *end], 0, range(8))])
    which.read(pool, [Chunk(ids[:240], 0, range(6))])
    assert sharing.usable([0, 1, 2]) == 3
    sharing.enter([0, 1, 2, 8], 3)
    for at in range(240, 256):  # the first goes on, and would give page 2 up but for the second
        which.step(pool, [Chunk([ids[at]], at, range(6))])
    near(which.read(pool, [Chunk(end, 192, [0, 1, 2, 8])]), alone)
    sharing.leave([0, 1, 2, 8])
    sharing.keep(0)
    assert sharing.usable([0, 1]) == 0


def test_layers_with_windows_stay_plain() -> None:
    ids, policy = text(300), Policy.parse(POLICIES["int4"])
    model = model_of("qwen2, some windows", head_dim=32, max_position_embeddings=512)
    which = engine(model, page_size=PAGE)
    assert which.hold(policy) is None
    pool = which.new_pages(5)
    assert [layer.stored is None for layer in pool.memory.layers] == [False, True, True]
    whole = which.read(pool, [Chunk(ids, 0, range(5))], every=True)
    pool = which.new_pages(5)
    which.read(pool, [Chunk(ids[:280], 0, range(5))])
    for at in range(280, 300):
        near(which.step(pool, [Chunk([ids[at]], at, range(5))]), whole[at : at + 1])
    every = engine(model_of("mistral, window"), page_size=PAGE)
    assert "see a window only" in (every.hold(policy) or "")


@pytest.mark.parametrize("capture", [Fake, lambda: None], ids=["graphs", "no graphs"])
def test_what_is_not_finite_is_refused_in_a_sentence(capture: Any) -> None:
    which = held(POLICIES["int4"], capture=capture())
    with torch.no_grad():
        which.module.model.embed_tokens.weight[5] = float("nan")
    with pytest.raises(RequestError, match=r"kv_cache .*: a key or value is not finite"):
        which.read(which.new_pages(4), [Chunk([5] * 200, 0, range(4))])
    pool = which.new_pages(4)
    which.read(pool, [Chunk([*text(115), 5], 0, range(4))])
    with pytest.raises(RequestError, match=r"keys int4, values int4\): a key or value is not finite"):  # noqa: PT012
        for at in range(116, 140):
            which.step(pool, [Chunk([1], at, range(4))])
    for _ in range(2):  # what is left of it, behind the end of the next, is nobody's
        del pool
        pool = which.new_pages(4)
        assert which.step(pool, [Chunk(text(150), 0, range(4))]).isfinite().all()
        with torch.no_grad():
            for tensor in pool.memory.tensors:
                tensor.fill_(float("nan"))


def test_a_step_that_fails_leaves_nothing_to_the_next_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    which, ids = held(POLICIES["int4"], capture=Fake()), text(200)
    whole = which.read(which.new_pages(4), [Chunk(ids, 0, range(4))], every=True)
    pool = which.new_pages(4)
    with pytest.raises(RequestError, match="position 512 is past the 512"):
        which.read(pool, [Chunk(ids, 313, range(9))])
    assert pool.memory.plain is not None
    assert not pool.memory.plain.most, "refused before anything was done"
    assert pool.memory.stored is not None
    monkeypatch.setattr(which.decoder, "embed", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        which.read(pool, [Chunk(ids[:190], 0, range(4))])
    monkeypatch.undo()
    pool.memory.stored.invalid.fill_(1)  # as if what it stored had been wrong
    del pool
    pool = which.new_pages(4)
    near(which.read(pool, [Chunk(ids[:190], 0, range(4))], every=True), whole[:190])
    near(which.step(pool, [Chunk(ids[190:191], 190, range(4))]), whole[190:191])


def test_rows_beyond_a_bucket_and_drafts_beside_a_prompt() -> None:
    """Five sequences in steps of two, one of them with a draft, beside a prompt that stores pages of its own."""
    which, ids = held(POLICIES["int4"], capture=Fake(), buckets=(2,)), text(330)
    whole = which.read(which.new_pages(6), [Chunk(ids, 0, range(6))], every=True)
    pool = which.new_pages(36)
    tables = [range(6 * i, 6 * i + 6) for i in range(6)]
    starts = [63, 130, 191, 192, 260]
    which.read(pool, [Chunk(ids[:start], 0, table) for start, table in zip(starts, tables, strict=False)])
    for step in range(3):
        counts = [1, 1, 3, 1, 1]
        chunks = [
            Chunk(ids[start : start + count], start, table, outputs=count)
            for start, count, table in zip(starts, counts, tables, strict=False)
        ]
        prompt = Chunk(ids[110 * step : 110 * step + 110], 110 * step, tables[5])
        found, _ = which.verify(pool, [chunks[0], prompt, *chunks[1:]])
        rows = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
        near(found, whole[[rows[0], 110 * step + 109, *rows[1:]]])
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


def test_a_short_prompt_is_computed_as_alone_beside_a_long_one() -> None:
    """The attention of one that sees plain pages only, bit for bit."""
    which = held(POLICIES["int4"])
    memory, sizes = which.new_pages(8).memory, (8, 32)
    layer = memory.layers[0]
    assert layer.stored is not None
    for side in layer[:2]:
        side.normal_(generator=torch.Generator().manual_seed(0))
    layer.stored.places[:8] = torch.randperm(8).int()
    q = torch.randn(300, *sizes, generator=torch.Generator().manual_seed(1))
    short, long = [7], [0, 1, 2, 3, 4]

    def attend(pages: list[list[int]], counts: list[int]) -> torch.Tensor:
        every = torch.tensor([page for table in pages for page in table], dtype=torch.int32)
        chunks = Chunks([0] * len(counts), counts, every, PAGE)
        return ops.chunk_attention(torch.cat([q[:n] for n in counts]), layer, chunks, 0.2, 0)

    alone, beside = attend([short], [40]), attend([long, short], [260, 40])
    assert torch.equal(alone, beside[260:])
    assert not torch.equal(beside[:40], alone)


def test_the_reason_why_modules_compute_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is joined; and a policy that pages hold goes along with the model."""
    model = model_of("grouped", head_dim=32, max_position_embeddings=512)
    torch_engine = TorchEngine(model, torch.device("cpu"))
    monkeypatch.setattr(torch_engine, "device", torch.device("cuda"))
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    monkeypatch.setattr(ops, "choose", lambda _: ops.TORCH)
    before = [id(parameter) for parameter in model.parameters()]
    assert take_over(torch_engine, Policy.parse({"keys": "bitmap", "values": "int4"})) is None
    assert [id(parameter) for parameter in model.parameters()] == before
    wanted = "transformers' modules, not the engine with CUDA graphs: the cache's policy says to store keys as bitmap"
    assert torch_engine.explain()["model"] == wanted
    monkeypatch.setattr(engine_module, "CudaGraphs", lambda _: Fake())
    monkeypatch.setattr(CudaEngine, "__init__", functools.partialmethod(_on_cpu, CudaEngine.__init__))
    found = take_over(torch_engine, Policy.parse(POLICIES["int4"]))
    assert found is not None
    assert "keys int4, values int4" in found.explain()["kv_cache.0"]
    blueprint: Any = SimpleNamespace(
        kind="decoder", device=torch.device("cuda"), adapter=None, compressed=True, kernels="auto"
    )
    assert why_modules(blueprint, Policy.parse(POLICIES["int4"])) is None
    assert "holds no cache whose policy says to store keys as bitmap" in (
        why_modules(blueprint, Policy.parse({"keys": "bitmap"})) or ""
    )


def _on_cpu(self: CudaEngine, original: Any, torch_engine: Any, *arguments: Any, **options: Any) -> None:
    torch_engine.device = torch.device("cpu")
    original(self, torch_engine, *arguments, **options)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"keys": "int4", "values": "int4", "offload": "host"}, "offload pages"),
        ({"keys": "int4", "values": "int4", "floats": "bfloat16"}, "hold floats in another dtype"),
        ({"select": {"method": "quest", "tokens": 100}}, "select what a step reads"),
        ({"evict": {"score": "snapkv", "tokens": 100}}, "evict tokens"),
        ({"keys": "bitmap", "values": "int4"}, "store keys as bitmap"),
        ({"keys": {"codec": "int4", "axis": "token"}, "values": "int4"}, "on grids a token"),
    ],
)
def test_what_pages_cannot_be_has_a_reason(policy: dict[str, Any], reason: str) -> None:
    assert reason in (why_modules_store(Policy.parse(policy)) or "")
    which = engine(model_of("grouped"), page_size=PAGE)
    assert reason in (which.hold(Policy.parse(policy)) or "")
    assert which.policy is None


@pytest.mark.parametrize(
    ("policy", "page", "head_dim", "reason"),
    [
        ({"recent": 100}, PAGE, 32, "stores nothing in fewer bits"),
        ({"keys": "int4", "values": "int4"}, 16, 32, "pages of 16 positions"),
        ({"keys": "int4", "values": "int4"}, PAGE, 512, "heads have 512 channels"),
        ({"keys": "int4", "values": {"codec": "int4", "group": 48}}, PAGE, 96, "groups of 48 channels"),
        ({"keys": "int4", "values": {"codec": "int4", "group": 64}}, PAGE, 96, "groups of 64 channels"),
    ],
)
def test_what_a_model_cannot_have_has_a_reason(policy: dict[str, Any], page: int, head_dim: int, reason: str) -> None:
    which = engine(model_of("grouped", head_dim=head_dim), page_size=page)
    assert reason in str(storage_of(Policy.parse(policy), which.parts, page))


@pytest.mark.parametrize("recent", [0, 16])
def test_requests_are_decoded_together_as_alone(recent: int, tiny_artifact: Path) -> None:
    """Through the scheduler: prompts of many lengths, some with a common beginning, in one pool whose places grow."""
    blueprint = Blueprint(Artifact(tiny_artifact), torch.device("cpu"), "reference", torch.float32, False)
    torch_engine = blueprint.build()
    program = read_program(torch_engine.module, fuse=True)
    assert isinstance(program, Program)
    which = CudaEngine(torch_engine, program, page_size=32, buckets=(8,))
    assert which.hold(Policy.parse({"keys": "int8", "values": "int8", "recent": recent})) is None
    model = Model(which, None, Artifact(tiny_artifact), frozenset())
    common = [token % 250 for token in text(70)]
    prompts = [[*common, token] for token in range(3)] + [common[:length] for length in (31, 32, 65)]
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    alone = [model.generate([prompt], **options)[0] for prompt in prompts]
    together = model.generate(prompts, **options)
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= len(prompts) - 1, "a tie, at most"
    assert model.stats["kv_cache"] == which.policy.describe()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["Llama", "Qwen2, windows", "Qwen3"])
@pytest.mark.parametrize("policy", ["int4", "fp8, first page plain"])
def test_steps_with_kernels_can_be_captured(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers of the kernels that a GPU runs; launches are written down and compute nothing."""
    pytest.importorskip("triton")
    from runtime.kernels.triton import jit

    fake, stores = Fake(), []
    which = engine(build(name), capture=fake, computing=ops.kernels(), page_size=32)
    assert which.hold(Policy.parse({**POLICIES[policy], "recent": 32})) is None
    launch = fake.launch

    def counted(kernel: Any, grid: Any, arguments: dict[str, Any]) -> bool:
        stores.extend([grid] * (kernel.__name__ == "page_store_kernel"))
        return launch(kernel, grid, arguments)

    monkeypatch.setattr(jit.Entry, "launcher", counted)
    pool, ids = which.new_pages(8), text(140)
    which.step(pool, [Chunk([id % 101 for id in ids[:90]], 0, range(8))])
    before = len(stores)
    for at in range(90, 140):
        which.step(pool, [Chunk([ids[at] % 101], at, range(8))])
    launched = {entry[0] for trace in fake.traces for entry in trace.steps}
    assert launched >= {"stored_attention.stored_split_kernel", "paged_attention.join_kernel"}
    assert "page_store.page_store_kernel" not in launched, "pages are stored before a step, not in its graph"
    layers = sum(layer.stored is not None for layer in pool.memory.layers)
    assert which.storage is not None
    stored = [max(which.storage.first(32), (position - 32) // 32) for position in (89, 139)]
    wanted = [(1, which.parts.kv_heads, layers)] * 2 * (stored[1] - stored[0])
    assert stores[before:] == wanted, "one launch a side and page, of all layers"
