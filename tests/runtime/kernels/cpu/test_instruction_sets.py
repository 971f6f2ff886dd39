"""One result, bit for bit, whatever the instruction set, the number of threads and the rows beside a row."""

from __future__ import annotations

import ctypes
import itertools
import platform
import subprocess
import sys

import products
import pytest
import torch
from weight_cases import int_scheme

from runtime.kernels.cpu import library, panels
from runtime.system import instruction_sets, native

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
X86 = platform.machine().lower() in ("x86_64", "amd64")
GRIDS = [
    ("w4", int_scheme(4, True, 32)), ("w4", int_scheme(4, False, 48)), ("w4", int_scheme(3, False, "channel")),
    ("w4", int_scheme(4, True, 512)), ("w4", int_scheme(2, False, "tensor")), ("w8", int_scheme(8, True, 64)),
    ("w8", int_scheme(8, False, 16)), ("w8", int_scheme(5, False, "channel")), ("w4", int_scheme(3, True, 48)),
    ("w4", int_scheme(2, True, 16)), ("w8", int_scheme(6, True, 48)), ("w8", int_scheme(7, False, 64)),
    ("w8", int_scheme(5, True, 16)), ("s24", int_scheme(4, True, 64, "2:4")),
    ("s24", int_scheme(3, True, "channel", "2:4")), ("s24", int_scheme(4, True, 160, "2:4")),
    *(("e2m1", scheme) for scheme in products.FLOATS.values()), *(("k", scheme) for scheme in products.K_QUANTS.values()),
    *(("t", scheme) for scheme in products.TRELLISES), *(("c", scheme) for scheme in products.ROW_CODEBOOKS),
]  # fmt: skip
TILED = [
    ("w4", int_scheme(4, True, 32)), ("w4", int_scheme(4, False, 48)), ("w8", int_scheme(8, True, 32)),
    ("w8", int_scheme(8, False, 16)), ("w4", int_scheme(3, False, 32)), ("w8", int_scheme(7, True, 80)),
    ("s24", int_scheme(4, True, 32, "2:4")), *(("e2m1", scheme) for scheme in products.FLOATS.values()),
    *(("k", scheme) for scheme in products.K_QUANTS.values()),
    *(("t", scheme) for scheme in products.TRELLISES), *(("c", scheme) for scheme in products.ROW_CODEBOOKS),
]  # fmt: skip
STORAGE = {"s24": "sparse24", "w4": "packed", "w8": "packed"}
ROWS = 13
OF_BLOCKS = {"k": 768, "s24": 544, "e2m1": 544}  # columns that are whole blocks


@pytest.fixture(scope="module")
def emulated() -> dict[str, ctypes.CDLL]:
    """The paths for CPUs with AVX-512, and with AMX, on any."""
    libraries = {"emulated": products.emulated("avx512"), "emulated amx": products.emulated("avx512", "amx")}
    assert [each.isa_name() for each in libraries.values()] == [b"avx512-vnni", b"amx"]
    return libraries


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 3
    x[1] *= 1e-3
    x[2] = 0
    x[3, ::5] *= 3e3
    x[4, 3] = float("inf")
    x[5] *= 1e-38
    x[6, -1] = float("nan")
    return x.to(dtype)


@pytest.mark.parametrize(("kind", "scheme"), GRIDS, ids=str)
def test_every_instruction_set_gives_the_same(kind, scheme, emulated):
    libraries = {name: library.load(name) for name in instruction_sets.available()} | emulated
    assert "portable" in libraries
    if kind in ("t", "c"):
        columns = products.whole(scheme, 480)
    elif kind in OF_BLOCKS:
        columns = OF_BLOCKS[kind]
    else:
        columns = 640 if scheme.weights.strategy == "group" and scheme.weights.group_size >= 512 else 537
    for dtype, digits in ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 3)):
        made = products.case(kind, scheme, (37, columns), dtype, storage=STORAGE.get(kind))
        x, bias = inputs((ROWS, columns), dtype), torch.randn(37)
        results = {name: products.run(lib, made, x, digits, bias=bias) for name, lib in libraries.items()}
        first = results["portable"]
        finite = [row for row in range(ROWS) if row not in (4, 6)]
        assert not first[finite].isnan().any()
        for name, y in results.items():
            assert torch.equal(first[finite], y[finite]), name
            assert y[[4, 6]].isnan().all(), name


