"""Parts of stored weights: what is cut out of a format's tensors is exactly those rows or columns of the matrix."""

from __future__ import annotations

import random

import pytest
import torch
from weight_cases import random_weight

from runtime import formats
from runtime.errors import RequestError
from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.block_float import BlockFloat
from runtime.formats.cut import Cut
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.float8_block import Float8Block
from runtime.formats.grid import GridScheme
from runtime.formats.input_transform import InputTransform
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis
from runtime.layers.compressed_linear import CompressedLinear

BFLOAT = torch.bfloat16
TOKEN = ActivationScheme(8, "int", True, True, "token")
#: Format, scheme, rows and columns of the matrix. Those that may be ragged are.
CASES: dict[str, tuple[str, Scheme, tuple[int, int]]] = {
    **{
        f"int{bits} {'symmetric' if symmetric else 'asymmetric'} g32": (
            "packed",
            Scheme(GridScheme(bits, "int", symmetric, "group", 32)),
            (203, 329),
        )
        for bits in range(2, 9)
        for symmetric in (True, False)
    },
    "int4 g128, read by others": ("pack-quantized", Scheme(GridScheme(4, "int", False, "group", 128)), (77, 768)),
    "int4 channel": ("pack-quantized", Scheme(GridScheme(4, "int", False, "channel")), (77, 413)),
    "int4 tensor": ("packed", Scheme(GridScheme(4, "int", False, "tensor")), (77, 413)),
    "W8A8": ("int-quantized", Scheme(GridScheme(8, "int", True, "channel"), TOKEN), (41, 67)),
    "float8": ("float-quantized", Scheme(GridScheme(8, "float", True, "channel")), (41, 67)),
    "float8 blocks": ("float-quantized", Scheme(Float8Block(8, 16, 32)), (75, 141)),
    "2:4 int4": ("sparse24", Scheme(GridScheme(4, "int", True, "group", 64), None, "2:4"), (33, 356)),
    "2:4 int3": ("sparse24", Scheme(GridScheme(3, "int", False, "channel"), None, "2:4"), (67, 396)),
    "2:4 floats": ("sparse24", Scheme(None, None, "2:4"), (33, 356)),
    "mxfp4": ("mxfp4-pack-quantized", Scheme(BlockFloat(4)), (19, 256)),
    "mxfp8": ("mxfp8-quantized", Scheme(BlockFloat(8)), (19, 256)),
    "nvfp4": ("nvfp4-pack-quantized", Scheme(BlockFloat(4, group_size=16, scales="e4m3")), (19, 256)),
    **{kind: ("k_quant", Scheme(KQuant(kind)), (9, 1024)) for kind in KINDS},
    "trellis": ("trellis", Scheme(Trellis(64)), (9, 256)),
    **{f"codebook {bits}": ("row_codebook", Scheme(RowCodebook(bits)), (33, 422)) for bits in (2, 3, 4)},
    "codebook groups": ("row_codebook", Scheme(RowCodebook(3, 48)), (9, 384)),
}  # fmt: skip


def pieces(total: int, unit: int, draw: random.Random) -> list[tuple[int, int]]:
    """Consecutive parts of 0 .. total - 1 that begin at multiples of `unit`; the last may be ragged."""
    places = range(unit, total - unit + 1, unit)
    assert len(places) > 0, f"one unit of {unit} is all that there is of {total}"
    inner = sorted(draw.sample(places, min(len(places), draw.randint(1, 3))))
    return list(zip([0, *inner], [*inner, total], strict=True))


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_matrix(name: str, axis: int) -> None:
    kind, scheme, shape = CASES[name]
    storage, seed = formats.get(kind), random.randrange(1 << 30)
    print("seed", seed)
    weight = random_weight(scheme, shape, seed=seed)
    tensors = storage.pack(weight)
    dense = storage.unpack(tensors, scheme, shape, BFLOAT).dequantize()
    torch.testing.assert_close(dense, weight.dequantize(), rtol=0, atol=0)
    found = []
    for start, stop in pieces(shape[axis], storage.unit(scheme, shape, BFLOAT, axis), random.Random(seed)):
        cut = Cut(shape, axis, start, stop)
        part = {key: tensors[key][index] for key, index in storage.cut(scheme, BFLOAT, cut).items() if key in tensors}
        if "weight_shape" in part:
            part["weight_shape"] = torch.tensor(cut.shape)
        found.append(storage.unpack(part, scheme, cut.shape, BFLOAT).dequantize())
        assert sum(each.nbytes for each in part.values()) < sum(each.nbytes for each in tensors.values())
    assert torch.equal(torch.cat(found, dim=axis).view(torch.int16), dense.view(torch.int16))


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] != "int-quantized"])
def test_a_unit_is_not_torn(name: str, axis: int) -> None:
    kind, scheme, shape = CASES[name]
    storage = formats.get(kind)
    unit = storage.unit(scheme, shape, BFLOAT, axis)
    if unit > 1:
        with pytest.raises(RequestError, match=f"{kind}.* 0 to {unit - 1} are stored together"):
            storage.cut(scheme, BFLOAT, Cut(shape, axis, unit - 1, shape[axis]))


