"""Every format: exact inverse, exact sizes, the layout of compressed-tensors where it shares one, and loud errors."""

import itertools

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from weight_cases import int_scheme, random_mask, random_weight

from runtime import formats
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.formats.block_float import BlockFloat
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import ActivationScheme, CompressedWeight, GridScheme, Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis

SHAPES = [(7, 172), (16, 128), (5, 257), (1, 64), (16, 256)]
GRIDS = [
    GridScheme(bits, "int", symmetric, strategy, group)
    for bits, symmetric, (strategy, group) in itertools.product(
        range(2, 9), (True, False), (("group", 32), ("group", 48), ("channel", None), ("tensor", None))
    )
] + [
    GridScheme(8, "float", True, "channel"), GridScheme(8, "float", True, "tensor"),
    BlockFloat(4), BlockFloat(8), BlockFloat(4, group_size=16, scales="e4m3"), *map(KQuant, KINDS),
    *map(DFloat11, (2, 3, 4)), Trellis(16), Trellis(32),
    *map(RowCodebook, (2, 3, 4)), RowCodebook(3, 16), RowCodebook(2, 32, 0.02), RowCodebook(4, None, 0.05),
    *map(TernaryDictionary, (0.5, 0.885)),
]  # fmt: skip
PATTERNS = [None, "unstructured", "2:4", "1:4", "4:8", "3:16", "block:4x8"]


def fits_shape(sparsity, shape):
    if sparsity is None or ":" not in sparsity or sparsity.startswith("block"):
        return True
    return shape[1] % int(sparsity.split(":")[1]) == 0