@pytest.mark.parametrize(("kind", "scheme"), GRIDS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(kind, scheme):
    columns = 768 if kind == "k" else products.whole(scheme, 640)
    made = products.case(kind, scheme, (83, columns), torch.bfloat16)
    x = torch.randn(70, columns).to(torch.bfloat16)
    for name, digits in itertools.product(instruction_sets.available(), (1, 2, 3)):
        lib = library.load(name)
        alone = torch.cat([products.run(lib, made, x[i : i + 1], digits) for i in range(70)])
        for rows in (*range(2, 18), 70):
            assert torch.equal(products.run(lib, made, x[:rows], digits), alone[:rows]), (name, digits, rows)
        for threads in (2, 3, 5, 16):
            assert torch.equal(products.run(lib, made, x, digits, threads), alone), (name, digits, threads)
            assert torch.equal(products.run(lib, made, x[:1], digits, threads), alone[:1]), (name, digits, threads)


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize(("kind", "scheme"), TILED, ids=str)
def test_every_tile_of_every_instruction_set_gives_the_same(kind, scheme, digits, emulated):
    """Each number of rows has tiles of its own."""
    columns = 512 if kind == "k" else products.whole(scheme, 160)
    made = products.case(kind, scheme, (69, columns), torch.float32, storage=STORAGE.get(kind))
    x, bias = torch.randn(17, columns, generator=torch.Generator().manual_seed(5)), torch.randn(69)
    alone = torch.cat([products.run(library.load("portable"), made, row[None], digits, bias=bias) for row in x])
    for name, lib in (*emulated.items(), *((name, library.load(name)) for name in instruction_sets.available())):
        for rows in range(1, 18):
            assert torch.equal(products.run(lib, made, x[:rows], digits, bias=bias), alone[:rows]), (name, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(37, 215), (5, 7), (16, 16), (33, 640), (2, 47)], ids=str)
def test_dense_products_are_the_same_everywhere(shape, dtype, emulated):
    """Bit for bit, whatever the instruction set, the threads and the rows beside a row, and as close as float32 sums are."""
    weight, bias = torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(dtype), torch.randn(shape[0])
    x = torch.randn(17, shape[1], generator=torch.Generator().manual_seed(9)) * 3
    scale = None
    if dtype == torch.float8_e4m3fn:  # in C one is 2^8 times smaller
        scale = torch.rand(shape[0]) + 0.5
        wide = weight.float() * scale[:, None]
        scale = scale * 256
    else:
        wide = weight
    linear = products.dense(weight, bias, scale)
    alone = torch.cat([products.multiply(library.load("portable"), linear, row[None]) for row in x])
    exact, size = (
        a.double() @ b.double().t() + c.double() for a, b, c in ((x, wide, bias), (x.abs(), wide.abs(), bias.abs()))
    )
    assert ((alone.double() - exact).abs() <= (shape[1] / 16 + 22) * 2.0**-24 * size).all()
    for name, lib in (*emulated.items(), *((name, library.load(name)) for name in instruction_sets.available())):
        for rows, threads in itertools.product(range(1, 18), (1, 3)):
            assert torch.equal(products.multiply(lib, linear, x[:rows], threads), alone[:rows]), (
                name,
                rows,
                threads,
            )


# A section of sums is 2048 columns; a block of rows that are multiplied at a time is 896 (AVX-512), 384 (AVX2), 128.
@pytest.mark.parametrize(
    ("rows", "shape"), [(70, (37, 4197)), (70, (66, 2048)), (43, (5, 31)), (25, (1, 4096)), (900, (33, 65))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_dense_products_of_many_rows(rows, shape, dtype, emulated):
    """They are those of single rows, to the bit, and as close to float64 as sums of so many sections of float32 are."""
    generator = torch.Generator().manual_seed(rows + shape[0])
    weight, bias, scale = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[0]), None
    wide = weight.double()
    if dtype == torch.float8_e4m3fn:
        scale = torch.rand(shape[0], generator=generator) + 0.5
        wide = wide * scale.double()[:, None]
        scale = scale * 256
    linear = products.dense(weight, bias, scale)
    best = library.load()
    for given in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(rows, shape[1], generator=generator) * 3).to(given)
        alone = torch.cat([products.multiply(best, linear, row[None]) for row in x])
        exact = x.double() @ wide.t() + bias.double()
        size = x.double().abs() @ wide.abs().t() + bias.double().abs()
        rounding = (shape[1] / 16 + 22) * 2.0**-24 * size + products.UNIT[given] * exact.abs() * 1.01
        assert ((alone.double() - exact).abs() <= rounding).all()
        for name in instruction_sets.available():
            for count, threads in ((13, 1), (14, 2), (25, 3), (29, 1), (41, 2), (rows, 1), (rows, 5)):
                found = products.multiply(library.load(name), linear, x[:count], threads)
                assert torch.equal(found, alone[:count]), (name, given, count, threads)
        assert torch.equal(products.multiply(emulated["emulated"], linear, x[:41], 2), alone[:41]), given


