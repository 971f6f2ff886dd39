"""Products of many rows on AMX's tiles, emulated: the same bits as those of vectors, and no instruction that a CPU would refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import products
import pytest
import torch
from llama_engines import native as engine_of
from program_families import compressed, model_of
from weight_cases import int_scheme

from runtime.engines.base import Chunk
from runtime.kernels.cpu import experts as c_experts
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


def least_streams(made: products.Case) -> int:
    """Rows of x times digits from which on tiles are used."""
    return 12 if products.in_digits(made, 1).kind == 8 else 5


class Tiles:
    """The kernels with emulated tiles, and what these counted since the last call."""

    def __init__(self) -> None:
        self.kernels = products.emulated("avx512", "amx")
        self._counts, self._before = (ctypes.c_int64 * 3)(), 0
        self.products()  # the library may have been used before

    def products(self) -> int:
        """Of tiles; nothing was refused, and no thread has left its tiles configured."""
        self.kernels.tile_counts(self._counts)
        made, faults, configured = self._counts
        assert (faults, configured) == (0, 0)
        self._before, before = made, self._before
        return made - before


@pytest.fixture(scope="module")
def tiles() -> Iterator[Tiles]:
    found = Tiles()
    yield found
    found.products()


def compare(tiles: Tiles, made: products.Case, x: torch.Tensor, digits: int, threads: int = 1) -> None:
    bias, best = torch.randn(made.layer.shape[0]), library.load()
    y = products.run(tiles.kernels, made, x, digits, threads, bias)
    assert torch.equal(y, products.run(best, made, x, digits, threads, bias)), (x.shape[0], digits, threads)
    assert (tiles.products() > 0) == (x.shape[0] > 1 and x.shape[0] * digits >= least_streams(made))
    exact = x.double() @ products.exact_weight(made.weight).t() + bias.double()
    assert ((y.double() - exact).abs() <= products.error_bound(made, x, digits, exact)).all()


@pytest.mark.sampled(37, 18)
@pytest.mark.parametrize("group", range(16, 257, 16))
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_width_and_group(bits, group, tiles):
    """Groups that are no multiple of 64 columns, panels and groups that are not full, rows on both sides of the bound."""
    symmetric = (bits + group // 16) % 2 == 0
    shape = (33 + bits, 2 * group + (group if group < 128 else 0))
    made = products.case(
        "w4" if bits <= 4 else "w8", int_scheme(bits, symmetric, group), shape, torch.float32, storage="packed"
    )
    x = torch.randn(35, shape[1], generator=torch.Generator().manual_seed(group)) * 3
    for digits in (1, 2, 3):
        bound = -(-least_streams(made) // digits)
        for rows in (max(1, bound - 1), bound, 9, 2 * (16 // digits), 2 * (16 // digits) + 1):
            compare(tiles, made, x[:rows], digits, 1 + rows % 2)


@pytest.mark.parametrize("name", products.FLOATS)
def test_block_floats(name, tiles):
    made = products.case("e2m1", products.FLOATS[name], (70, 544), torch.float32)
    for digits in (1, 2, 3):
        for rows in (1, 16, 37):
            compare(tiles, made, torch.randn(rows, 544) * 3, digits, 2)


@pytest.mark.parametrize("group", [512, "channel", "tensor"])
@pytest.mark.parametrize("columns", [1040, 1023])
def test_groups_that_share_a_scale(group, columns, tiles):
    """More columns, too, than are made bytes at a time."""
    columns = columns if isinstance(group, str) else 1024
    for bits, dtype in ((4, torch.bfloat16), (8, torch.float16)):
        made = products.case(f"w{bits}", int_scheme(bits, False, group), (70, columns), dtype, storage="packed")
        compare(tiles, made, torch.randn(19, columns).to(dtype), 2, 2)


@pytest.mark.parametrize("rows", [127, 128, 129, 161, 300])
def test_more_rows_than_are_held_at_once(rows, tiles):
    made = products.case("w4", int_scheme(4, False, 48), (33, 96), torch.float32, storage="packed")
    for digits in (1, 2, 3):
        compare(tiles, made, torch.randn(rows, 96), digits, 3)


def test_numbers_that_are_not_finite_and_the_largest_sums(tiles):
    made = products.case("w8", int_scheme(8, True, 256), (32, 512), torch.float32, storage="packed")
    codes = made.prepared["weight"]
    codes[:] = torch.where(torch.rand(codes.shape) < 0.5, 255, 0).to(torch.uint8)
    x = torch.full((20, 512), -3.0)
    x[3, 7], x[4, 300] = float("inf"), float("nan")
    finite = [row for row in range(20) if row not in (3, 4)]
    for digits in (1, 2, 3):
        y, expected = (products.run(each, made, x, digits) for each in (tiles.kernels, library.load()))
        assert torch.equal(y[finite], expected[finite])
        assert y[[3, 4]].isnan().all()
    assert tiles.products()


def test_experts(tiles, monkeypatch):
    """Two with enough tokens for tiles, and one with a single token."""
    shapes = ((64, 96), (64, 96), (96, 64))
    made = [
        [products.case("w4", int_scheme(4, True, 32), shape, torch.float32, number, "packed") for shape in shapes]
        for number in range(3)
    ]
    experts = c_experts.experts_of([tuple(products.in_digits(each, 2) for each in own) for own in made], "silu")
    x, index = torch.randn(30, 96), torch.tensor([[0, 1]] * 29 + [[1, 2]])
    weights = torch.rand(index.shape)
    expected = c_experts.run(experts, x, index, weights)
    monkeypatch.setattr(library, "load", lambda: tiles.kernels)
    assert torch.equal(c_experts.run(experts, x, index, weights), expected)
    assert tiles.products()


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_whole_step(family, tiles, monkeypatch):
    """A prompt and a token beside it: layers of a decoder and of experts, of which some have too few rows for tiles."""
    small = compressed(model_of(family))[0]
    tokens = torch.randint(0, 307, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for kernels in (library.load(), tiles.kernels):
        monkeypatch.setattr(library, "load", lambda kernels=kernels: kernels)
        engine = engine_of(small)
        pool = engine.new_pages(4)
        found = [engine.verify(pool, [Chunk(tokens[:40], 0, range(1, 3), outputs=40), Chunk(tokens[:3], 0, range(1))])]
        found.append(engine.verify(pool, [Chunk(tokens[40:], 40, range(1, 3))]))
        logits.append(torch.cat([each.reshape(-1, 307) for each, *_ in found]))
    assert torch.equal(*logits)
    assert tiles.products()