def as_bytes(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@pytest.mark.parametrize("sparsity", PATTERNS)
@pytest.mark.parametrize("name", formats.names())
def test_unpack_is_the_exact_inverse_of_pack(name, sparsity):
    storage, stored = formats.get(name), 0
    for grid, shape, dtype in itertools.product([*GRIDS, None], SHAPES, (torch.bfloat16, torch.float32)):
        scheme = Scheme(grid, None, sparsity)
        if (grid is None and sparsity is None) or not fits_shape(sparsity, shape) or storage.why_not(scheme, shape):
            continue
        weight = random_weight(scheme, shape, dtype, seed=stored)
        tensors = storage.pack(weight)
        specs = storage.tensors(scheme, shape, dtype, storage.stored_count(tensors))
        assert {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()} == {
            k: (s.shape, s.dtype) for k, s in specs.items()
        }
        assert all(t.is_contiguous() for t in tensors.values())
        again = storage.unpack(tensors, scheme, shape, dtype)
        assert torch.equal(again.dequantize(), weight.dequantize()), (scheme, shape)
        assert again.values.dtype == weight.values.dtype
        if again.mask is not None:
            assert bool((again.mask | ~weight.mask).all())
        # Packing what was unpacked gives the same bytes: an artifact can be rewritten without change.
        for key, tensor in storage.pack(again).items():
            assert torch.equal(as_bytes(tensor), as_bytes(tensors[key])), key
        stored += 1
    some = {"sparse24": ("2:4", "1:4"), "bitmap": tuple(p for p in PATTERNS if p)}
    some |= dict.fromkeys(
        (
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
            "k_quant",
            "trellis",
            "row_codebook",
            "dfloat11",
            "ternary_dictionary",
        ),
        (None,),
    )
    assert (stored > 0) == (sparsity in some.get(name, tuple(PATTERNS)))


@pytest.mark.parametrize("name", formats.names())
def test_select_rows_is_the_matrix_of_these_rows(name):
    storage, done = formats.get(name), 0
    index = torch.tensor([5, 0, 0, 6, 2])
    for grid, sparsity in itertools.product([*GRIDS, None], (None, "unstructured", "2:4")):
        wide = 256 if isinstance(grid, KQuant) else 160 if isinstance(grid, BlockFloat | Trellis | RowCodebook) else 172
        scheme, columns = Scheme(grid, None, sparsity), wide
        if (grid is None and sparsity is None) or storage.why_not(scheme, (7, columns)):
            continue
        weight = random_weight(scheme, (7, columns), seed=done)
        picked = storage.select_rows(storage.pack(weight), scheme, (7, columns), index)
        small = storage.unpack(picked, scheme, (5, columns), torch.bfloat16)
        assert torch.equal(small.dequantize(), weight.dequantize()[index]), scheme
        done += 1
    assert done


def compressed_tensors_scheme(scheme):
    config = Scheme(scheme.weights, scheme.activations).to_config()
    return QuantizationScheme(targets=["Linear"], **config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["pack-quantized", "int-quantized", "float-quantized"])
def test_compressed_tensors_reads_what_we_write(name, dtype):
    storage, compressor, read = formats.get(name), BaseCompressor.get_value_from_registry(name), 0
    for grid, shape in itertools.product(GRIDS, SHAPES):
        scheme = Scheme(grid)
        if storage.why_not(scheme, shape) or (shape[0] == 1 and not grid.symmetric):
            continue  # their unpacking of one zero point fails on its strides
        weight = random_weight(scheme, shape, dtype, seed=read)
        tensors = storage.pack(weight)
        read_back = {key: t.clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}
        theirs = compressor.decompress(read_back, compressed_tensors_scheme(scheme))["weight"]
        assert theirs.dtype == dtype
        assert torch.equal(theirs, weight.dequantize()), (scheme, shape)
        # And they would write the same bytes. (They quantize again, which finds the codes only where the scale is not tiny.)
        zero = {} if weight.zero_point is None else {"weight_zero_point": weight.zero_point}
        state = {"weight": weight.dequantize().float(), "weight_scale": weight.scale.float(), **zero}
        written = compressor.compress(state, compressed_tensors_scheme(scheme))
        assert set(written) == set(tensors)
        for key in set(tensors) - {"weight_scale"}:
            if dtype == torch.float32:
                assert torch.equal(as_bytes(written[key]), as_bytes(tensors[key])), (key, scheme)
            assert written[key].shape == tensors[key].shape
            assert written[key].dtype == tensors[key].dtype
        read += 1
    assert read >= 4


def test_bits_a_weight():
    shape, dtype = (256, 1024), torch.bfloat16

    def bits(name, scheme):
        storage = formats.get(name)
        tensors = storage.pack(random_weight(scheme, shape, dtype))
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        density = 0.5 if scheme.sparsity else 1.0
        assert storage.bytes_estimate(scheme, shape, dtype, density) == pytest.approx(size, rel=0.02)
        return 8 * size / (shape[0] * shape[1])

    assert bits("sparse24", int_scheme(4, group=128, sparsity="2:4")) <= 3.2
    assert bits("sparse24", Scheme(None, None, "2:4")) <= 9.01
    assert bits("pack-quantized", int_scheme(3, group=128)) == pytest.approx(3.125, abs=0.01)
    assert bits("bitmap", int_scheme(4, group=128, sparsity="unstructured")) < 3.3
    assert bits("bitmap", int_scheme(4, sparsity="4:8")) < 3.2
    assert bits("bitmap", Scheme(None, None, "unstructured")) < 9.3


@pytest.mark.parametrize(
    ("sparsity", "rows", "columns"),
    [("unstructured", 9, 13), ("4:8", 3, 24), ("block:4x4", 12, 20), ("unstructured", 1, 1)],
)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bitmap_of_any_density(sparsity, rows, columns, density, symmetric):
    scheme = int_scheme(5, symmetric, "channel", sparsity)
    mask = random_mask("unstructured", (rows, columns), density=density)
    mask[:] = mask & (density > 0)
    if density == 1.0:
        mask[:] = True
    weight = random_weight(scheme, (rows, columns), torch.float32, mask=mask)
    storage = formats.get("bitmap")
    tensors = storage.pack(weight)
    again = storage.unpack(tensors, scheme, (rows, columns), torch.float32)
    assert torch.equal(again.mask, mask)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert storage.stored_count(tensors) == int(mask.sum())


def test_mask_may_be_left_out():
    scheme = int_scheme(4, False, 32, "2:4")
    weight = random_weight(scheme, (8, 64))
    bare = CompressedWeight(weight.values, weight.scale, weight.zero_point, None, scheme, weight.dtype)
    for name in ("sparse24", "bitmap"):
        storage = formats.get(name)
        again = storage.unpack(storage.pack(bare), scheme, (8, 64), torch.bfloat16)
        assert torch.equal(again.dequantize(), weight.dequantize())


# ---------------------------------------------------------------- choice
@pytest.mark.parametrize(
    ("scheme", "shape", "expected"),
    [
        (int_scheme(4, group=128), (64, 256), "pack-quantized"),
        (int_scheme(4, False, "tensor"), (64, 257), "pack-quantized"),
        (int_scheme(4, group=128), (64, 172), "packed"),
        (int_scheme(4, group=64, sparsity="2:4"), (64, 256), "sparse24"),
        (int_scheme(8, sparsity="1:4"), (64, 256), "bitmap"),
        (int_scheme(4, sparsity="4:8"), (64, 256), "bitmap"),
        (int_scheme(4, sparsity="7:8"), (64, 256), "pack-quantized"),
        (int_scheme(2, sparsity="unstructured"), (64, 256), "pack-quantized"),
        (int_scheme(4, sparsity="block:4x4"), (64, 256), "bitmap"),
        (Scheme(None, None, "2:4"), (64, 256), "sparse24"),
        (Scheme(None, None, "unstructured"), (64, 256), "bitmap"),
        (Scheme(GridScheme(8, "float", True, "channel")), (64, 256), "float-quantized"),
        (Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme()), (64, 256), "int-quantized"),
        (Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(), "2:4"), (64, 256), "int-quantized"),
        (Scheme(GridScheme(4, "int", True, "group", 128), ActivationScheme()), (64, 256), "int-quantized"),
        (Scheme(GridScheme(4, "int", True, "group", 128), ActivationScheme(4)), (64, 256), "pack-quantized"),
        (Scheme(GridScheme(4, "int", True, "group", 128), ActivationScheme()), (64, 172), "packed"),
        (Scheme(GridScheme(8, "float", True, "tensor"), ActivationScheme(8, "float")), (9, 7), "float-quantized"),
        (Scheme(GridScheme(4, "int", True, "channel"), ActivationScheme(8, "float")), (9, 7), "pack-quantized"),
        (Scheme(GridScheme(4, "int", False, "channel"), ActivationScheme(8, "float")), (9, 7), "packed"),
    ],
    ids=str,
)
def test_choose(scheme, shape, expected):
    assert formats.choose(scheme, shape).name == expected


