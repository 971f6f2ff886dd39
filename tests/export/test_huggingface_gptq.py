"""The GPTQ layout bit by bit, exact changes of grids, and the safetensors writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from weight_cases import int_scheme, random_weight

from export.huggingface.gptq import pack
from export.huggingface.grids import group_for, reflect_low_zeros, regrid, union
from export.huggingface.proof import dequantize, unpack
from export.huggingface.shards import Part, write
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.formats import TensorSpec
from runtime.formats.scheme import CompressedWeight, GridScheme

# rows and columns that fill whole words, the smallest among them; groups: a size, or one a row
SHAPES = [(32, 32, 32), (32, 64, 16), (96, 160, 32), (64, 96, "channel"), (8, 8, "channel")]

LAYOUTS = [
    (rows, columns, group, bits, first)
    for rows, columns, group in SHAPES
    for bits, first in ((4, True), (4, False), (8, True), (2, True), (3, True), (3, False))
    if rows * bits % 32 == columns * bits % 32 == 0  # the target refuses what fills no whole words
]


def _exact(weight: CompressedWeight) -> torch.Tensor:
    """Codes, scales and zero points in float64, element by element."""
    scheme, zero = weight.scheme.weights, weight.zero_point
    rows, columns = weight.values.shape
    width = scheme.group_size if scheme.strategy == "group" else columns
    out = torch.empty(rows, columns, dtype=torch.float64)
    for column in range(columns):
        group = 0 if scheme.strategy == "tensor" else column // width
        scale = weight.scale.double().reshape(-1, weight.scale.shape[-1])[:, group]
        offset = 0 if zero is None else zero.double().reshape(-1, zero.shape[-1])[:, group]
        out[:, column] = (weight.values[:, column].double() - offset) * scale
    return out


def _word_by_word(tensors: dict[str, torch.Tensor], bits: int, first: bool) -> torch.Tensor:
    """The layout as its description says, one code and one bit at a time, in Python's integers."""
    columns, rows = tensors["g_idx"].numel(), tensors["scales"].shape[1]

    def code(stream: list[int], index: int) -> int:
        found = [stream[bit // 32] >> bit % 32 & 1 for bit in range(index * bits, (index + 1) * bits)]
        return sum(bit << i for i, bit in enumerate(found))

    out = torch.empty(rows, columns, dtype=torch.float64)
    words = [[int(word) & 0xFFFFFFFF for word in column] for column in tensors["qweight"].T]
    zeros = [[int(word) & 0xFFFFFFFF for word in row] for row in tensors["qzeros"]]
    for row in range(rows):
        for column in range(columns):
            group = int(tensors["g_idx"][column])
            zero = code(zeros[group], row) + (1 if first else 0)
            out[row, column] = (code(words[row], column) - zero) * float(tensors["scales"][group, row])
    return out


@pytest.mark.parametrize(("rows", "columns", "group", "bits", "first"), LAYOUTS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_layout_is_what_its_description_says(
    rows: int, columns: int, group: int | str, bits: int, first: bool, symmetric: bool
) -> None:
    weight = random_weight(int_scheme(bits, symmetric, group), (rows, columns), torch.float16, seed=rows + bits)
    expected = _exact(weight)
    tensors = pack(reflect_low_zeros(weight) if first else weight, first)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32,
    }  # fmt: skip
    assert tensors["qweight"].shape == (columns * bits // 32, rows)
    assert tensors["qzeros"].shape == (weight.scale.shape[1], rows * bits // 32)
    assert torch.equal(_word_by_word(tensors, bits, first), expected)
    parts = [tensors[name].numpy() for name in ("qweight", "qzeros", "scales", "g_idx")]
    assert np.array_equal(dequantize(*parts, int(first)), expected.float().numpy())


def test_symmetric_four_bits_store_seven_as_every_reader_expects() -> None:
    tensors = pack(random_weight(int_scheme(4, True, 32), (32, 32), torch.float16), first=True)
    assert {int(word) & 0xFFFFFFFF for word in tensors["qzeros"].flatten()} == {0x77777777}


def test_a_zero_point_of_zero_is_refused_or_reflected_never_wrapped() -> None:
    weight = random_weight(int_scheme(4, False, 32), (32, 64), torch.float16)
    weight.zero_point[:, 0] = -8
    with pytest.raises(ValueError, match="reflect_low_zeros"):
        pack(weight, first=True)
    reflected = reflect_low_zeros(weight)
    assert int(reflected.zero_point.min()) > -8
    assert bool((reflected.scale[:, 0] < 0).all())
    assert torch.equal(_exact(reflected), _exact(weight))
    tensors = pack(weight, first=False)
    assert unpack(tensors["qzeros"].numpy(), 4, 32)[0].tolist() == [0] * 32


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("old", "goal"),
    [
        ((3, 48), GridScheme(4, "int", True, "group", 16)),
        ((2, "channel"), GridScheme(4, "int", True, "group", 32)),
        ((5, "tensor"), GridScheme(8, "int", True, "channel", None)),
        ((4, 64), GridScheme(8, "int", False, "group", 32)),
        ((4, 80), GridScheme(4, "int", True, "group", 16)),  # the last group of a row is shorter
    ],
)
def test_regridding_changes_no_weight(old: tuple[int, int | str], goal: GridScheme, symmetric: bool) -> None:
    bits, group = old
    weight = random_weight(int_scheme(bits, symmetric, group), (24, 96), torch.bfloat16)
    goal = GridScheme(goal.bits, "int", goal.symmetric and symmetric, goal.strategy, goal.group_size)
    assert holds(goal, weight.scheme.weights, 96)
    after = regrid(weight, goal)
    assert after.scheme.weights == goal
    assert torch.equal(_exact(after), _exact(weight))


def holds(outer: GridScheme, inner: GridScheme, columns: int) -> bool:
    """True when every weight on the grid `inner` lies on `outer` too (integer grids)."""
    if outer.type != "int" or inner.type != "int" or outer.bits < inner.bits:
        return False
    if outer.symmetric and not inner.symmetric:
        return False
    wide, narrow = ((g.group_size if g.strategy == "group" else None) or columns for g in (outer, inner))
    return outer.strategy != "tensor" and (inner.strategy == "tensor" or narrow % wide == 0 or narrow >= columns)


def test_union_holds_both() -> None:
    one, other = GridScheme(4, "int", True, "group", 128), GridScheme(8, "int", False, "channel", None)
    both = union([one, other], 256)
    assert both == GridScheme(8, "int", False, "group", 128)
    assert holds(both, one, 256)
    assert holds(both, other, 256)
    assert union([one, GridScheme(8, "float", True, "channel", None)], 256) is None


def test_group_for_prefers_what_kernels_know() -> None:
    assert [group_for(size, columns) for size, columns in ((256, 1024), (128, 192), (48, 96), (20, 100), (64, 64))] == [
        128, 64, 16 if 48 % 16 else 48, 20, 64,
    ]  # fmt: skip
    assert group_for(12, 96) is None


def test_files_are_what_safetensors_reads_and_no_larger_than_asked(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = {
        "a": torch.randn(7, 3).to(torch.bfloat16), "b": torch.arange(5, dtype=torch.int8), "c": torch.randn(4, dtype=torch.float64),
        "d": torch.randn(9).to(torch.float8_e4m3fn), "e": torch.tensor([3, 4]), "f": torch.empty(0, 4), "g": torch.tensor(2.5),
    }  # fmt: skip
    parts = [
        Part({name: TensorSpec(tuple(t.shape), t.dtype)}, lambda name=name, t=t: {name: t})  # type: ignore[misc]
        for name, t in made.items()
    ]
    for limit, count in ((10**9, 1), (60, 3)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        where = write(folder, parts, lambda name: None, limit)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == count == len(set(where.values()))
        loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert loaded.keys() == made.keys()
        for name, tensor in made.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        (folder / "config.json").write_text("{}")
        assert sorted(Checkpoint(folder).names()) == sorted(made)  # its index and ours agree
