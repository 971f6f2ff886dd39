"""The inner loops in C against float64 and against the torch versions, on ragged shapes; and what happens without a compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from compress.core import native
from compress.quantize import grid as grids
from compress.quantize.grid import Grid
from compress.quantize.objective import column_errors
from compress.weights.solver import loop
from compress.weights.solver.columns import stacked_grid
from compress.weights.solver.factor import factorize
from compress.weights.solver.refine import refine
from runtime.formats.block_float import BlockFloat
from runtime.formats.scheme import GridScheme
from runtime.system import native as libraries

needs_c = pytest.mark.skipif(libraries.find_compiler() is None, reason="needs a C compiler: CC, cc, gcc or clang")
SEARCHED = [
    GridScheme(4, strategy="channel"), GridScheme(4, symmetric=False, strategy="channel"), BlockFloat(4),
    BlockFloat(4, group_size=16, scales="e4m3", global_scale=300.0),
]  # fmt: skip
ROWS = [1, 31, 32, 33, 300, 1100]


@needs_c
def test_the_source_compiles_here() -> None:
    assert native.usable()


def problem(rows: int, columns: int, seed: int, zero: bool, masked: bool):
    """Weights `[columns, rows]`, a Hessian, a 3-bit grid in groups of 24 and a mask."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns, generator=generator)
    x[:, 1:] += 0.6 * x[:, :-1]
    weight = torch.randn(columns, rows, generator=generator)
    scheme = GridScheme(bits=3, type="int", symmetric=not zero, strategy="group", group_size=24)
    grid = stacked_grid([weight.T], scheme, torch.float32, "minmax", None, x.T @ x)
    mask = torch.rand(columns, rows, generator=generator) > 0.4 if masked else None
    return weight, x.T @ x / x.shape[0], grid, mask


def column_grid(grid: Grid, columns: int) -> loop.ColumnGrid:
    return loop.ColumnGrid(grid.map(torch.clone), grid.group_of(columns).tolist())


@needs_c
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("zero", "masked"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_column_loop_is_that_of_torch(rows: int, zero: bool, masked: bool, monkeypatch) -> None:
    columns = 70
    weight, hessian, grid, mask = problem(rows, columns, rows, zero, masked)
    factor = factorize(hessian, torch.arange(columns), 0.01)
    found = {}
    for kind in ("c", "torch"):
        if kind == "torch":
            monkeypatch.setattr(native, "usable", lambda *_: False)
        found[kind] = loop.run(weight.clone(), factor, column_grid(grid, columns), mask, block=32)
    ours, plain = found["c"], found["torch"]
    # A value between two codes may go either way, and the later columns of its row with it.
    same = (ours.codes == plain.codes).all(0)
    assert same.float().mean() > 0.97 or rows < 40
    torch.testing.assert_close(ours.error[:, same], plain.error[:, same], rtol=1e-3, atol=1e-4)
    values = grid.values(ours.codes.float())
    if mask is not None:
        values *= mask
    torch.testing.assert_close(weight - ours.error, values, rtol=1e-4, atol=1e-4)
    # In every row, ties or not: each code is the nearest to what float64 says its column should be, given all that was lost before.
    triangle = factor.corner(0, columns).double()
    scale = grid.scale.double()[grid.group_of(columns)]
    for solution in (ours, plain):
        wanted = weight.double() + (triangle.tril(-1) / triangle.diagonal()[:, None]) @ solution.error.double()
        taken = grid.values(solution.codes.float()).double()
        nearest = grid.values(grid.codes(wanted.float())).double()
        slack = (wanted - taken).abs() - (wanted - nearest).abs()
        assert (slack[slice(None) if mask is None else mask] <= 1e-3 * (scale if mask is None else scale[mask])).all()


@needs_c
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("zero", "masked"), [(False, False), (True, True)])
def test_refinement_is_that_of_torch_and_says_the_error_it_leaves(rows, refit, zero, masked, monkeypatch) -> None:
    columns = 130
    weight, hessian, grid, mask = problem(rows, columns, rows, zero, masked)
    start = grid.codes(weight)
    errors = {}
    for kind in ("c", "torch"):
        if kind == "torch":
            monkeypatch.setattr(native, "usable", lambda *_: False)
        here = grid.map(torch.clone)
        codes = start.to(torch.int8)
        values = here.values(start) if mask is None else here.values(start) * mask
        error = weight - values
        before = column_errors(error, hessian)
        lost = refine(error, codes, here, mask, hessian, torch.float32, 2, refit)
        after = here.values(codes.float()) if mask is None else here.values(codes.float()) * mask
        exact = (weight - after).double()
        torch.testing.assert_close(error, weight - after, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lost.double(), ((hessian.double() @ exact) * exact).sum(0), rtol=1e-3, atol=1e-4)
        assert (lost <= before * (1 + 1e-4) + 1e-5).all()
        errors[kind] = lost
    torch.testing.assert_close(errors["c"].sum(), errors["torch"].sum(), rtol=2e-2, atol=1e-3)