@pytest.mark.parametrize(("kind", "scheme"), GRIDS, ids=str)
def test_dequantized_tiles_are_the_weight(kind, scheme, emulated):
    made = products.case(
        kind,
        scheme,
        (69, products.whole(scheme, 768 if kind == "k" else 544 if (scheme.weights.group_size or 0) < 512 else 1024)),
        torch.bfloat16,
        3,
        STORAGE.get(kind),
    )
    linear = ctypes.byref(made.layout.linear(made.prepared, made.layer, None))
    exact = products.exact_weight(made.weight)
    if kind in ("e2m1", "k"):  # the steps are float32
        exact = scheme.weights.dequantize(made.weight.values, made.weight.parameters, torch.float32)
    for lib in [*emulated.values(), *map(library.load, instruction_sets.available())]:
        for first, last, dtype in ((0, 3, torch.float32), (1, 2, torch.bfloat16), (2, 3, torch.float16)):
            rows = slice(first * panels.PANEL, min(69, last * panels.PANEL))
            tile = torch.full((exact.shape[1], rows.stop - rows.start), float("nan"), dtype=dtype)
            lib.linear_dequantize(linear, first, last, tile.data_ptr(), library.TYPES[dtype], 1)
            assert torch.equal(tile.t(), exact[rows].to(dtype))


def test_numbers_that_are_no_pair_read_the_same_everywhere(emulated):
    """A damaged place leads nowhere outside, and products and dequantized tiles agree about what it means."""
    made = products.case("s24", int_scheme(4, True, 64, "2:4"), (37, 544), torch.float32)
    words = made.prepared["weight"].view(2, -1, 3, 4 * panels.PANEL)
    words[:, :, 2] = torch.randint(0, 256, words[:, :, 2].shape, generator=torch.Generator().manual_seed(1))
    linear = ctypes.byref(made.layout.linear(made.prepared, made.layer, None))
    x = torch.randn(ROWS, 544, generator=torch.Generator().manual_seed(2))
    for lib in [*emulated.values(), *map(library.load, instruction_sets.available())]:
        tile = torch.empty(544, 37)
        lib.linear_dequantize(linear, 0, 2, tile.data_ptr(), library.TYPES[torch.float32], 1)
        for rows in (1, ROWS):
            y = products.run(lib, made, x[:rows], 3).double()
            torch.testing.assert_close(y, x[:rows].double() @ tile.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not X86, reason="needs an x86 compiler")
@pytest.mark.parametrize(
    ("name", "instructions"),
    [("avx512", {"vpdpbusd"}), ("amx", {"ldtilecfg", "tdpbsud", "tilestored", "tilerelease"})],
)
def test_what_this_machine_may_not_run_compiles(name, instructions, tmp_path):
    compiler, flags, out = native.find_compiler(), instruction_sets.X86[name].flags, tmp_path / "kernels.s"
    trial = tmp_path / "trial.c"
    trial.write_text("int nothing;\n")
    known = subprocess.run(
        [*compiler.split(), *flags, "-c", str(trial), "-o", str(out)], capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip(f"the compiler knows no {name}")
    command = [*compiler.split(), *native.FLAGS, *flags, "-O0", "-Wall", "-S", str(library.SOURCE), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert instructions <= set(out.read_text().split())


def test_nothing_is_read_or_written_outside(emulated):
    """Every tensor ends where a page that may not be touched begins."""
    paths = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, str(products.HERE / "guarded.py"), *(each._name for each in emulated.values())],
        env={**__import__("os").environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:] or f"killed by signal {-done.returncode}"
    assert "cases" in done.stdout
