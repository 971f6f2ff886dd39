"""Triton kernels of weights that are no plain integer grid: levels of a row, and GGUF's types. Importing this file does not import triton.

Both go through the products of `linear.multiply`: levels and IQ4's values are looked up in a table of 16 bytes a row, and scales of GGUF,
with minima where a type has them, are multiplied out of their integers and factors.
"""

from __future__ import annotations

import torch

from runtime.formats.k_quant import IQ4_VALUES, KQuant
from runtime.formats.representation import Tensors
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Layer
from runtime.kernels.triton import layout
from runtime.kernels.triton.base import TritonKernel
from runtime.kernels.triton.linear import multiply, product_path

_MIDDLE = 8  # number `n` of a level is laid out as code `n - 8`


class RowCodebookTriton(TritonKernel):
    """Row codebooks of 2 to 4 bits: `words`, `table` of the levels, `scale` `[groups, out]` and, where there are outliers, those as stored.

    Outliers are added after the product has been rounded.
    """

    name = "row-codebook-triton"
    formats = frozenset({RowCodebook.name})

    def why_not_scheme(self, layer: Layer) -> str | None:
        return layer.why_not_as_given()

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        weight = layer.unpack(tensors)
        numbers = weight.values.where(weight.values < 2 ** _codebook(layer).bits, 0).to(torch.int8)
        levels = weight.parameters["levels"]
        outliers = {name: tensor for name, tensor in tensors.items() if "outlier" in name}
        return outliers | {
            "words": layout.pack(numbers - _MIDDLE, 4),
            "table": layout.table_words(torch.nn.functional.pad(levels, (0, 16 - levels.shape[1]))),
            "scale": weight.parameters["scale"].t().contiguous(),
        }

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        form = _codebook(layer)
        codes = layout.unpack(tensors["words"], 4, layer.shape[1]) + _MIDDLE
        parameters = {
            "levels": layout.table_entries(tensors["table"])[:, : 2**form.bits].contiguous(),
            "scale": tensors["scale"].t().contiguous(),
        }
        if form.outliers:
            parameters["outlier_columns"] = tensors["weight_outlier_columns"]
            codes = form.with_outliers(codes, parameters, tensors["weight_outliers"])
        return CompressedWeight.of(codes, parameters, None, layer.entry.scheme, layer.dtype)

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        stored = layer.storage.tensors(layer.entry.scheme, layer.shape, scale or layer.dtype, layer.entry.count)
        found = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in stored.items() if "outlier" in name
        }  # fmt: skip
        spec = stored["weight_scale"]
        found["scale"] = torch.empty(spec.shape[::-1], dtype=spec.dtype, device="meta")
        return found | {"words": layout.blank_words(layer.shape, 4), "table": _blank_table(layer)}

    def weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        """The weight as kernels take it, without its outliers."""
        words, scale, table = tensors["words"], tensors["scale"], tensors["table"]
        return layout.Weight(words, scale, None, layer.shape, layer.group, 4, codes="table", table=table)

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton import outliers

        weight = self.weight(tensors, layer)
        y = multiply(x, weight, bias)
        if "weight_outliers" not in tensors:
            return y
        return outliers.add(y, x, weight, tensors["weight_outlier_columns"], tensors["weight_outliers"])

    def path(self, rows: int) -> str:
        return f"{product_path(rows)} of levels"


class KQuantTriton(TritonKernel):
    """Q2_K to Q6_K, IQ4_NL and IQ4_XS: codes of up to 4 bits laid out as 4, others as 8, `scale` of `layout.pack_products`.

    IQ4_NL has scales `[groups, out]` like a grid, and IQ4 a `table`, the same for each row.
    """

    name = "k-quant-triton"
    formats = frozenset({KQuant.name})

    def why_not_scheme(self, layer: Layer) -> str | None:
        return layer.why_not_as_given()

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        form, weight = _kind(layer), layer.unpack(tensors)
        codes, field, given = weight.values, _field(form), weight.parameters
        if _numbers(form):
            codes = form.unsigned(codes).view(torch.int8) - (1 << field - 1)
        scale = given["d"].t().contiguous() if _plain(form) else layout.pack_products(given)
        found = {"words": layout.pack(codes, field), "scale": scale}
        if form.table:
            values = torch.tensor(IQ4_VALUES, dtype=torch.int8, device=codes.device)
            found["table"] = layout.table_words(values.repeat(layer.shape[0], 1))
        return found

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        form, columns, scale = _kind(layer), layer.shape[1], tensors["scale"]
        codes = layout.unpack(tensors["words"], _field(form), columns)
        if _numbers(form):
            codes = form.signed((codes + (1 << _field(form) - 1)).view(torch.uint8))
        if _plain(form):
            d = scale.t().contiguous()
            parameters = {"d": d, "scale": torch.ones_like(d, dtype=torch.int8)}
        else:
            parameters = layout.unpack_products(scale, columns // form.facts.width, not form.symmetric)
        return CompressedWeight.of(codes, parameters, None, layer.entry.scheme, layer.dtype)

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        form, (rows, columns) = _kind(layer), layer.shape
        groups, blocks = columns // form.facts.width, columns // form.facts.block
        height = groups if _plain(form) else groups + blocks * (1 if form.symmetric else 2)
        dtype = torch.float16 if _plain(form) else torch.int16
        found = {
            "words": layout.blank_words(layer.shape, _field(form)),
            "scale": torch.empty(height, rows, dtype=dtype, device="meta"),
        }
        return found | ({"table": _blank_table(layer)} if form.table else {})

    def weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        """The weight as kernels take it."""
        form = _kind(layer)
        codes = "table" if form.table else "integer" if form.symmetric else "minimum"
        return layout.Weight(
            tensors["words"], tensors["scale"], None, layer.shape, form.facts.width, _field(form),
            codes=codes, table=tensors.get("table"),
        )  # fmt: skip

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, self.weight(tensors, layer), bias)

    def path(self, rows: int) -> str:
        return f"{product_path(rows)} of k-quants"


def _field(form: KQuant) -> int:
    return 4 if form.bits <= 4 else 8


def _numbers(form: KQuant) -> bool:
    """Whether codes are laid out as they are stored, from zero on."""
    return form.table or not form.symmetric


def _plain(form: KQuant) -> bool:
    """Whether a group's scale is its block's, without an integer."""
    return form.facts.low == form.facts.high == 1


def _codebook(layer: Layer) -> RowCodebook:
    form = layer.entry.scheme.weights
    assert isinstance(form, RowCodebook)
    return form


def _kind(layer: Layer) -> KQuant:
    form = layer.entry.scheme.weights
    assert isinstance(form, KQuant)
    return form


def _blank_table(layer: Layer) -> torch.Tensor:
    return torch.empty(4, layer.shape[0], dtype=torch.int32, device="meta")
