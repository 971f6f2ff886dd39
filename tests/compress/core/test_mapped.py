"""Matrices in files: they hold what they are given, take no memory that is not at hand, leave nothing, and give the same bits."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch

from compress.core import file_matrix
from compress.core.method import Problem
from compress.core.statistics import Statistics, StatisticsCollector
from compress.prune import METHODS as PRUNE
from compress.quantize import METHODS as QUANTIZE
from compress.quantize import resolve_scheme
from compress.weights.solver import factor
from compress.weights.solver.factor import factorize
from compress.weights.solver.group import solve_group
from runtime.errors import CompressError

pytestmark = pytest.mark.skipif(not file_matrix.AVAILABLE, reason="this system cannot let go of mapped pages")


def collected(columns: int, directory: Path | None, tokens: int = 300) -> Statistics:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, 1:] += 0.6 * x[:, :-1]
    collector = StatisticsCollector(columns, directory=directory)
    for part in x.split(128):
        collector.add(part)
    return collector.finish()


def test_a_matrix_in_a_file_keeps_its_values_and_leaves_no_name(tmp_path: Path) -> None:
    matrix = file_matrix.zeros(300, 7, directory=tmp_path)
    values = torch.randn(300, 7)
    matrix.copy_(values)
    view = matrix[100:].T
    file_matrix.let_go(view)
    assert torch.equal(matrix, values)
    assert file_matrix.is_mapped(view)
    assert not file_matrix.is_mapped(values)
    assert list(tmp_path.iterdir()) == []
    other = file_matrix.empty_like(matrix)
    assert file_matrix.is_mapped(other)
    assert not file_matrix.is_mapped(file_matrix.empty_like(values))
    held = len(file_matrix._maps)
    del matrix, view
    gc.collect()
    assert len(file_matrix._maps) == held - 1


def test_what_is_let_go_is_not_resident(tmp_path: Path) -> None:
    matrix = file_matrix.zeros(4096, 4096, directory=tmp_path)  # 64 MiB
    process = psutil.Process()
    before = process.memory_info().rss
    matrix.fill_(1.0)
    assert process.memory_info().rss > before + 48 * 2**20
    file_matrix.let_go(matrix)
    assert process.memory_info().rss < before + 16 * 2**20
    assert float(matrix[4095, 4095]) == 1.0


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        file_matrix.zeros(1 << 26, 1 << 26, directory=tmp_path)  # 16 PiB


@pytest.mark.parametrize("columns", [1, 48, 700, 1030])
def test_statistics_in_a_file_have_the_same_bits(columns: int, tmp_path: Path) -> None:
    here, there = collected(columns, None), collected(columns, tmp_path)
    assert there.hessian is not None
    assert file_matrix.is_mapped(there.hessian)
    assert torch.equal(here.hessian, there.hessian)
    scale = torch.rand(columns) + 0.5
    assert torch.equal(here.scaled(scale).hessian, there.scaled(scale).hessian)
    assert file_matrix.is_mapped(there.scaled(scale).hessian)


def test_sums_in_files_can_be_pooled(tmp_path: Path) -> None:
    x = torch.randn(64, 600, generator=torch.Generator().manual_seed(1))
    here, there = StatisticsCollector(600), StatisticsCollector(600, directory=tmp_path)
    for collector in (here, there):
        collector.add(x)
        collector.pool(lambda tensor, kind: tensor.mul_(2) if kind == "sum" else tensor, 0, 2)  # two of the same
    assert torch.equal(here.finish().hessian, there.finish().hessian)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 48, 101])
def test_the_factor_is_that_of_lapack(columns: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(factor, "PANEL", 16)
    monkeypatch.setattr(file_matrix, "PANEL", 5)
    hessian, order = collected(columns, None).hessian, torch.randperm(columns)
    found = factorize(hessian, order, 0.01)
    damped = hessian[order][:, order] + 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    whole = found.corner(0, columns)
    torch.testing.assert_close(whole.T @ whole, damped, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole, whole.tril())
    lower = torch.linalg.cholesky(damped.flip(0, 1).double())
    torch.testing.assert_close(whole.double(), lower.flip(0, 1).T, rtol=1e-4, atol=1e-4)
    start, end = columns // 3, columns // 3 * 2
    assert torch.equal(found.panel(start, end), whole[start:end, :start])
    assert torch.equal(found.diagonal, whole.diagonal())
    in_file = file_matrix.zeros(columns, columns, directory=tmp_path)
    in_file.copy_(hessian)
    again = factorize(in_file, order, 0.01)
    assert file_matrix.is_mapped(again.reversed_upper)
    assert torch.equal(again.corner(0, columns), whole)
    # |S e|^2 of a sketch S estimates |T e|^2.
    error = torch.randn(columns, 64)
    ratio = (again.sketch(512) @ error).square().sum() / (whole @ error).square().sum()
    assert 0.8 < float(ratio) < 1.2


def test_a_matrix_that_is_not_positive_definite_is_damped_and_then_refused(monkeypatch) -> None:
    monkeypatch.setattr(factor, "PANEL", 16)
    wrong = torch.eye(40)
    wrong[30, 30] = -0.05
    order = torch.arange(40)
    assert factorize(wrong, order, 0.01).retries == 1
    wrong[30, 30] = -100
    wrong[0, 0] = 200
    with pytest.raises(CompressError):
        factorize(wrong, order, 0.01)


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        (None, {}),
        (None, {"sweeps": 2, "refit_scales": True, "symmetric": False}),
        (None, {"scales": "hessian", "order": "natural"}),
        ("2:4", {"sweeps": 1, "swaps": 1}),
    ],
)
def test_weights_solved_on_a_file_have_the_same_bits(pattern, fields, tmp_path: Path) -> None:
    columns = 640
    w = [torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) for rows in (24, 40)]
    prune = None if pattern is None else PRUNE["sparsegpt"].config(pattern=pattern, swaps=1)
    config = QUANTIZE["gptq"].config(bits=4, group_size=64, **{k: v for k, v in fields.items() if k != "swaps"})
    scheme = resolve_scheme(config, pattern)
    solved = [
        solve_group(Problem(w, collected(columns, directory), prune, config, scheme, torch.bfloat16))
        for directory in (None, tmp_path)
    ]
    for here, there in zip(*solved, strict=True):
        assert torch.equal(here.weight.values, there.weight.values)
        assert torch.equal(here.weight.scale, there.weight.scale)
        assert here.error == there.error