def test_groups_of_inputs_stay_together() -> None:
    scheme = Scheme(GridScheme(4, "int", True, "group", 32), ActivationScheme(4, "int", True, True, "group", 48))
    assert formats.get("packed").unit(scheme, (8, 192), BFLOAT, 1) == 96
    assert formats.get("packed").unit(scheme, (8, 192), BFLOAT, 0) == 1


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_matrices_of_inputs_go_to_every_part(axis: int) -> None:
    """The products of the parts, beside one another or added up, are that of the whole."""
    scheme = Scheme(GridScheme(4, "int", True, "group", 16), transform=InputTransform("hadamard_groups", 32))
    storage, x = formats.get("packed"), torch.randn(5, 192)
    tensors = storage.pack(
        random_weight(scheme, (24, 192), torch.float32), input_right=torch.linalg.qr(torch.randn(32, 32)).Q.half()
    )
    whole = CompressedLinear.from_tensors(ModuleEntry(scheme, "packed"), (24, 192), tensors, None, torch.float32)
    unit = storage.unit(scheme, (24, 192), torch.float32, axis)
    assert unit == (1 if axis == 0 else 32)
    found = []
    for start, stop in ((0, unit), (unit, (24, 192)[axis])):
        cut = Cut((24, 192), axis, start, stop)
        part = {key: tensors[key][index].contiguous() for key, index in storage.cut(scheme, torch.float32, cut).items()}
        part["weight_shape"] = torch.tensor(cut.shape)
        layer = CompressedLinear.from_tensors(ModuleEntry(scheme, "packed"), cut.shape, part, None, torch.float32)
        found.append(layer(x if axis == 0 else x[:, start:stop]))
    torch.testing.assert_close(torch.cat(found, 1) if axis == 0 else sum(found), whole(x), rtol=1e-4, atol=1e-4)


def test_what_mixes_all_inputs_is_cut_along_outputs_alone() -> None:
    scheme = Scheme(GridScheme(4, "int", True, "group", 16), transform=InputTransform("flatquant"))
    storage = formats.get("packed")
    assert storage.cut(scheme, BFLOAT, Cut((24, 192), 0, 8, 16))["input_left"] == (slice(None), slice(None))
    with pytest.raises(RequestError, match="input transform flatquant mixes or reorders all columns"):
        storage.unit(scheme, (24, 192), BFLOAT, 1)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("dfloat11", Scheme(DFloat11())),
        ("ternary_dictionary", Scheme(TernaryDictionary())),
        ("bitmap", Scheme(GridScheme(4, "int", True, "channel"), None, "unstructured")),
    ],
)
def test_streams_cannot_be_cut(kind: str, scheme: Scheme) -> None:
    with pytest.raises(RequestError, match=f"format {kind} cannot be cut"):
        formats.get(kind).unit(scheme, (16, 64), BFLOAT, 0)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_outliers_cannot_be_cut(axis: int) -> None:
    """A rank has some columns of o and down, and the outliers of a row are numbered by the columns of the whole."""
    with pytest.raises(RequestError, match=r"row_codebook cannot be cut: `outliers` .* compress with outliers: 0"):
        formats.get("row_codebook").unit(Scheme(RowCodebook(4, None, 0.01)), (16, 64), BFLOAT, axis)


def test_columns_of_8_bits_cannot_be_cut() -> None:
    activations = ActivationScheme(4, strategy="group", group_size=32, int8_tail=32)
    with pytest.raises(RequestError, match="the last 32 columns have 8 bits"):
        formats.get("packed").unit(Scheme(GridScheme(4, "int", True, "group", 32), activations), (16, 128), BFLOAT, 1)
