"""Block types of GGUF with two levels of scales: the k-quants Q2_K to Q6_K, and IQ4_NL and IQ4_XS, in llama.cpp's own bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from runtime.errors import CompressError
from runtime.formats.bitpack import row_slices
from runtime.formats.cut import ROWS, Along
from runtime.formats.grid import GridScheme, Rounding
from runtime.formats.representation import Shape, Tensors, TensorSpec

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SLICE = 1 << 18  # codes that are packed at once
_MOST, _LEAST = 65504.0, 2.0**-24  # of fp16
_Plane = tuple[str, int, int, int]


class Kind(NamedTuple):
    """One type, as llama.cpp's `ggml-common.h` and `dequantize_row_*` define it.

    Attributes:
        bits: of a code.
        width, block: weights that share an integer scale from `low` to `high`; weights that share the fp16 factor `d` of those.
        minimum: every group has an integer minimum as well, times an fp16 `dmin`.
        offset: what is added to a scale where it is stored.
        layout: the bytes of a block, part by part. `d` and `dmin` are fp16. A plane `(of, low, bits, run)` has some bits of all codes or
            scales, from bit `low` on: the first `run` numbers in the lowest bits of `run` bytes, the next `run` above them, and so on.
            `scales` are scales and minima together.
    """

    bits: int
    width: int
    block: int
    low: int
    high: int
    minimum: bool
    offset: int
    layout: tuple[str | _Plane, ...]


KINDS = {
    "Q2_K": Kind(2, 16, 256, 0, 15, True, 0, ("scales", ("code", 0, 2, 32), "d", "dmin")),
    "Q3_K": Kind(3, 16, 256, -32, 31, False, 32, (
        ("code", 2, 1, 32), ("code", 0, 2, 32), ("scale", 0, 4, 8), ("scale", 4, 2, 4), "d")),
    "Q4_K": Kind(4, 32, 256, 0, 63, True, 0, ("d", "dmin", "scales", ("code", 0, 4, 32))),
    "Q5_K": Kind(5, 32, 256, 0, 63, True, 0, ("d", "dmin", "scales", ("code", 4, 1, 32), ("code", 0, 4, 32))),
    "Q6_K": Kind(6, 16, 256, -128, 127, False, 0, (("code", 0, 4, 64), ("code", 4, 2, 32), ("scale", 0, 8, 1), "d")),
    "IQ4_NL": Kind(4, 32, 32, 1, 1, False, 0, ("d", ("code", 0, 4, 16))),
    "IQ4_XS": Kind(4, 32, 256, -32, 31, False, 32, ("d", ("scale", 4, 2, 1), ("scale", 0, 4, 1), ("code", 0, 4, 16))),
}  # fmt: skip


@dataclass(frozen=True)
class KQuant(GridScheme):
    """Weights `d * scale * code`, or `d * scale * code - dmin * minimum`, exactly as llama.cpp dequantizes them.

    Codes are int8: 0 to `2^bits - 1` where there is a minimum, else signed; those of IQ4 are the 16 values of its table. Parameters, as
    stored: `d` fp16 `[out, in / block]`, `scale` int8 `[out, in / group_size]`, and where there is a minimum `dmin` and `minimum`
    likewise. For the solver a grid has the products: `scale` is `d * scale`, and `zero` the minimum `dmin * minimum`, not a zero point.
    """

    name = "k_quant"
    row_by_row = True
    bits: int = field(init=False, repr=False)
    type: Any = field(default="int", init=False, repr=False)
    symmetric: bool = field(init=False, repr=False)
    strategy: Any = field(default="group", init=False, repr=False)
    group_size: int | None = field(init=False, repr=False)
    kind: str = "Q4_K"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"k_quant has no kind {self.kind!r}; known are {', '.join(KINDS)}")
        own = KINDS[self.kind]
        for name, value in (("bits", own.bits), ("symmetric", not own.minimum), ("group_size", own.width)):
            object.__setattr__(self, name, value)

    @property
    def facts(self) -> Kind:
        """What llama.cpp says of the type."""
        return KINDS[self.kind]

    @property
    def table(self) -> bool:
        """Whether codes are values of IQ4's table."""
        return self.kind.startswith("IQ4")

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return sum(self._bytes(part) for part in self.facts.layout)

    def why_not(self, shape: Shape) -> str | None:
        if shape[1] % self.facts.block:
            return f"rows of {shape[1]} weights are not whole blocks of {self.facts.block}, which {self.kind} has"
        return None

    def describe(self) -> str:
        return self.kind

    @property
    def code_range(self) -> tuple[int, int]:
        if self.table:
            return IQ4_VALUES[0], IQ4_VALUES[-1]
        return super().code_range if self.symmetric else (0, 2**self.bits - 1)

    @property
    def rounding(self) -> Rounding:
        if self.table:
            return Rounding.IQ4
        return Rounding.INTEGER if self.symmetric else Rounding.MINIMUM

    def unit(self, columns: int) -> int:
        return self.facts.block

    # ---------------------------------------------------------------- arithmetic
    def codes(
        self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if zero is None:
            return super().codes(weight, scale, None, out)
        return torch.add(weight, zero, out=out).div_(scale).round_().clamp_(*self.code_range)

    def round_(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.copy_(_table(steps)[_index(steps)]) if self.table else super().round_(steps)

    def values(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        return codes * scale if zero is None else codes * scale - zero

    # ---------------------------------------------------------------- scales: an integer times what the block has in fp16
    def factor(self, wanted: torch.Tensor) -> torch.Tensor:
        """`wanted` as an fp16 `d` that is not zero, float32."""
        rounded = wanted.clamp(-_MOST, _MOST).to(torch.float16).float()
        return torch.where(rounded == 0, torch.where(wanted < 0, -_LEAST, _LEAST), rounded)

    def on_levels(self, wanted: torch.Tensor, factor: torch.Tensor, minimum: bool = False) -> torch.Tensor:
        """The nearest multiple of `factor` that a scale (never zero), or a minimum, can be."""
        levels = (wanted / factor).round_().clamp_(0 if minimum else self.facts.low, self.facts.high)
        return (levels if minimum else torch.where(levels == 0, 1.0, levels)) * factor

    def levels(self, products: torch.Tensor, minimum: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The finest fp16 factors `[rows, blocks]`, float32, and integers `[rows, groups]` that make up scales (or minima).

        A product of both is exact in float32, so that the division is as well. A block of zeros has the factor 0.

        Raises:
            CompressError: a product that no factor gives.
        """
        kind = self.facts
        groups = products.unflatten(-1, (-1, kind.block // kind.width)).flatten(0, 1)
        top = groups.gather(1, groups.abs().argmax(1, keepdim=True))
        factor, integers = torch.zeros_like(top), torch.zeros_like(groups)
        left = (top[:, 0] != 0).nonzero()[:, 0]
        for level in sorted(range(0 if minimum else kind.low, kind.high + 1), key=lambda n: -abs(n)):
            if level == 0 or left.numel() == 0:
                continue
            found = top[left] / level
            number = groups[left] / found
            fits = (found.to(torch.float16).float() == found) & (number.round() * found == groups[left])
            fits &= (number >= kind.low) & (number <= kind.high)
            whole = fits.all(1)
            factor[left[whole]], integers[left[whole]] = found[whole], number[whole].round()
            left = left[~whole]
        if left.numel():
            raise CompressError(f"a block of {self.kind} has scales that are no integers times an fp16 number")
        rows = products.shape[0]
        return factor.view(rows, -1), integers.view(rows, -1)

    def parameters_of(self, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> Tensors:
        d, levels = self.levels(scale)
        found = {"d": d.to(torch.float16), "scale": levels.to(torch.int8)}
        if zero is not None:
            d, levels = self.levels(zero, minimum=True)
            found |= {"dmin": d.to(torch.float16), "minimum": levels.to(torch.int8)}
        return found

    def products(self, parameters: Tensors) -> Tensors:
        """Scales, and minima under `zero_point`, as the solver has them: float32 `[out, groups]`."""
        per = self.facts.block // self.facts.width
        found = {"scale": parameters["d"].float().repeat_interleave(per, 1) * parameters["scale"]}
        if not self.symmetric:
            found["zero_point"] = parameters["dmin"].float().repeat_interleave(per, 1) * parameters["minimum"]
        return found

    # ---------------------------------------------------------------- the calls of a representation
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales that cover every group; `importance` has no say (methods search better ones)."""
        kind, groups = self.facts, weight.view(weight.shape[0], -1, self.width(weight.shape[1]))
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        reach = torch.maximum(-least, most) if self.symmetric else most - least
        found = {"scale": self._covering(reach / self.code_range[1], kind)}
        if not self.symmetric:
            found["zero"] = self._covering(-least, kind, minimum=True)
        return self.parameters_of(found["scale"], found.get("zero"), dtype)

    def _covering(self, wanted: torch.Tensor, kind: Kind, minimum: bool = False) -> torch.Tensor:
        """The smallest products at or above `wanted` for the largest factor that is needed, but for the rounding to fp16."""
        per = kind.block // kind.width
        factor = self.factor(wanted.unflatten(-1, (-1, per)).amax(-1) / kind.high).repeat_interleave(per, 1)
        return self.on_levels((wanted / factor).ceil() * factor, factor, minimum)

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().nearest(columns, self.products(parameters), first)

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """As llama.cpp, in float32, or in `dtype` where that is wider; then in `dtype`."""
        return super().dequantize(codes, self.products(parameters), dtype)

    # ---------------------------------------------------------------- on disk
    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        along = Along(1, self.facts.block, self.block_bytes)
        size = shape[1] // self.facts.block * self.block_bytes
        return {"weight_blocks": TensorSpec((shape[0], size), torch.uint8, (ROWS, along))}

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        shape = (codes.shape[0], codes.shape[1])
        size = self.tensors(shape, torch.float16)["weight_blocks"].shape
        blocks = torch.empty(size, dtype=torch.uint8, device=codes.device)
        for start, stop in row_slices(*shape, _SLICE):
            rows = slice(start, stop)
            blocks[rows] = self._encoded(codes[rows], self.rows(parameters, rows))
        return {"weight_blocks": blocks}

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        parts = [self._decoded(tensors["weight_blocks"][first:end]) for first, end in row_slices(*shape, _SLICE)]
        parts = parts or [self._decoded(tensors["weight_blocks"])]
        return torch.cat([codes for codes, _ in parts]), self.join_rows([parameters for _, parameters in parts])

    def _encoded(self, codes: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        kind, rows = self.facts, codes.shape[0]
        numbers = {name: p.unflatten(1, (-1, p.shape[1] // parameters["d"].shape[1])) for name, p in parameters.items()}
        numbers["code"] = self.unsigned(codes).unflatten(1, (-1, kind.block))
        numbers["scale"] = (numbers["scale"] + kind.offset).view(torch.uint8)
        found = []
        for part in kind.layout:
            if part == "scales":
                found.append(_mixed(numbers["scale"], numbers["minimum"].view(torch.uint8)))
            elif isinstance(part, str):
                found.append(numbers[part].contiguous().view(torch.uint8))
            else:
                found.append(_pack(numbers[part[0]], *part[1:]))
        return torch.cat(found, dim=2).view(rows, -1)

    def _decoded(self, stored: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        kind = self.facts
        sizes = [self._bytes(part) for part in kind.layout]
        pieces = stored.unflatten(1, (-1, sum(sizes))).split(sizes, dim=2)
        ones = (*pieces[0].shape[:2], kind.block // kind.width)
        numbers: Tensors = {"scale": torch.ones(ones, dtype=torch.uint8, device=stored.device)}
        planes: dict[str, list[torch.Tensor]] = {}
        for part, piece in zip(kind.layout, pieces, strict=True):
            if part == "scales":
                numbers["scale"], numbers["minimum"] = _unmixed(piece)
            elif isinstance(part, str):
                numbers[part] = piece.contiguous().view(torch.float16)
            else:
                planes.setdefault(part[0], []).append(_unpack(piece, *part[1:]))
        numbers |= {name: sum(found[1:], start=found[0]) for name, found in planes.items()}
        codes = self.signed(numbers.pop("code").flatten(1))
        numbers["scale"] = numbers["scale"].view(torch.int8) - kind.offset
        return codes, {
            name: (n.view(torch.int8) if n.dtype == torch.uint8 else n).flatten(1) for name, n in numbers.items()
        }

    def _bytes(self, part: str | _Plane) -> int:
        """Size of a part of a block."""
        kind = self.facts
        if isinstance(part, str):
            return {"scales": 12 if kind.width == 32 else 16}.get(part, 2)
        return (kind.block if part[0] == "code" else kind.block // kind.width) * part[2] // 8

    def unsigned(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes as they are stored, uint8."""
        if self.table:
            every = torch.arange(-128.0, 128.0, device=codes.device)
            return _index(every).to(torch.uint8)[codes.int() + 128]
        return (codes + 2 ** (self.bits - 1) if self.symmetric else codes).view(torch.uint8)

    def signed(self, codes: torch.Tensor) -> torch.Tensor:
        """Inverse of `unsigned`, int8."""
        if self.table:
            return _table(codes.view(torch.int8))[codes.int()]
        return codes.view(torch.int8) - (2 ** (self.bits - 1) if self.symmetric else 0)

    def to_config(self) -> dict[str, Any]:
        return {"representation": self.name, "kind": self.kind}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KQuant:
        unknown = sorted(config.keys() - {"representation", "kind"})
        if unknown or not isinstance(config.get("kind"), str):
            raise ValueError(f"k_quant takes a kind ({', '.join(KINDS)})" + (f", not {unknown[0]}" if unknown else ""))
        return cls(config["kind"])


def _index(steps: torch.Tensor) -> torch.Tensor:
    """Place in IQ4's table of the nearest value."""
    table = _table(steps)
    return torch.bucketize(steps, (table[1:] + table[:-1]) / 2)


def _table(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=like.dtype, device=like.device)


def _pack(numbers: torch.Tensor, low: int, bits: int, run: int) -> torch.Tensor:
    """A plane of uint8 numbers `[rows, blocks, n]`: uint8 `[rows, blocks, n * bits / 8]`."""
    runs = (numbers >> low & (1 << bits) - 1).unflatten(2, (-1, 8 // bits, run))
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)[:, None]
    return (runs << shift).sum(3, dtype=torch.uint8).flatten(2)


def _unpack(plane: torch.Tensor, low: int, bits: int, run: int) -> torch.Tensor:
    """Inverse of `_pack`; other bits are zero."""
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)[:, None]
    runs = plane.unflatten(2, (-1, 1, run)) >> shift & (1 << bits) - 1
    return (runs << low).flatten(2)


def _mixed(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Scales and minima, uint8 `[rows, blocks, groups]`: 16 of 4 bits a byte each, or 8 of 6 bits in 12 bytes.

    Of the 8 the first four have the lower 6 bits of bytes of their own; of the last four the lower 4 bits are in 4 bytes more, and the
    upper 2 bits above the others.
    """
    if scale.shape[2] == 16:
        return scale | minimum << 4
    (s, t), (m, n) = scale.split(4, dim=2), minimum.split(4, dim=2)
    return torch.cat([s | t >> 4 << 6, m | n >> 4 << 6, t & 15 | n << 4], dim=2)


def _unmixed(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `_mixed`."""
    if stored.shape[2] == 16:
        return stored & 15, stored >> 4
    s, m, rest = stored.split(4, dim=2)
    return torch.cat([s & 63, rest & 15 | s >> 6 << 4], dim=2), torch.cat([m & 63, rest >> 4 | m >> 6 << 4], dim=2)
