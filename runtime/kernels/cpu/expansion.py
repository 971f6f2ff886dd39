"""Weights in coded rows on a CPU through the C library: rows become 16-bit floats in a small buffer, where the dense product reads them."""

from __future__ import annotations

import torch

from runtime.formats.dfloat11 import DFloat11
from runtime.formats.representation import Tensors
from runtime.formats.ternary_dictionary import TernaryDictionary, word_table
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel

_MOST_COLUMNS = 1 << 15  # EXPANDED of c/expansion.h has room for two rows


class ExpansionKernel(CKernel):
    """The sums of the dense product of 16-bit floats in C, bit for bit, whatever the CPU, the threads and the number of rows.

    The weight stays as stored. Inputs may be of any dtype that C computes with.
    """

    def why_not(self, layer: Layer) -> str | None:
        if layer.shape[1] > _MOST_COLUMNS:
            return f"rows may have at most {_MOST_COLUMNS} weights, and these have {layer.shape[1]}"
        if library.load() is None:
            return "it is written in C, and there is no compiler (or COMPRESS_NATIVE=0)"
        return layer.why_not_as_given() or library.why_not_dtype(layer.dtype)


class DFloat11Cpu(ExpansionKernel):
    """Products with bfloat16 weights whose exponents are coded."""

    name = "dfloat11-c"
    formats = frozenset({DFloat11.name})

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        form = layer.entry.scheme.weights
        assert isinstance(form, DFloat11)
        found = library.Linear(kind=library.KINDS["dense"], weight_type=library.DF11, code_bits=form.code_bits)
        found.rows, found.columns = layer.shape
        found.bias = None if bias is None else bias.data_ptr()
        found.weight = tensors["weight_mantissas"].data_ptr()
        for field in ("codes", "exponents", "escapes"):
            setattr(found, field, tensors[f"weight_{field}"].data_ptr())
        found.offsets = tensors["weight_row_offsets"].data_ptr()
        return found

    def path(self, rows: int) -> str:
        return "float32 products of bfloat16 weights, exponents decoded in C"


class TernaryCpu(ExpansionKernel):
    """Products with ternary weights, whose words are looked up in the dictionary."""

    name = "ternary-c"
    formats = frozenset({TernaryDictionary.name})

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        scale = tensors["weight_scale"]
        found = library.Linear(kind=library.KINDS["dense"], weight_type=library.TERNARY)
        found.scale_type, found.row_scale = library.TYPES[scale.dtype], scale.data_ptr()
        found.rows, found.columns = layer.shape
        found.bias = None if bias is None else bias.data_ptr()
        found.weight, found.table = tensors["weight_codes"].data_ptr(), word_table().data_ptr()
        found.row_offsets = tensors["weight_row_offsets"].data_ptr()
        return found

    def path(self, rows: int) -> str:
        return "float32 products of ternary weights, words decoded in C"
