"""float32 products by all of AVX-512: as exact as torch's own, only on CPUs that need it, and only for as long as asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.core import tensors
from compress.core.method import Problem
from compress.core.tensors import relative, wide_products
from compress.weights import packed_layer
from compress.weights.solver.compensate import LayerResult
from runtime.system import processes

AMD = frozenset({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"})


def setting() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test finds out anew what the CPU is."""
    found = tensors._onednn_is_wider
    found.cache_clear()
    yield
    found.cache_clear()


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    def pretend(vendor: str, flags: frozenset[str]) -> None:
        monkeypatch.setattr(processes, "flags", lambda: flags)
        monkeypatch.setattr(processes, "facts", lambda *names: [f"vendor_id\t: {vendor}"])

    return pretend


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 7, 3), (33, 130, 257), (128, 1000, 77), (300, 17, 5), (640, 2048, 1408)]
)
def test_products_stay_exact(rows: int, inner: int, columns: int) -> None:
    one, other, before = (torch.randn(size) for size in ((rows, inner), (inner, columns), (rows, columns + 2)))
    turned = torch.randn(inner, rows).T
    with wide_products():
        found = one @ other
        strided = before.clone()
        strided[:, 1:-1].addmm_(turned, other, alpha=-2)
        batched = torch.bmm(one.expand(3, -1, -1), other.expand(3, -1, -1))
    exact = one.double() @ other.double()
    assert relative(found, exact) < 2e-6
    assert relative(batched[2], exact) < 2e-6
    assert relative(strided[:, 1:-1], before[:, 1:-1].double() - 2 * turned.double() @ other.double()) < 2e-6
    assert torch.equal(strided[:, [0, -1]], before[:, [0, -1]])


def test_the_setting_lasts_as_long_as_it_is_asked_for(cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu("AuthenticAMD", AMD)
    monkeypatch.setattr(tensors, "relative", lambda value, reference: 3e-7)
    before = setting()
    within = []

    @wide_products()
    def fail() -> None:
        within.append(setting())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert within == ["bf16"]
    assert setting() == before


def test_layers_are_solved_with_wide_products(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, within, before = packed_layer.solve_group, [], setting()

    def solve_group(problem: Problem) -> list[LayerResult]:
        within.append(setting())
        return real(problem)

    request = recipe(make_checkpoint(), {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}})
    monkeypatch.setattr(packed_layer, "solve_group", solve_group)
    monkeypatch.setattr(tensors, "_onednn_is_wider", lambda: True)
    compress.apply(request, output=tmp_path / "out", quiet=True)
    assert within
    assert set(within) == {"bf16"}
    assert setting() == before


@pytest.mark.parametrize(
    ("vendor", "flags", "lost"),
    [
        ("GenuineIntel", AMD, 3e-7),  # MKL uses AVX-512 there
        ("AuthenticAMD", frozenset({"avx2"}), 3e-7),
        ("AuthenticAMD", AMD | {"amx_bf16"}, 3e-7),  # oneDNN would round to bfloat16
        ("AuthenticAMD", AMD, 2e-3),  # it does so all the same
    ],
)
def test_other_cpus_compute_as_before(cpu, monkeypatch: pytest.MonkeyPatch, vendor: str, flags, lost: float) -> None:
    cpu(vendor, flags)
    monkeypatch.setattr(tensors, "relative", lambda value, reference: lost)
    before = setting()
    with wide_products():
        assert setting() == before
    assert setting() == before
