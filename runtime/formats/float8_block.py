"""Float8 weights with a scale for every block of rows and columns (DeepSeek-V3, 2024, arXiv 2412.19437, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import CompressError
from runtime.formats.cut import COLUMNS, ROWS, Along
from runtime.formats.float8 import FLOAT8, FLOAT8_MAXIMUM, round_float8, widen
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec


@dataclass(frozen=True)
class Float8Block(Representation):
    """Float8 e4m3 codes `[out, in]`; `height` rows and `width` columns share a scale, fewer at the edges.

    Parameters: `scale` `[out / height, in / width]`, rounded up, in the model's dtype. All rows of a block have a say in it, so it is
    fitted before anything is rounded.
    """

    name = "float8_block"
    bits: int = 8
    height: int = 128
    width: int = 128

    def why_not(self, shape: Shape) -> str | None:
        if self.bits != 8 or self.height < 1 or self.width < 1:
            return f"blocks of float8 have 8 bits and at least one row and column, not {self.describe()}"
        return None

    def describe(self) -> str:
        return f"fp{self.bits} {self.height}x{self.width}"

    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales that cover every block; `importance` has no say."""
        padding = (0, -weight.shape[1] % self.width)
        largest = [torch.nn.functional.pad(rows.abs().amax(0), padding) for rows in weight.split(self.height)]
        wanted = torch.stack(largest).view(len(largest), -1, self.width).amax(-1) / FLOAT8_MAXIMUM
        least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # above zero
        return {"scale": torch.where(wanted > 0, wanted.clamp(min=least), 1.0).to(dtype)}

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = parameters["scale"][:, first // self.width].float()
        scale = scale.repeat_interleave(self.height)[: columns.shape[1]]
        codes = round_float8(columns / scale)
        return codes * scale, codes[0].to(FLOAT8)

    def round(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        codes = torch.empty(weight.shape, dtype=FLOAT8, device=weight.device)
        for rows, scale in self._blocks(parameters["scale"], codes.shape):
            codes[rows] = round_float8(weight[rows] / scale.float()).to(FLOAT8)
        return codes

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """`codes * scale`, computed in the scale's dtype as compressed-tensors does, or in `dtype` where that is wider."""
        wide = torch.promote_types(parameters["scale"].dtype, dtype)
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        for rows, scale in self._blocks(parameters["scale"].to(wide), codes.shape):
            out[rows] = widen(codes[rows], wide) * scale
        return out

    def _blocks(self, scale: torch.Tensor, shape: torch.Size) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of every row of blocks, and the scale of each of their columns."""
        for number, own in enumerate(scale):
            start = number * self.height
            yield slice(start, start + self.height), own.repeat_interleave(self.width)[: shape[1]]

    def rows(self, parameters: Tensors, index: torch.Tensor | slice) -> Tensors:
        raise CompressError(f"rows of {self.describe()} weights share their scales and cannot be looked up one by one")

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        blocks = (-(-shape[0] // self.height), -(-shape[1] // self.width))
        scales = TensorSpec(blocks, dtype, (Along(0, self.height), Along(1, self.width)))
        return {"weight": TensorSpec(shape, FLOAT8, (ROWS, COLUMNS)), "weight_scale": scales}

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        return {"weight": codes, "weight_scale": parameters["scale"]}

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        return tensors["weight"], {"scale": tensors["weight_scale"]}

    # ---------------------------------------------------------------- config.json, in the words of compressed-tensors
    def to_config(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"num_bits": self.bits, "type": "float", "symmetric": True, "strategy": "block"}
        return fields | {"group_size": None, "block_structure": [self.height, self.width], "dynamic": False}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Float8Block | None:
        """The blocks that the `QuantizationArgs` of compressed-tensors mean; None where they mean another representation.

        Raises:
            ValueError: blocks of other numbers, or of no size.
        """
        if arguments["strategy"] != "block":
            return None
        sides = arguments.get("block_structure")
        if not (isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) for side in sides)):
            raise ValueError(f"block_structure is {sides!r}, expected two integers")
        if arguments["type"] != "float" or not arguments["symmetric"]:
            raise ValueError("blocks of rows and columns are of symmetric float8 weights")
        return cls(arguments["num_bits"], *sides)
