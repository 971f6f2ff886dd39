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
from runtime.kernels.triton.linear import multiply, product_path, stored_on_meta

_MIDDLE = 8  # index `i` of an entry is laid out as code `i - 8`


class RowCodebookTriton(TritonKernel):
    """Row codebooks of 2 to 4 bits, laid out as 4: `words`, `table` of the levels and `scale` `[groups, out]`.

    Outliers stay as stored. They are added to the rounded product, in which `outlier_entries` `[out]` stood in their places.
    """

    name = "row-codebook-triton"
    formats = frozenset({RowCodebook.name})

    def why_not_scheme(self, layer: Layer) -> str | None:
        return layer.why_not_as_given()

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        weight = layer.unpack(tensors)
        codes, levels = weight.values, weight.parameters["levels"]
        table = torch.nn.functional.pad(levels, (0, 16 - levels.shape[1]))
        found = {"table": layout.table_words(table), "scale": weight.parameters["scale"].t().contiguous()}
        if _codebook(layer).outliers:
            # Near zero, so that little is taken away again: there is a zero behind the levels if they are not 16.
            near = table.short().abs().argmin(1, keepdim=True)
            codes = torch.where(codes < 16, codes, near)
            found |= {name: tensor for name, tensor in tensors.items() if "outlier" in name}
            found["outlier_entries"] = table.gather(1, near)[:, 0]
        return found | {"words": layout.pack(codes.to(torch.int8) - _MIDDLE, 4)}

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
        stored = stored_on_meta(layer, scale)
        found = {name: tensor for name, tensor in stored.items() if "outlier" in name}
        if found:
            found["outlier_entries"] = torch.empty(layer.shape[0], dtype=torch.int8, device="meta")
        words, table = layout.blank_words(layer.shape, 4), _blank_table(layer)
        return found | {"words": words, "table": table, "scale": stored["weight_scale"].t().contiguous()}

    def weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        """The weight as kernels take it, without its outliers."""
        words, scale, table = tensors["words"], tensors["scale"], tensors["table"]
        return layout.Weight(words, scale, None, layer.shape, layer.group, 4, codes="table", table=table)

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton.matvec import add_outliers

        weight = self.weight(tensors, layer)
        y = multiply(x, weight, bias)
        if "weight_outliers" not in tensors:
            return y
        held, columns = tensors["outlier_entries"], tensors["weight_outlier_columns"]
        return add_outliers(y, x, weight, held, columns, tensors["weight_outliers"])

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
        form, weight = _form(layer), layer.unpack(tensors)
        codes, field, given = weight.values, _field(form), weight.parameters
        if _from_zero(form):
            codes = form.unsigned(codes).view(torch.int8) - (1 << field - 1)
        scale = given["d"].t().contiguous() if _one_factor(form) else layout.pack_products(given)
        found = {"words": layout.pack(codes, field), "scale": scale}
        if form.table:
            values = torch.tensor(IQ4_VALUES, dtype=torch.int8, device=codes.device)
            found["table"] = layout.table_words(values.repeat(layer.shape[0], 1))
        return found

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        form, columns, scale = _form(layer), layer.shape[1], tensors["scale"]
        codes = layout.unpack(tensors["words"], _field(form), columns)
        if _from_zero(form):
            codes = form.signed((codes + (1 << _field(form) - 1)).view(torch.uint8))
        if _one_factor(form):
            d = scale.t().contiguous()
            parameters = {"d": d, "scale": torch.ones_like(d, dtype=torch.int8)}
        else:
            parameters = layout.unpack_products(scale, columns // form.facts.width, not form.symmetric)
        return CompressedWeight.of(codes, parameters, None, layer.entry.scheme, layer.dtype)

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        form, (rows, columns) = _form(layer), layer.shape
        groups, blocks = columns // form.facts.width, columns // form.facts.block
        height = groups if _one_factor(form) else groups + blocks * (1 if form.symmetric else 2)
        dtype = torch.float16 if _one_factor(form) else torch.int16
        found = {
            "words": layout.blank_words(layer.shape, _field(form)),
            "scale": torch.empty(height, rows, dtype=dtype, device="meta"),
        }
        return found | ({"table": _blank_table(layer)} if form.table else {})

    def weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        """The weight as kernels take it."""
        form = _form(layer)
        codes: layout.Codes = "table" if form.table else "integer" if form.symmetric else "minimum"
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


def _from_zero(form: KQuant) -> bool:
    """Whether codes are laid out as GGUF stores them, from zero on."""
    return form.table or not form.symmetric


def _one_factor(form: KQuant) -> bool:
    """Whether a group is a block, with an fp16 scale and no integer."""
    return form.facts.low == form.facts.high == 1


def _codebook(layer: Layer) -> RowCodebook:
    form = layer.entry.scheme.weights
    assert isinstance(form, RowCodebook)
    return form


def _form(layer: Layer) -> KQuant:
    form = layer.entry.scheme.weights
    assert isinstance(form, KQuant)
    return form


def _blank_table(layer: Layer) -> torch.Tensor:
    return torch.empty(4, layer.shape[0], dtype=torch.int32, device="meta")
