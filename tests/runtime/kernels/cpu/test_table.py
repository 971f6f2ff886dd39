"""The table of kernels: which are found for a layer, by mode and by name."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from products import linear
from weight_cases import int_scheme

from runtime import formats, kernels
from runtime.errors import RequestError
from runtime.formats.block_float import BlockFloat
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.float8_block import Float8Block
from runtime.formats.k_quant import KQuant
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis
from runtime.kernels import tuning
from runtime.kernels.cpu import integer, library
from runtime.layers.compressed_linear import prepare_all
from runtime.system import instruction_sets


def test_table():
    def listed(storage: str, device: str, rows: str, *accuracy: str) -> list[str]:
        return [
            kernel.name for kernel in kernels.KERNELS
            if storage in kernel.formats and kernel.device in (None, device) and rows in kernel.classes
            and kernel.accuracy in accuracy
        ]  # fmt: skip

    for name, device, rows in itertools.product(formats.names(), ("cpu", "cuda"), kernels.CLASSES):
        assert listed(name, device, rows, "exact", "fast")[-1] == "reference"
    exact = listed("pack-quantized", "cpu", "decode", "exact")
    assert exact == ["int4-c", "int8-c", "int4-c-rounded", "int8-c-rounded", "int4-cpu", "int8-cpu", "reference"]
    many = set(listed("sparse24", "cpu", "prefill", "exact", "fast"))
    assert {"sparse24-c", "int4-c", "sparse24-c-fast", "dense-tiles", "reference"} <= many
    assert listed("int-quantized", "cpu", "batch", "exact") == [
        "int4-c", "int8-c", "int4-c-rounded", "int8-c-rounded", "int8-cpu", "w8a8-cpu", "reference",
    ]  # fmt: skip


MICROSCALED = ActivationScheme(4, "float", strategy="group", group_size=32, scales="e8m0")
ONE_SCALE = ActivationScheme(strategy="tensor")
BEST_2_4 = "int4-c" if instruction_sets.chosen() == "avx2" else "sparse24-c"
needs_c = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


@needs_c
@pytest.mark.parametrize(
    ("scheme", "dtype", "expected", "fast"),
    [
        (int_scheme(4, group=128), torch.bfloat16, "int4-c", "int4-c-fast"),
        (int_scheme(3, group=64, sparsity="2:4"), torch.bfloat16, BEST_2_4, "sparse24-c-fast"),
        (int_scheme(4, group=48, sparsity="2:4"), torch.bfloat16, "int4-c", "int4-c-fast"),
        (int_scheme(4, False, 64, sparsity="2:4"), torch.bfloat16, "int4-c", "int4-c-fast"),
        (int_scheme(2, False, 64, sparsity="unstructured"), torch.float16, "int4-c", "int4-c-fast"),
        (int_scheme(4, group=128), torch.float32, "int4-c", "int4-c-fast"),
        (int_scheme(4, group=16), torch.bfloat16, "int4-c", "int4-c-fast"),
        (int_scheme(4, group=24), torch.bfloat16, "reference", "reference"),
        (int_scheme(8, group=128), torch.bfloat16, "int8-c", "int8-c-fast"),
        (int_scheme(8, group=16), torch.float32, "int8-c", "int8-c-fast"),
        (int_scheme(8, group=128, sparsity="2:4"), torch.bfloat16, "int8-c", "int8-c-fast"),
        (int_scheme(6, False, 64, sparsity="unstructured"), torch.float16, "int8-c", "int8-c-fast"),
        (int_scheme(4, group=128), torch.float64, "reference", "reference"),
        *(
            (Scheme(weights, activations), dtype, f"{kernel}-c-rounded", f"{kernel}-c-rounded")
            for weights, kernel in (
                (GridScheme(8, "int", True, "channel"), "int8"),
                (GridScheme(4, "int", True, "group", 128), "int4"),
                (BlockFloat(4), "fp4"),
            )
            for activations in (
                ActivationScheme(),
                ActivationScheme(symmetric=False),
                ActivationScheme(8, "float"),
                MICROSCALED,
            )
            for dtype in (torch.bfloat16, torch.float32)
        ),
        (Scheme(GridScheme(8, "int", True, "channel"), ONE_SCALE), torch.bfloat16, "w8a8-cpu", "w8a8-cpu"),
        (Scheme(GridScheme(4, "int", True, "group", 128), ONE_SCALE), torch.bfloat16, "reference", "reference"),
        (Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme()), torch.float64, "w8a8-cpu", "w8a8-cpu"),
        (
            Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float")),
            torch.bfloat16,
            "float8-c",
            "float8-c",
        ),
        (Scheme(GridScheme(8, "float", True, "channel")), torch.bfloat16, "float8-c", "float8-c"),
        (Scheme(BlockFloat(4)), torch.bfloat16, "fp4-c", "fp4-c-fast"),
        (Scheme(BlockFloat(4, group_size=16, scales="e4m3")), torch.float32, "fp4-c", "fp4-c-fast"),
        (Scheme(BlockFloat(4)), torch.float64, "reference", "reference"),
        (Scheme(BlockFloat(8)), torch.bfloat16, "float8-c", "float8-c"),
        (Scheme(BlockFloat(8), replace(MICROSCALED, bits=8)), torch.bfloat16, "float8-c", "float8-c"),
        (Scheme(Float8Block()), torch.bfloat16, "float8-c", "float8-c"),
        (Scheme(Float8Block(8, 128, 64)), torch.bfloat16, "reference", "reference"),
        (Scheme(KQuant("IQ4_NL")), torch.bfloat16, "k-quant-c", "k-quant-c-fast"),
        (Scheme(KQuant("IQ4_NL")), torch.float64, "reference", "reference"),
        (Scheme(DFloat11()), torch.bfloat16, "dfloat11-c", "dfloat11-c"),
        (Scheme(DFloat11()), torch.float64, "reference", "reference"),
        (Scheme(TernaryDictionary()), torch.float16, "ternary-c", "ternary-c"),
        (Scheme(TernaryDictionary()), torch.float64, "reference", "reference"),
        (Scheme(Trellis(64)), torch.bfloat16, "trellis-c", "trellis-c-fast"),
        (Scheme(Trellis(64)), torch.float64, "reference", "reference"),
        (Scheme(RowCodebook()), torch.bfloat16, "row-codebook-c", "row-codebook-c-fast"),
        (Scheme(RowCodebook(2, 64, 0.01)), torch.float16, "row-codebook-c", "row-codebook-c-fast"),
        (Scheme(RowCodebook()), torch.float64, "reference", "reference"),
        (Scheme(None, None, "2:4"), torch.bfloat16, "reference", "reference"),
    ],
    ids=str,
)
def test_auto_picks(scheme, dtype, expected, fast):
    layer, _ = linear(scheme, (64, 384), dtype)
    layer.prepare()
    assert layer.kernel_name == expected
    assert layer.explain(rows=1) != "" != layer.explain(rows=1000)
    layer.prepare("fast")
    assert layer.kernel_name == fast


@needs_c
def test_a_named_kernel_has_its_classes_and_the_best_of_its_layout_the_others():
    layer, _ = linear(int_scheme(4, group=128), (64, 384))
    choice = layer.prepare("dense-tiles")
    assert [choice.kernel(rows).name for rows in (0, 1, 2, 64, 65)] == ["int4-c"] * 4 + ["dense-tiles"]
    assert layer.kernel_name == "int4-c (decode, batch), dense-tiles (prefill)"
    layer.prepare("int4-c-fast")
    assert layer.kernel_name == "int4-c-fast"
    sparse, _ = linear(int_scheme(4, group=128, sparsity="2:4"), (64, 384))
    assert sparse.prepare("int4-c").decode.layout == "panels-w4"
    assert sparse.prepare("dense-tiles").decode.layout == "panels-s24"


def test_a_wrong_kernel_is_refused_with_the_reason():
    layer, _ = linear(int_scheme(4, group=16), (64, 384))
    with pytest.raises(RequestError, match="32"):
        layer.prepare("int4-cpu")
    with pytest.raises(RequestError, match="pack-quantized"):
        layer.prepare("w8a8-cpu")
    with pytest.raises(RequestError, match="int4-cpu"):
        layer.prepare("int4_cpu")
    with pytest.raises(RequestError, match="sparse24-c"):
        layer.prepare("best")
    with pytest.raises(RequestError, match="dense-tiles"):
        linear(Scheme(None, None, "2:4"), (64, 384))[0].prepare("dense-tiles")
    assert torch.isfinite(layer(torch.randn(1, 384).to(torch.bfloat16))).all()


def test_2_4_weights_are_read_from_what_is_faster_on_an_instruction_set():
    for name, first in (("avx512", "sparse24-c"), ("avx2", "int4-c"), ("portable", "sparse24-c")):
        found = [kernel.name for kernel in integer.ordered(name)]
        assert found[0] == first
        assert found[2:] == ["int8-c", "sparse24-c-fast", "int4-c-fast", "int8-c-fast"]
    assert [kernel.name for kernel in integer.ordered("avx2")[:2]] == ["int4-c", "sparse24-c"]


@needs_c
@pytest.mark.parametrize("sparsity", [None, "2:4", "unstructured"])
@pytest.mark.parametrize("bits", [4, 8])
def test_fast_never_mixes_with_its_exact_twin(bits, sparsity, monkeypatch):
    """Whatever tuning would pick: a model's layers must agree on the digits of their activations."""
    monkeypatch.setattr(tuning, "fastest", lambda layer, rows, serving: serving[-1])
    choice = linear(int_scheme(bits, group=64, sparsity=sparsity), (64, 384))[0].prepare("fast")
    assert choice.decode.accuracy == choice.batch.accuracy == "fast"
    assert choice.decode is choice.batch
    assert choice.prefill.name == "dense-tiles"  # exact, but for many rows only: it may win there
    assert len({choice.decode.layout, choice.prefill.layout}) == 1


@needs_c
@pytest.mark.parametrize("kernel", ["auto", "fast", "int4-c"])
def test_layers_left_to_the_reference_are_counted_in_the_log_once(kernel, caplog):
    schemes = [int_scheme(4, group=24), int_scheme(4, group=24), Scheme(None, None, "2:4"), int_scheme(4, group=64)]
    net = torch.nn.ModuleList([linear(scheme, (64, 384))[0] for scheme in schemes])
    with caplog.at_level(logging.WARNING, "compress.kernels"):
        prepare_all(net, kernel)
    (said,) = [record.message for record in caplog.records if record.name == "compress.kernels"]
    assert said.startswith("3 of 4 compressed layers are computed by the reference")
    assert "2 because int4-c says: it wants groups of a multiple of 16, not 24" in said
    assert "1 because sparse24-c says" in said or "1 because int4-c says" in said
    caplog.clear()
    prepare_all(net, "reference")
    prepare_all(net[3:], kernel)
    assert not [record for record in caplog.records if record.name == "compress.kernels"]
