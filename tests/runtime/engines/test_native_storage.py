"""Cache policies inside the native engine: logits of modules with the same policy, whatever the batch, cut, tree or sharing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from runtime.decoding.pages import Pages
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.storage import storage_of, why_modules_store
from runtime.errors import RequestError
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.storage.plan import StoragePlan
from tests.helpers.llama_engines import engines, model_of

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

POLICIES: dict[str, dict[str, Any]] = {
    "int4": {"keys": "int4", "values": "int4", "recent": 64},
    "int8, nothing recent": {"keys": "int8", "values": "int8", "recent": 0},
    "int2 values": {"keys": "plain", "values": "int2", "recent": 70},
    "fp8, first page plain": {"keys": "fp8", "values": "fp8", "recent": 64, "prefix": 64},
    "bfloat16 floats": {"keys": "int4", "values": "int8", "recent": 64, "floats": "bfloat16"},
}


def _engine(policy: dict[str, Any]) -> tuple[Any, NativeEngine]:
    """Transformers' modules and the native engine, both with the policy."""
    plain, lean = engines(model_of("grouped", head_dim=32, max_position_embeddings=1024))
    parsed = Policy.parse(policy)
    assert lean.hold(parsed) is None
    plain.compress_cache(parsed)
    return plain, lean


def _text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_logits_are_those_of_modules_with_the_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoragePlan, "chunk", PAGE)  # modules store 32 tokens at a time, pages here have 64
    modules, lean = _engine(POLICIES[name])
    text = _text(330)
    cache, expected = modules.new_cache(), []
    for token in text:  # one by one: a prompt in one piece is read plain by modules
        expected.append(modules.forward(torch.tensor([[token]]), cache, None, None)[0, -1])
    wanted = torch.stack(expected)
    pool = lean.new_pages(6)
    found = lean.read(pool, [Chunk(text, 0, range(6))], every=True)
    # A float in bfloat16 may round to a neighbour, and codes with it.
    assert float((found - wanted).norm() / wanted.norm()) < (2e-2 if "floats" in POLICIES[name] else 5e-3)
    best = wanted.max(-1).values - wanted.gather(-1, found.argmax(-1, keepdim=True))[:, 0]
    assert float((best > 1e-3 * wanted.abs().max()).float().mean()) < 0.02


@pytest.mark.parametrize("name", POLICIES)
def test_bits_depend_on_no_cut_no_neighbour_and_no_threads(name: str) -> None:
    _, lean = _engine(POLICIES[name])
    text, other = _text(330), _text(270, 1)
    whole = lean.read(lean.new_pages(6), [Chunk(text, 0, range(6))], every=True)
    pool, parts = lean.new_pages(12), []
    pages, others = [7, 1, 9, 0, 11, 3], [2, 4, 5, 6, 8]
    before = torch.get_num_threads()
    try:
        cuts = [0, 1, 64, 100, 192, 193, 194, 320, 330]
        for count, (start, end) in enumerate(itertools.pairwise(cuts)):
            torch.set_num_threads(1 + count % 2)
            chunks = [
                Chunk(text[start:end], start, pages),
                Chunk(other[30 * count : 30 * count + 30], 30 * count, others),
            ]
            parts.append(lean.read(pool, chunks, every=True)[: end - start])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)


def test_floats_of_another_dtype_take_their_own_bytes() -> None:
    _, plain = engines(model_of("grouped", head_dim=32))
    before = plain.page_bytes
    assert plain.hold(Policy.parse({"floats": "bfloat16"})) is None
    assert plain.page_bytes == before // 2
    assert plain.new_pages(1).tensors[0].dtype == torch.bfloat16


def test_plain_pages_are_given_up() -> None:
    _, lean = _engine(POLICIES["int4"])
    pool = lean.new_pages(8)
    text = _text(500)
    for start in range(0, 500, 50):
        lean.read(pool, [Chunk(text[start : start + 50], start, range(8))])
    assert pool.plain is not None
    assert (
        pool.plain.most <= 4
    )  # 64 recent tokens, the page before them that another may begin after, and what a step writes
    full = 3 * 2 * (32 + 32) * PAGE * 4  # layers, heads, a key and a value in float32
    assert lean.page_bytes < 0.25 * full
    assert lean.usage(pool, 8).bytes == 8 * lean.page_bytes + pool.plain.most_needed * full


@pytest.mark.parametrize("name", ["int4", "int8, nothing recent"])
def test_drafts_that_are_taken_back_leave_nothing(name: str) -> None:
    _, lean = _engine(POLICIES[name])
    text = _text(300)
    whole = lean.read(lean.new_pages(6), [Chunk(text, 0, range(6))], every=True)
    pool = lean.new_pages(6)
    lean.read(pool, [Chunk(text[:125], 0, range(6))])
    at = 125
    while at < 295:  # a chain of drafts: two are right, then wrong ones fill the page
        wrong = [(token + 1) % 400 for token in text[at + 2 : at + 5]]
        chunk = Chunk([*text[at : at + 2], *wrong], at, range(6), outputs=5)
        logits, _ = lean.verify(pool, [chunk])
        assert torch.equal(logits[:2], whole[at : at + 2])
        lean.keep(pool, chunk, [0, 1])
        at += 2
    assert torch.equal(lean.step(pool, [Chunk([text[at]], at, range(6))])[0], whole[at])


