"""Triton kernels of the dispatch table. Importing this file does not import triton.

Integer and block-float weights with unquantized activations have two kernels over one copy of the weight (`layout.Weight`): a
matrix-vector product without tensor cores, and a matrix product on them.
"""

from __future__ import annotations

import torch

from runtime.errors import CompressError
from runtime.formats.bitpack import unpack_rows
from runtime.formats.block_float import BlockFloat, unpack_e2m1
from runtime.formats.float8 import FLOAT8
from runtime.formats.float8_block import Float8Block
from runtime.formats.grid import scale_dtype
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.formats.sparse24 import Sparse24, position_bytes, position_nibbles
from runtime.kernels.activations import quantize_input
from runtime.kernels.base import Layer
from runtime.kernels.triton import layout
from runtime.kernels.triton.base import TritonKernel, installed


class WeightOnlyTriton(TritonKernel):
    """Integer codes in `layout.Weight`: `words`, `scale` `[groups, out]`, `zero_point`; the bitmap of `bitmap` weights stays
    beside them, because what was stored must come back exactly.
    """

    field: int
    bits: tuple[int, int]

    def why_not_scheme(self, layer: Layer) -> str | None:
        return layer.why_not_weight_only(*self.bits, layout.WIDTH)

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        weight = layer.unpack(tensors)
        out = {"words": layout.pack(weight.values, self.field), **_grids(weight, layer)}
        if layer.entry.format == "bitmap":
            out["weight_bitmap"] = tensors["weight_bitmap"]
        return out

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        return {"words": layout.blank_words(layer.shape, self.field), **_blank_grids(layer, scale)}

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        values = layout.unpack(tensors["words"], self.field, layer.shape[1])
        parameters, mask = _parameters(tensors, layer), layer.storage.mask(tensors, layer.shape[1])
        if layer.entry.format == "sparse24":
            zero = parameters.get("zero_point")
            mask = values != (0 if zero is None else layer.grid.spread(zero, layer.shape[1]))
        return CompressedWeight.of(values, parameters, mask, layer.entry.scheme, layer.dtype)

    def weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        """The weight as kernels take it."""
        return layout.Weight(
            tensors["words"], tensors["scale"], tensors.get("zero_point"), layer.shape, layer.group, self.field,
            two_of_four=layer.entry.format == "sparse24",
        )  # fmt: skip

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, self.weight(tensors, layer), bias)

    def path(self, rows: int) -> str:
        return product_path(rows) if installed() else self.name


class W4A16Triton(WeightOnlyTriton):
    """Codes of 2 to 4 bits, laid out as 4. `sparse24` and `bitmap` weights are laid out dense."""

    name = "w4a16-triton"
    formats = frozenset({"pack-quantized", "packed", "sparse24", "bitmap"})
    field, bits = 4, (2, 4)


class RoundedTriton(WeightOnlyTriton):
    """Codes of 2 to 4 bits, laid out as 4, with inputs rounded to integers or float8: W4A8, W4A4, W4AFP8, and groups of integers.

    Codes of the inputs are the reference's; they are multiplied as they are.
    """

    name = "w4-rounded-triton"
    formats = frozenset({"pack-quantized", "packed", "int-quantized"})
    field, bits = 4, (2, 4)

    def why_not_scheme(self, layer: Layer) -> str | None:
        activations = layer.entry.scheme.activations
        if activations is None:
            return "it computes with quantized activations"
        if not activations.symmetric or activations.outliers is not None or activations.e2m1:
            return "it computes with symmetric activations, integers or float8"
        if activations.strategy == "tensor" and activations.dynamic:
            return "one dynamic scale for all tokens makes a token's result depend on the others"
        size = activations.group_size
        if size is not None and (activations.type == "float" or size < layout.SMALLEST_UNIT or size & (size - 1)):
            return (
                f"it wants groups of integers whose size is a power of two from {layout.SMALLEST_UNIT} on, not {size}"
            )
        return layer.why_not_integers(*self.bits, layout.SMALLEST_UNIT)

    def capability(self, layer: Layer) -> tuple[int, int]:
        activations = layer.entry.scheme.activations
        return (8, 9) if activations is not None and activations.type == "float" else (8, 0)

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton import rounded, w8a8

        scheme, size = layer.activations, layer.activations.group_size or 0
        float8 = scheme.type == "float"
        if size:
            codes, scale = w8a8.quantize_groups(x, float8, size, scheme.bits, scheme.int8_tail)
        elif scheme.dynamic:
            codes, grid, _ = w8a8.quantize(x, float8, scheme.bits)
            scale = grid[:, None]
        else:
            numbers, grid, _ = quantize_input(x, scheme, tensors)
            codes = numbers.to(w8a8.FLOAT8 if float8 else torch.int8).contiguous()
            scale = _of_rows(grid, x)[:, None]
        return rounded.product(codes, scale, self.weight(tensors, layer), size, x.dtype, bias)

    def path(self, rows: int) -> str:
        return "triton quantize input + product of 4-bit codes with it"