def test_choose_heeds_the_density():
    scheme = int_scheme(4, group=128, sparsity="unstructured")
    assert formats.choose(scheme, (256, 1024), density=0.4).name == "bitmap"
    assert formats.choose(scheme, (256, 1024), density=0.95).name == "pack-quantized"


@pytest.mark.parametrize(
    ("scheme", "shape", "words"),
    [
        (int_scheme(4, group=512), (8, 256), "larger than the row"),
        (int_scheme(1), (8, 256), "2 to 8 bits"),
        (int_scheme(9), (8, 256), "2 to 8 bits"),
        (Scheme(GridScheme(4, "float", True, "channel")), (8, 256), "e4m3"),
        (Scheme(None, ActivationScheme()), (8, 256), "weights are not"),
        (Scheme(), (8, 256), "no storage format"),
    ],
    ids=str,
)
def test_choose_says_why_nothing_fits(scheme, shape, words):
    with pytest.raises(RequestError, match=words):
        formats.choose(scheme, shape)


def test_get_names_the_nearest():
    with pytest.raises(RequestError, match="sparse24"):
        formats.get("sparse_24")


def test_two_four_needs_a_width_divisible_by_four():
    assert "multiple of 4" in formats.get("sparse24").why_not(int_scheme(4, sparsity="2:4"), (8, 66))


# ---------------------------------------------------------------- wrong tensors
def case(name):
    scheme = {
        "pack-quantized": int_scheme(4, False, 32),
        "packed": int_scheme(3, False, 48),
        "int-quantized": Scheme(GridScheme(8, "int", False, "channel")),
        "float-quantized": Scheme(GridScheme(8, "float", True, "channel")),
        "nvfp4-pack-quantized": Scheme(BlockFloat(4, group_size=16, scales="e4m3")),
        "mxfp4-pack-quantized": Scheme(BlockFloat(4)),
        "mxfp8-quantized": Scheme(BlockFloat(8)),
        "k_quant": Scheme(KQuant("IQ4_NL")),
        "trellis": Scheme(Trellis(32)),
        "row_codebook": Scheme(RowCodebook(3, 32, 0.02)),
        "dfloat11": Scheme(DFloat11()),
        "ternary_dictionary": Scheme(TernaryDictionary()),
        "sparse24": int_scheme(4, True, 32, "2:4"),
        "bitmap": int_scheme(4, True, 32, "unstructured"),
    }[name]
    return formats.get(name), scheme, (16, 64), formats.get(name).pack(random_weight(scheme, (16, 64)))