@pytest.mark.sampled(6, 15)
@needs_c
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [5, 128, 1300])
@pytest.mark.parametrize("scheme", SEARCHED, ids=GridScheme.describe)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_grid_search_finds_the_smallest_error(rows: int, width: int, scheme: GridScheme, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    groups = torch.randn(rows, width, generator=generator)
    cost = torch.rand(width, generator=generator) if weighted else None
    tried = grids.candidate_grids(groups, scheme, torch.bfloat16, "mse")
    scales, zeros = tried.scale, tried.zero
    best = native.search_grid(groups.T.contiguous(), cost, scales, zeros, scheme.code_range, scheme.rounding)
    low, high = scheme.code_range
    errors = []
    for i, scale in enumerate(scales.double()):
        shift = torch.zeros_like(scale) if zeros is None else zeros[i].double()
        # float32 division, as both versions do it; everything after it in float64
        codes = scheme.round_(groups / scales[i][:, None]).double() + shift[:, None]
        value = (codes.clamp(low, high) - shift[:, None]) * scale[:, None]
        square = (value - groups.double()).square()
        errors.append((square if cost is None else square * cost).sum(1))
    every = torch.stack(errors)
    chosen = every.gather(0, best[None])[0]
    assert (chosen <= every.amin(0) * (1 + 1e-5)).all()
    plain = grids.search_candidates(groups, tried, cost)
    assert (every.gather(0, plain[None])[0] <= every.amin(0) * (1 + 1e-5)).all()


@needs_c
def test_the_number_of_threads_changes_nothing() -> None:
    weight, hessian, grid, _ = problem(1500, 64, 0, True, False)
    factor = factorize(hessian, torch.arange(64), 0.01)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            work, error = weight.clone(), torch.zeros_like(weight)
            codes = torch.empty(weight.shape, dtype=torch.int8)
            corner = factor.corner(0, 64)
            upper = torch.linalg.inv(corner.double()).float().T
            group = torch.arange(64) // 24
            native.round_block(
                work, error, codes, None, 0, 64, upper, corner.diagonal().contiguous(), grid.scale, grid.zero, group, (-4.0, 3.0), False
            )  # fmt: skip
            found.append((work, error, codes))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def fresh(path: Path):
    libraries._library.cache_clear()
    try:
        return libraries.library(path)
    finally:
        libraries._library.cache_clear()


def test_without_c_everything_runs_in_torch(monkeypatch, tmp_path, caplog) -> None:
    source = tmp_path / "thing.c"
    source.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COMPRESS_NATIVE", "0")
    assert fresh(source) is None
    monkeypatch.setenv("COMPRESS_NATIVE", "1")
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with caplog.at_level(logging.WARNING, "compress.native"):
        assert fresh(source) is None
    assert "runs in torch" in caplog.text


@needs_c
def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path) -> None:
    source = tmp_path / "thing.c"
    source.write_text("int answer(void) { return 42; }\n")
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "file"))
    found = fresh(source)
    assert found is not None
    assert found.answer() == 42


@needs_c
def test_wrong_matrices_are_refused_before_c_sees_them() -> None:
    good = torch.zeros(8, 40)
    codes, group, ones = torch.zeros(8, 40, dtype=torch.int8), torch.zeros(8, dtype=torch.int64), torch.ones(8)
    scale = torch.ones(1, 40)

    def call(work, error=good):
        native.round_block(work, error, codes, None, 0, 8, torch.eye(8), ones, scale, None, group, (-8.0, 7.0), False)

    call(good.clone())
    for bad in (good.double(), torch.zeros(40, 8).T):
        with pytest.raises(TypeError, match="contiguous"):
            call(bad)


@needs_c
def test_a_library_is_compiled_once_and_a_broken_source_is_said(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "thing.c"
    source.write_text("int answer(void) { return 42; }\n")
    first = fresh(source)
    assert first is not None
    assert first.answer() == 42
    built = list((tmp_path / "cache" / "native").iterdir())
    stamp = built[0].stat().st_mtime_ns
    assert fresh(source) is not None
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache" / "native").iterdir()] == [stamp]
    source.write_text("int answer(void) { return 43; }\n")
    again = fresh(source)
    assert again is not None
    assert again.answer() == 43, "a changed source is another library"
    source.write_text("this is not C\n")
    with caplog.at_level(logging.WARNING, "compress.native"):
        assert fresh(source) is None
    assert "could not be compiled" in caplog.text