class W8A16Triton(WeightOnlyTriton):
    """Codes of 5 to 8 bits, laid out as 8."""

    name = "w8a16-triton"
    formats = frozenset({"pack-quantized", "packed", "int-quantized", "sparse24", "bitmap"})
    field, bits = 8, (5, 8)


class BlockFloatTriton(TritonKernel):
    """Block floats in `layout.Weight`: `words`, `scale` `[groups, out]` (uint8, or int8, the bits of e4m3) and, where stored,
    `global_scale`. Inputs as they are, or rounded to block floats: codes of the inputs are the reference's.
    """

    name = "block-float-triton"
    formats = frozenset({"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"})

    def why_not_scheme(self, layer: Layer) -> str | None:
        if not isinstance(layer.entry.scheme.weights, BlockFloat):
            return "it computes block floats"
        activations = layer.entry.scheme.activations
        if activations is None:
            return None
        size = activations.group_size
        if activations.scales is None or size is None or size & (size - 1):
            return "it computes with unquantized activations, or block floats whose group size is a power of two"
        return None

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        scale, bits = tensors["weight_scale"], layer.grid.bits
        if scale.dtype == FLOAT8 and not scale.is_meta and bool((scale.view(torch.int8) < 0).any()):
            raise CompressError("NVFP4 scales must not be negative: block-scaled tensor cores ignore their sign")
        if bits == 4:
            packed = tensors["weight_packed"]
            signed = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).view(torch.int8) - 8
        else:
            signed = (tensors["weight"].view(torch.uint8) ^ 128).view(torch.int8)
        held = scale.view(torch.int8) if scale.dtype == FLOAT8 else scale
        also = {
            name.removeprefix("weight_"): tensor for name, tensor in tensors.items() if name.endswith("_global_scale")
        }
        return also | {"words": layout.pack(signed, bits), "scale": held.t().contiguous()}

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        return self.prepare(stored_on_meta(layer, scale), layer)

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        bits, scale = layer.grid.bits, tensors["scale"].t().contiguous()
        signed = layout.unpack(tensors["words"], bits, layer.shape[1])
        if bits == 8:
            codes = (signed.view(torch.uint8) ^ 128).view(FLOAT8)
        else:
            fields = (signed + 8).view(torch.uint8)
            codes = unpack_e2m1(fields[:, ::2] | fields[:, 1::2] << 4)
        parameters = {"scale": scale.view(FLOAT8) if scale.dtype == torch.int8 else scale}
        if "global_scale" in tensors:
            parameters["global_scale"] = tensors["global_scale"]
        return CompressedWeight.of(codes, parameters, None, layer.entry.scheme, layer.dtype)

    def weight(self, tensors: Tensors, layer: Layer) -> layout.Weight:
        """The weight as kernels take it."""
        return layout.Weight(
            tensors["words"], tensors["scale"], None, layer.shape, layer.group, layer.grid.bits, codes="float",
            global_scale=tensors.get("global_scale"),
        )  # fmt: skip

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton import block_float

        weight, weights, activations = self.weight(tensors, layer), layer.grid, layer.entry.scheme.activations
        assert isinstance(weights, BlockFloat)
        if activations is not None:
            global_scale = tensors.get("input_global_scale")
            if block_float.multiplies_codes(x.device, x.shape[0], weights, activations):
                codes, scale = block_float.quantize(x, activations, global_scale)
                return block_float.product(codes, scale, global_scale, weight, x.dtype, bias)
            x = block_float.round_inputs(x, activations, global_scale)
        return multiply(x, weight, bias)

    def path(self, rows: int) -> str:
        return "triton product of block floats"


