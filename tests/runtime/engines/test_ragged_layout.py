"""Layouts of sequences whose heads keep different numbers of tokens: what is put there is read there, by attention too."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from llama_engines import model_of, native

from runtime.engines.base import Chunk
from runtime.engines.native.layout import Arena, Layout
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE, Attention, Cache
from runtime.kv_cache.policy.policy import Policy
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

CASES = [  # the most tokens of a head, pages of its oldest ones apart, newest tokens that are not packed
    (700, 0, 0),
    (40, 0, 0),
    (500, 1, 65),
    (90, 1, 65),
    (900, 2, 1),
]


def _held(most: int, generator: torch.Generator, layers: int = 3, heads: int = 4) -> torch.Tensor:
    """Very different numbers."""
    return (most * torch.rand(layers, heads, generator=generator) ** 3).long().clamp(min=6)


@pytest.mark.parametrize(("most", "lead", "recent"), CASES)
def test_no_two_tokens_of_a_sequence_share_a_place(most: int, lead: int, recent: int) -> None:
    generator = torch.Generator().manual_seed(most)
    arenas = [Arena([0, 2], [0, 1]), Arena([1], [1])]
    for _ in range(20):
        held = _held(most, generator)
        layout = Layout.of(held, lead, recent, arenas)
        count = layout.slots // PAGE + 4
        pages = torch.randperm(count, generator=generator).tolist()
        blocks = layout.structure(pages, count, arenas)._tensors[0]
        taken: set[tuple[int, int]] = set()
        for number, arena in enumerate(arenas):
            for layer, place in zip(arena.layers, arena.places, strict=True):
                for head in range(4):
                    own = layout.counts[layer, head]
                    places = blocks[layer, head, :own].long() + place * count * 4
                    # Blocks of the sequence's packed pages, of layers of the arena.
                    assert {int(each) // 4 % count for each in places} <= set(pages[lead : lead + layout.packed])
                    assert {int(each) // 4 // count for each in places} <= set(arena.places)
                    mine = {(number, int(each)) for each in places}
                    assert len(mine) == own
                    assert not mine & taken
                    taken |= mine
        tokens = torch.arange(most).expand(3, 4, most)
        last = layout.positions(tokens).gather(-1, held.unsqueeze(-1) - 1)[..., 0]
        slots = last - (layout.counts - layout.packed) * PAGE + 1
        assert bool((slots[held > layout.first] == layout.slots).all()), "the newest are in one slot"
        assert layout.packed == 0 or layout.slots - (lead + layout.packed) * PAGE >= recent
        common = lead * PAGE + int(held.max() - layout.first[0, 0])  # as if all were as long as the longest
        assert -(-layout.slots // PAGE) <= -(-common // PAGE)


@pytest.mark.parametrize("policy", [{}, {"keys": "int8", "values": "int8", "recent": 64, "prefix": 5}])
def test_what_is_copied_is_read_and_looked_at(policy: dict[str, object]) -> None:
    engine = native(model_of("grouped", head_dim=32, max_position_embeddings=1024))
    assert engine.hold(Policy.parse(policy)) is None
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 400, (600,), generator=generator).tolist()
    pool, pages, spare = engine.new_pages(40), [*range(10)], [*range(10, 40)]
    for start in range(0, 600, 200):
        engine.read(pool, [Chunk(text[start : start + 200], start, pages)])
    whole = [pool.tokens(pages, layer, torch.arange(600).expand(2, -1), 600) for layer in range(3)]
    kept, counts = torch.arange(600).expand(3, 2, -1), torch.full((3, 2), 600)
    slots, old = 600, None
    for most in (500, 200, 90):  # again and again, from one layout to the next
        left = torch.tensor([[most, 6], [most // 2, most // 3], [70, most - 1]])
        chosen = torch.zeros(3, 2, most, dtype=torch.int64)
        for layer, head in itertools.product(range(3), range(2)):
            mine = torch.randperm(int(counts[layer, head]), generator=generator)[: int(left[layer, head])]
            chosen[layer, head, : len(mine)] = mine.sort().values
        layout = Layout.of(left, 1 if policy else 0, 65 if policy else 0, pool.arenas)
        into = [spare.pop() for _ in range(-(-layout.slots // PAGE))]
        new, target = (
            layout.structure(into, pool.count, pool.arenas),
            layout.positions(torch.arange(most).expand(3, 2, -1)),
        )
        source = chosen if old is None else old.layout.positions(chosen)
        pool.copy(pages, into, source, target, slots, layout.slots, left, (old, new))
        spare = pages + spare
        there = torch.minimum(target, target.gather(-1, left.unsqueeze(-1) - 1))  # of a head no token behind its last
        kept, counts, slots, pages, old = kept.gather(-1, chosen), left, layout.slots, into, new
        queries = torch.randn(3, 2, 8, 32, generator=generator)
        sums = torch.zeros(3, 2, (layout.slots + layout.farthest + PAGE - 1) // PAGE * PAGE)
        pool.receive(pages, [slots - 1] * 2, queries, sums, new)
        for layer, head in itertools.product(range(3), range(2)):
            count = int(left[layer, head])
            found = pool.tokens(pages, layer, there[layer, :, :count], slots, new)
            for ours, theirs in zip(found, whole[layer], strict=True):
                assert torch.allclose(ours[head], theirs[head, kept[layer, head, :count]], atol=0.1 if policy else 0.0)
            mine = queries[layer, :, head * 4 : head * 4 + 4].flatten(0, 1)
            wanted = (mine @ found[0][head].T * 32**-0.5).softmax(-1).sum(0)
            got = sums[layer, head, target[layer, head, :count]]
            assert torch.allclose(got, wanted, atol=1e-2 if policy else 1e-5, rtol=1e-3)
            assert float(sums[layer, head].sum()) == pytest.approx(float(got.sum()), abs=1e-4)


@pytest.mark.parametrize("isa", instruction_sets.available())
@pytest.mark.parametrize(("most", "lead", "recent"), CASES)
@pytest.mark.parametrize("window", [0, 70])
def test_attention_sees_what_each_head_holds(isa: str, most: int, lead: int, recent: int, window: int) -> None:
    generator = torch.Generator().manual_seed(most)
    heads, size, new, arenas = 4, 48, 70, [Arena([0], [0])]
    held = _held(most, generator, 1, heads)
    layout = Layout.of(held, lead, recent, arenas)
    plain = 130  # tokens of a sequence beside it from which nothing was evicted
    own, other = -(-(layout.slots + new) // PAGE), -(-plain // PAGE)
    order = torch.randperm(own + other + 2, generator=generator).tolist()
    pages, beside = order[:own], order[own : own + other]
    there = layout.structure(pages, len(order), arenas)
    blocks = there._tensors[0][0]
    key, value = (torch.full((len(order) * heads, size * PAGE), float("nan")) for _ in range(2))
    states: list[list[torch.Tensor]] = []  # of both sequences
    for ragged in (True, False):
        sides = torch.randn(2, heads, most + new if ragged else plain, size, generator=generator)
        states.append([*sides])
        for head in range(heads):
            count = int(held[0, head]) + new if ragged else plain
            for token in range(count):
                at, block = token, beside[token // PAGE % len(beside)] * heads + head
                if ragged:
                    first = int(layout.first[0, head])
                    at = token if token < first else token - first + int(layout.begin[0, head])
                    page, mine = at // PAGE, int(layout.counts[0, head])
                    if lead <= page < lead + mine:
                        block = int(blocks[head, page - lead])
                    else:
                        block = pages[page if page < lead else page - mine + layout.packed] * heads + head
                key[block].view(size, PAGE)[:, at % PAGE] = sides[0, head, token]
                value[block].view(PAGE, size)[at % PAGE] = sides[1, head, token]
    rows = [(0, token) for token in range(new)] + [(1, token) for token in range(plain - 9, plain)]
    query = torch.randn(len(rows), heads * 2, size, generator=generator)
    width = max(own, other)
    table = torch.tensor([[*each, *[0] * (width - len(each))] for each in (pages, beside)], dtype=torch.int32)
    sequence = torch.tensor([row[0] for row in rows], dtype=torch.int32)
    position = torch.tensor([token + (0 if number else layout.slots) for number, token in rows])
    layouts = (ctypes.c_void_p * 2)(ctypes.addressof(there.ragged), None)
    found, results = library.load(isa), []
    assert found is not None
    for threads, part in ((1, slice(None)), (3, slice(None)), (2, slice(68, 72))):
        mine = range(len(rows))[part]
        out, memory = (
            torch.empty(len(mine), heads * 2, size),
            torch.empty(found.attention_memory(size), dtype=torch.uint8),
        )
        inputs = [each[part].contiguous() for each in (sequence, position, query)]
        attention = Attention(
            cache=Cache(key.data_ptr(), value.data_ptr(), None, library.TYPES[key.dtype], heads, size, size),
            rows=len(mine),
            heads=heads * 2,
            window=window,
            pages_stride=width,
            sequence=inputs[0].data_ptr(),
            position=inputs[1].data_ptr(),
            pages=table.data_ptr(),
            query=inputs[2].data_ptr(),
            out=out.data_ptr(),
            scale=size**-0.5,
            memory=memory.data_ptr(),
            ragged=ctypes.addressof(layouts),
        )
        found.attention(ctypes.byref(attention), threads)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0][68:72], results[2])
    for row, (number, token) in enumerate(rows):
        for head in range(heads):
            end = token + 1 + (0 if number else int(held[0, head]))
            k, v = (each[head, :end] for each in states[number])
            # A window counts what the head holds; before its own tokens there is nothing that a window leaves.
            seen = torch.arange(end)
            if not number:
                seen = layout.positions(seen.expand(1, heads, -1))[0, head]
            k, v = (each[seen > seen[-1] - window] if window else each for each in (k, v))
            weights = (query[row, 2 * head : 2 * head + 2] @ k.T * size**-0.5).softmax(-1)
            assert torch.allclose(results[0][row, 2 * head : 2 * head + 2], weights @ v, atol=1e-4)