@pytest.mark.parametrize("name", formats.names())
def test_every_missing_misshapen_or_mistyped_tensor_is_named(name):
    storage, scheme, shape, tensors = case(name)
    storage.unpack(tensors, scheme, shape, torch.bfloat16)
    for key, tensor in tensors.items():
        without = {k: t for k, t in tensors.items() if k != key}
        longer = tensors | {key: torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)}
        other = tensors | {key: tensor.to(torch.float32 if not tensor.is_floating_point() else torch.int16)}
        for wrong in (without, longer, other):
            with pytest.raises(ArtifactError, match=f"layer\\.{key}|{key}|weight_"):
                storage.unpack(wrong, scheme, shape, torch.bfloat16, "layer")


def test_the_shape_tensor_must_agree():
    storage, scheme, shape, tensors = case("pack-quantized")
    tensors["weight_shape"] = torch.tensor([16, 63])
    with pytest.raises(ArtifactError, match=r"layer\.weight_shape"):
        storage.unpack(tensors, scheme, shape, torch.bfloat16, "layer")


def test_corrupt_sparse_metadata_is_found():
    storage, scheme, shape, tensors = case("sparse24")
    tensors["weight_metadata"][3, 2] = 0  # both values in column 0
    with pytest.raises(ArtifactError, match=r"layer\.weight_metadata"):
        storage.unpack(tensors, scheme, shape, torch.bfloat16, "layer")
    storage, scheme, shape, tensors = case("bitmap")
    tensors["weight_bitmap"][3, 2] ^= 1
    with pytest.raises(ArtifactError, match=r"layer\.weight_bitmap"):
        storage.unpack(tensors, scheme, shape, torch.bfloat16, "layer")
    storage, scheme, shape, tensors = case("bitmap")
    for wrong in (-5, 2**62):
        tensors["weight_row_offsets"][-1] = wrong
        with pytest.raises(ArtifactError):
            storage.unpack(tensors, scheme, shape, torch.bfloat16, "layer")


def test_a_weight_that_breaks_its_contract_is_not_packed():
    storage = formats.get("pack-quantized")
    good = random_weight(int_scheme(4, group=32), (8, 64))
    mask = torch.zeros(8, 64, dtype=torch.bool)
    wrong = [
        CompressedWeight(good.values * 2, good.scale, None, None, good.scheme, good.dtype),
        CompressedWeight(good.values.to(torch.int16), good.scale, None, None, good.scheme, good.dtype),
        CompressedWeight(good.values, good.scale[:, :1], None, None, good.scheme, good.dtype),
        CompressedWeight(good.values, None, None, None, good.scheme, good.dtype),
        CompressedWeight(good.values, good.scale, good.scale.to(torch.int8), None, good.scheme, good.dtype),
        CompressedWeight(good.values, good.scale, None, mask, good.scheme, good.dtype),
    ]
    for weight in wrong:
        with pytest.raises(CompressError, match="compressed weight"):
            storage.pack(weight)
    three = random_weight(int_scheme(4, sparsity="unstructured"), (8, 64))
    three.scheme = int_scheme(4, sparsity="2:4")
    with pytest.raises(CompressError, match="more than two"):
        formats.get("sparse24").pack(three)


def test_static_activations_add_their_tensors():
    scheme = Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(8, "int", False, False, "tensor"))
    storage = formats.get("int-quantized")
    scale, zero = torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(3, dtype=torch.int8)
    tensors = storage.pack(random_weight(scheme, (8, 64)), input_scale=scale, input_zero_point=zero)
    specs = storage.tensors(scheme, (8, 64), torch.bfloat16)
    assert {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()} == {
        k: (s.shape, s.dtype) for k, s in specs.items()
    }
    assert {"input_scale", "input_zero_point"} <= set(tensors)
