"""Weights in the words of ONNX: exact where they are said to be, refused or rounded anew where not; packing against ONNX's own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export.onnx_graph.grid import ONNX, TENSORRT, Grid, Rules, fit, to_grid, why_not
from export.onnx_graph.matmul_nbits import packed, packed_zero_points
from runtime.errors import RequestError
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme


def weight(
    rows: int, columns: int, scheme: GridScheme, seed: int = 0, lowest: bool = True, negative: bool = True
) -> CompressedWeight:
    generator = torch.Generator().manual_seed(seed)
    if scheme.type == "float":
        values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    else:
        low, high = scheme.code_range
        values = torch.randint(low if lowest else low + 1, high + 1, (rows, columns), generator=generator).to(
            torch.int8
        )
    groups = scheme.groups(columns)
    shape = (1,) if scheme.strategy == "tensor" else (rows, groups)
    scale = (torch.rand(shape, generator=generator) * 0.1 + 0.01).to(torch.bfloat16)
    if negative and scheme.symmetric and scheme.type == "int":
        scale = scale * torch.where(torch.rand(shape, generator=generator) < 0.5, -1, 1)
    zero = None
    if not scheme.symmetric:
        low, high = scheme.code_range
        zero = torch.randint(low, high + 1, shape, generator=generator).to(torch.int8)
    return CompressedWeight(values, scale.to(torch.bfloat16), zero, None, Scheme(scheme), torch.float32)


def dequantized(grid: Grid) -> torch.Tensor:
    """float32 `[K, N]` of a weight as ONNX stores it."""
    codes, scale, zero = grid.codes.float(), grid.scale.float(), grid.zero_point
    if grid.block is not None:
        rows = torch.arange(len(codes)) // grid.block
        scale, zero = scale[rows], None if zero is None else zero[rows]
    return (codes if zero is None else codes - zero.float()) * scale


def dense(of: CompressedWeight) -> torch.Tensor:
    """`[K, N]` float32, computed entry by entry from the definition."""
    scheme = of.scheme.weights
    assert scheme is not None
    assert of.scale is not None
    rows, columns = of.values.shape
    group = columns if scheme.strategy != "group" else scheme.group_size
    assert group is not None
    column = torch.arange(columns) // group
    scale = of.scale.float().reshape(1, 1).expand(rows, 1) if scheme.strategy == "tensor" else of.scale.float()
    codes = of.values.float()
    if of.zero_point is not None:
        zero = (
            of.zero_point.float().reshape(1, 1).expand(rows, 1)
            if scheme.strategy == "tensor"
            else of.zero_point.float()
        )
        codes = codes - zero[:, column]
    return (codes * scale[:, column]).t()


int_schemes = st.builds(
    GridScheme,
    bits=st.integers(2, 8),
    type=st.just("int"),
    symmetric=st.booleans(),
    strategy=st.just("group"),
    group_size=st.sampled_from([16, 32, 64, 128, 256, 512]),
) | st.builds(
    GridScheme,
    bits=st.integers(2, 8),
    type=st.just("int"),
    symmetric=st.booleans(),
    strategy=st.sampled_from(["channel", "tensor"]),
)


@settings(max_examples=60, deadline=None)
@given(
    scheme=int_schemes,
    rows=st.integers(1, 40),
    columns=st.sampled_from([16, 48, 64, 100, 128, 192, 256, 384]),
    seed=st.integers(0, 9),
)
def test_what_onnx_can_say_is_exact(scheme: GridScheme, rows: int, columns: int, seed: int) -> None:
    given_weight = weight(rows, columns, scheme, seed)
    if why_not(scheme, (rows, columns), ONNX) is not None:
        with pytest.raises(RequestError, match="requantize"):
            to_grid(given_weight, ONNX, False, "layer")
        return
    grid = to_grid(given_weight, ONNX, False, "layer")
    assert grid.bits == (4 if scheme.bits <= 4 else 8)
    assert grid.loss == 0
    assert torch.equal(dequantized(grid), dense(given_weight))
    if grid.block is not None:
        assert grid.scale.shape == (-(-columns // grid.block), rows)
        assert grid.block in ONNX.blocks


@settings(max_examples=60, deadline=None)
@given(
    scheme=int_schemes,
    rows=st.integers(1, 20),
    columns=st.sampled_from([64, 96, 128, 256]),
    lowest=st.booleans(),
    seed=st.integers(0, 9),
)
def test_tensorrt_is_exact_or_refuses(scheme: GridScheme, rows: int, columns: int, lowest: bool, seed: int) -> None:
    given_weight = weight(rows, columns, scheme, seed, lowest)
    low = scheme.code_range[0]
    negative = given_weight.scale is not None and bool((given_weight.scale < 0).any())
    if why_not(scheme, (rows, columns), TENSORRT) is not None:
        with pytest.raises(RequestError, match=r"\blayer\b"):
            to_grid(given_weight, TENSORRT, False, "layer")
        return
    if scheme.bits in (4, 8) and negative and bool((given_weight.values == low).any()):
        try:
            grid = to_grid(given_weight, TENSORRT, False, "layer")
        except RequestError:
            return  # a code without an opposite under a negative scale
    else:
        grid = to_grid(given_weight, TENSORRT, False, "layer")
    assert torch.equal(dequantized(grid), dense(given_weight))
    assert bool((grid.scale > 0).all())
    assert grid.zero_point is None
    assert grid.block in (None, 64, 128)
    assert grid.block is None or columns % grid.block == 0


def test_tensorrt_refuses_zero_points_small_groups_and_signs() -> None:
    for scheme, word in (
        (GridScheme(4, "int", False, "group", 128), "zero points"),
        (GridScheme(4, "int", True, "group", 32), "groups of 32"),
        (GridScheme(6, "int", True, "group", 64), "6-bit groups"),
    ):
        assert word in str(why_not(scheme, (16, 256), TENSORRT))
        with pytest.raises(RequestError, match="requantize"):
            to_grid(weight(16, 256, scheme), TENSORRT, False, "layer")
    # A negative scale is turned around unless a code has no opposite.
    scheme = GridScheme(4, "int", True, "group", 128)
    kept = to_grid(weight(16, 256, scheme, lowest=False), TENSORRT, False, "layer")
    assert bool((kept.scale > 0).all())
    with pytest.raises(RequestError, match="scales: positive"):
        to_grid(weight(16, 256, scheme, lowest=True), TENSORRT, False, "layer")


@pytest.mark.parametrize(
    "scheme",
    [
        GridScheme(4, "int", False, "group", 32),
        GridScheme(3, "int", True, "group", 128),
        GridScheme(8, "int", True, "group", 64),
    ],
)
def test_rounding_anew_keeps_to_the_rules_and_tells_the_loss(scheme: GridScheme) -> None:
    given_weight = weight(24, 256, scheme)
    grid = to_grid(given_weight, TENSORRT, True, "layer")
    wanted, got = dense(given_weight), dequantized(grid)
    loss = float((got - wanted).norm() / wanted.norm())
    assert bool((grid.scale > 0).all())
    assert grid.zero_point is None
    assert grid.loss == pytest.approx(loss, rel=1e-3, abs=1e-6)
    # Uniform codes rounded to as many bits: at most a good part of half a step off, on average.
    assert loss < (0.12 if grid.bits == 4 else 0.02)


@pytest.mark.parametrize(
    ("scheme", "shape", "rules", "words"),
    [
        (GridScheme(4, "int", True, "group", 128), (8, 256), ONNX, "None"),
        (GridScheme(4, "int", True, "group", 512), (8, 1024), ONNX, "groups of 512 become blocks of 256"),
        (GridScheme(3, "int", True, "group", 64), (8, 256), ONNX, "int3 codes become int4 codes"),
        (GridScheme(4, "int", True, "channel"), (8, 256), TENSORRT, "blocks of 128"),
    ],
)
def test_conversions_are_said(scheme: GridScheme, shape: tuple[int, int], rules: Rules, words: str) -> None:
    said = fit(scheme, shape, rules)
    assert said.exact
    assert words in str(said.what)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns", "block"), [(64, 3, 16), (100, 5, 32), (256, 8, 128), (48, 1, 64)])
def test_packing_for_matmul_nbits(bits: int, rows: int, columns: int, block: int) -> None:
    """Against a reader that takes one code at a time."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = torch.randint(low, high + 1, (rows, columns), dtype=torch.int8)
    stored = packed(codes, block, bits)
    assert stored.shape == (columns, -(-rows // block), block * bits // 8)
    flat = stored.reshape(columns, -1)
    for k in range(rows):
        for n in range(columns):
            byte = int(flat[n, k * bits // 8])
            value = byte if bits == 8 else (byte >> 4 if k % 2 else byte & 15)
            assert value - (1 << (bits - 1)) == int(codes[k, n])


def test_packed_zero_points() -> None:
    zero = torch.tensor([[-8, 7], [0, 1], [3, -1]], dtype=torch.int8)  # [blocks, N]
    assert packed_zero_points(zero, 4).tolist() == [[0x80, 0x0B], [0x9F, 0x07]]
    assert packed_zero_points(zero, 8).tolist() == [[120, 128, 131], [135, 129, 127]]


def test_int4_file_layout_is_what_onnx_reads(tmp_path) -> None:  # type: ignore[no-untyped-def]
    onnx = pytest.importorskip("onnx")
    ir = pytest.importorskip("onnx_ir")
    from export.onnx_graph.store import DataFile, Store

    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    model = ir.Model(graph, ir_version=10)
    data = DataFile(tmp_path, "w.data")
    store = Store(model, data)
    codes = torch.randint(-8, 8, (7, 9), dtype=torch.int8)
    big = torch.randn(64, 1024)
    half = torch.randn(4, 1000).to(torch.bfloat16)
    store.add("codes", codes, 4)
    store.add("big", big)
    store.add("half", half)
    data.close()
    ir.save(model, str(tmp_path / "m.onnx"))
    read = {
        t.name: onnx.numpy_helper.to_array(t, str(tmp_path))
        for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer
    }
    assert np.array_equal(read["codes"].astype(np.int8), codes.numpy())
    assert np.array_equal(read["big"], big.numpy())
    assert np.array_equal(read["half"].astype(np.float32), half.float().numpy())