class Sparse24Triton(TritonKernel):
    """2:4 weights of 2 to 4 bits, laid out as two codes and four bits of position a quad."""

    name = "w4-sparse24-triton"
    formats = frozenset({"sparse24"})

    def why_not_scheme(self, layer: Layer) -> str | None:
        return layer.why_not_weight_only(2, 4, multiple=64)

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        from runtime.kernels.triton import sparse24_w4

        columns, weight = layer.shape[1], layer.unpack(tensors)
        kept = unpack_rows(tensors["weight_packed"], layer.grid.bits, columns // 2)
        nibbles = position_nibbles(tensors["weight_metadata"], columns)
        values, positions = sparse24_w4.pack(kept, nibbles & 3, nibbles >> 2, columns)
        return {"values": values, "positions": positions, **_grids(weight, layer)}

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        from runtime.kernels.triton import sparse24_w4

        rows, columns = layer.shape
        tiles = -(-columns // sparse24_w4.COLUMNS)
        values = torch.empty(tiles, rows, layout.WIDTH, dtype=torch.int32, device="meta")
        positions = torch.empty(tiles, -(-rows // 2), layout.WIDTH, dtype=torch.int32, device="meta")
        return {"values": values, "positions": positions, **_blank_grids(layer, scale)}

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        from runtime.kernels.triton import sparse24_w4

        kept, first, second = sparse24_w4.unpack(self._weight(tensors, layer))
        stored = {"weight_metadata": position_bytes((first | second << 2).to(torch.uint8))}
        parameters, scheme = _parameters(tensors, layer), layer.entry.scheme
        values, mask = Sparse24().place(kept, stored, scheme, layer.shape, parameters.get("zero_point"))
        return CompressedWeight.of(values, parameters, mask, scheme, layer.dtype)

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton import sparse24_w4

        return sparse24_w4.linear(x, self._weight(tensors, layer), bias)

    def path(self, rows: int) -> str:
        few = rows <= 4  # sparse24_w4.MAXIMUM_ROWS, which importing would need triton for
        return (
            "triton 2:4 matrix-vector product" if few else "triton dequantize + matmul (sparse tensor cores if faster)"
        )

    def _weight(self, tensors: Tensors, layer: Layer):  # type: ignore[no-untyped-def]
        from runtime.kernels.triton.sparse24_w4 import Sparse24Weight

        zero = tensors.get("zero_point")
        words, scale, positions = tensors["values"], tensors["scale"], tensors["positions"]
        return Sparse24Weight(words, scale, zero, layer.shape, layer.group, 4, positions=positions)


class StoredTriton(TritonKernel):
    """A kernel that reads the weight as it is stored."""

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        return tensors

    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        return self.prepare(stored_on_meta(layer, scale), layer)


class Float8BlockTriton(StoredTriton):
    """Float8 weights with scales of blocks, float8 inputs with scales of tokens or groups: FP8_BLOCK.

    Codes of the inputs are the reference's; only the order of the last multiplications differs, which are in float32.
    """

    name = "fp8-block-triton"
    formats = frozenset({"float-quantized"})

    def why_not_scheme(self, layer: Layer) -> str | None:
        weights, activations = layer.entry.scheme.weights, layer.entry.scheme.activations
        if not isinstance(weights, Float8Block) or weights.width != layout.BLOCK_COLUMNS:
            return f"it computes float8 weights in blocks of {layout.BLOCK_COLUMNS} columns"
        wanted = ("float", 8, True, True, None)
        if activations is None or wanted != (
            activations.type, activations.bits, activations.symmetric, activations.dynamic, activations.scales
        ):  # fmt: skip
            return "it computes with dynamic, symmetric float8 activations"
        if activations.strategy != "token" and activations.group_size != layout.BLOCK_COLUMNS:
            return f"it wants one scale a token or {layout.BLOCK_COLUMNS} features"
        return None

    def capability(self, layer: Layer) -> tuple[int, int]:
        return 8, 9

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton import float8_block, w8a8

        weights = layer.entry.scheme.weights
        assert isinstance(weights, Float8Block)
        if layer.activations.group_size:
            codes, scale = w8a8.quantize_groups(x, True, layer.activations.group_size)
        else:
            codes, of_tokens, _ = w8a8.quantize(x, True)
            scale = of_tokens[:, None]
        return float8_block.product(
            codes, scale, tensors["weight"], tensors["weight_scale"], weights.height, x.dtype, bias
        )

    def path(self, rows: int) -> str:
        return "triton quantize input + float8 product of blocks"


class W8A8Triton(StoredTriton):
    """Integer weights with integer activations, float8 weights with float8 activations. The weight stays as stored.

    Codes of the activations are the reference's; only the order of the last multiplications differs, which are in float32.
    """

    name = "w8a8-triton"
    formats = frozenset({"int-quantized", "float-quantized"})

    def why_not_scheme(self, layer: Layer) -> str | None:
        return layer.why_not_sum_of_codes()

    def capability(self, layer: Layer) -> tuple[int, int]:
        weights = layer.entry.scheme.grid
        return (8, 9) if weights is not None and weights.type == "float" else (8, 0)

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        rows = layer.shape[0]
        out = tensors | {"channel_scale": tensors["weight_scale"].reshape(-1).expand(rows).contiguous()}
        if "weight_zero_point" in tensors:
            out["channel_zero"] = tensors["weight_zero_point"].reshape(-1).expand(rows).contiguous()
        if not layer.activations.symmetric:
            out["row_sum"] = tensors["weight"].sum(1, dtype=torch.int32)
        return out

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton import w8a8

        scheme = layer.activations
        if x.shape[0] == 0:
            return x.new_zeros(0, layer.shape[0])
        float8, weight_zero = scheme.type == "float", tensors.get("channel_zero")
        zero = None
        if scheme.dynamic and scheme.strategy == "token" and scheme.symmetric and scheme.bits == 8:
            codes, scale, sums = w8a8.quantize(x, float8)
            total: torch.Tensor | None = sums
        else:
            numbers, grid, offset = quantize_input(x, scheme, tensors)
            codes = numbers.to(w8a8.FLOAT8 if float8 else torch.int8).contiguous()
            scale = _of_rows(grid, x)
            total = codes.sum(1, dtype=torch.int32) if weight_zero is not None else None
            if offset is not None:
                zero = offset.to(torch.int32).reshape(-1).expand(x.shape[0]).contiguous()
        return w8a8.product(
            codes, scale, tensors["weight"], tensors["channel_scale"], x.dtype, bias, zero, weight_zero, total,
            tensors.get("row_sum"),
        )  # fmt: skip

    def path(self, rows: int) -> str:
        return "triton quantize input + 8-bit matrix product"


def multiply(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias`: `[M, K]` float16 or bfloat16 -> `[M, N]`, by the kernel for so many rows."""
    from runtime.kernels.triton import matmul, matvec

    if x.shape[0] <= matvec.MAXIMUM_ROWS:
        return matvec.matvec(x, weight, bias)
    return matmul.matmul(x, weight, bias)


def product_path(rows: int) -> str:
    """What `multiply` does for so many rows."""
    from runtime.kernels.triton import matvec

    return "triton matrix-vector product" if rows <= matvec.MAXIMUM_ROWS else "triton matrix product"


def _of_rows(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A scale of the inputs for each row of them, float32 `[rows]`: NaN where a row holds a NaN, which codes of integers cannot."""
    largest = x.amax(-1).float()  # NaN where there is one
    return torch.where(largest.isnan(), largest, scale.float().reshape(-1))


def stored_on_meta(layer: Layer, scale: torch.dtype | None) -> Tensors:
    """Tensors of the layer like those on disk, on meta; `scale` as of `TritonKernel.blank`."""
    specs = layer.storage.tensors(layer.entry.scheme, layer.shape, scale or layer.dtype, layer.entry.count)
    return {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}


def _grids(weight: CompressedWeight, layer: Layer) -> Tensors:
    """`scale` and, for asymmetric weights, `zero_point` as `[groups, out]`."""
    shape = (layer.shape[0], layer.grid.groups(layer.shape[1]))
    return {name: grid.expand(shape).t().contiguous() for name, grid in weight.parameters.items()}


def _blank_grids(layer: Layer, scale: torch.dtype | None) -> Tensors:
    """Tensors like those of `_grids`, on meta."""
    shape = (layer.grid.groups(layer.shape[1]), layer.shape[0])
    out = {"scale": torch.empty(shape, dtype=scale_dtype(scale or layer.dtype), device="meta")}
    if not layer.grid.symmetric:
        out["zero_point"] = torch.empty(shape, dtype=torch.int8, device="meta")
    return out


def _parameters(tensors: Tensors, layer: Layer) -> Tensors:
    """Inverse of `_grids`, as they are stored."""
    grids = {name: tensors[name] for name in ("scale", "zero_point") if name in tensors}
    if layer.grid.strategy == "tensor":
        return {name: grid.flatten()[:1].clone() for name, grid in grids.items()}
    return {name: grid.t().contiguous() for name, grid in grids.items()}