def test_a_branch_of_a_tree_is_computed_as_if_alone() -> None:
    _, lean = _engine(POLICIES["int4"])
    assert lean.trees
    text = _text(300)
    whole = lean.read(lean.new_pages(6), [Chunk(text, 0, range(6))], every=True)
    pool = lean.new_pages(6)
    lean.read(pool, [Chunk(text[:253], 0, range(6))])
    at = 253  # the tree lies across a border of pages
    tokens = [text[at], 7, text[at + 1], 9, text[at + 2], text[at + 3]]
    chunk = Chunk(tokens, at, range(6), outputs=6, parents=[-1, 0, 0, 1, 2, 4])
    logits, _ = lean.verify(pool, [chunk])
    assert torch.equal(logits[[0, 2, 4, 5]], whole[at : at + 4])
    lean.keep(pool, chunk, [0, 2, 4, 5])
    assert torch.equal(lean.read(pool, [Chunk(text[at + 4 :], at + 4, range(6))], every=True), whole[at + 4 :])
    lean.hold(Policy.parse({"keys": "int4", "values": "int4", "recent": 0}))
    assert not lean.trees


def test_sequences_share_only_pages_that_they_can_begin_after() -> None:
    _, lean = _engine(POLICIES["int4"])
    pool = lean.new_pages(12)
    sharing = lean.sharing(pool)
    assert sharing is not None
    text, end = _text(256), _text(20, 5)
    alone = lean.read(lean.new_pages(8), [Chunk([*text[:192], *end], 0, range(8))])
    lean.read(pool, [Chunk(text[:200], 0, range(6))])
    assert sharing.usable([0, 1, 2]) == 3
    sharing.enter([0, 1, 2, 8], 3)
    for at in range(200, 256):  # the first goes on, and would give page 2 up but for the second
        lean.step(pool, [Chunk([text[at]], at, range(6))])
    lean.read(pool, [Chunk(_text(100, 3), 256, range(6))])
    assert torch.equal(lean.read(pool, [Chunk(end, 192, [0, 1, 2, 8])]), alone)
    lean.step(pool, [Chunk([1], 356, range(6))])
    assert sharing.usable([0, 1, 2]) == 3  # which the second still sees plain
    sharing.leave([0, 1, 2, 8])
    sharing.keep(0)
    assert sharing.usable([0, 1, 2]) == 0
    pages = Pages(4, PAGE)
    pages.sharing = sharing
    assert pages.find(text) == []


def test_a_sequence_may_leave_before_its_new_page_was_computed() -> None:
    _, lean = _engine({"keys": "int4", "values": "int4", "recent": 0, "prefix": 128})
    pool = lean.new_pages(4)
    sharing = lean.sharing(pool)
    assert sharing is not None
    pages = [0]
    sharing.enter(pages, 0)
    lean.read(pool, [Chunk(_text(PAGE), 0, pages)])
    pages.append(1)  # for a token that is never computed
    sharing.leave(pages)
    assert sharing.usable([0]) == 1
    sharing.keep(0)
    assert sharing.usable([0]) == 0


def test_what_is_not_finite_is_refused_in_a_sentence() -> None:
    _, lean = _engine(POLICIES["int4"])
    with torch.no_grad():
        lean.module.model.embed_tokens.weight[5] = float("nan")
    with pytest.raises(RequestError, match=r"kv_cache .*: a key or value is not finite"):
        lean.read(lean.new_pages(4), [Chunk([5] * 200, 0, range(4))])


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"keys": "int4", "values": "int4", "offload": "host"}, "offload pages to the host"),
        ({"keys": "bitmap", "values": "int4"}, "store keys as bitmap"),
        ({"keys": {"codec": "int4", "axis": "token"}, "values": "int4"}, "on grids a token"),
    ],
)
def test_what_pages_cannot_be_has_a_reason(policy: dict[str, Any], reason: str) -> None:
    assert reason in (why_modules_store(Policy.parse(policy)) or "")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"select": {"method": "quest", "tokens": 100}}, "select what a step reads where layers and heads keep"),
        (
            {"keys": "int4", "values": "int4", "recent": 16, "offload": "disk"},
            "offload pages to a disk where layers and heads keep",
        ),
    ],
)
@pytest.mark.parametrize("uneven", [{"heads": "adaptive"}, {"layers": "pyramid"}, {"prompt": "keep"}])
def test_what_differs_by_head_is_neither_selected_nor_offloaded(
    more: dict[str, Any], reason: str, uneven: dict[str, Any]
) -> None:
    _, lean = _engine(POLICIES["int4"])
    evict = {"score": "snapkv", "tokens": 64, "interval": 16}
    assert reason in str(storage_of(Policy.parse({"evict": evict | uneven, **more}), lean.parts))
    assert not isinstance(storage_of(Policy.parse({"evict": evict, **more}), lean.parts), str)
