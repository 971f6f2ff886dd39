"""Integer and 4-bit float weights as the C kernels read them: panels of 32 rows, `runtime/kernels/cpu/c/planes.h`.

Prepared tensors, with `panels = ceil(out / 32)` and groups of the activations of `group` columns:

- `weight`: uint8 `[panels, groups, bytes of a group of 32 rows]`, codes of b bits in b bits;
- `scale`: `[panels, scale groups, 32]` in the dtype it is stored in (float32 if C has none like it: `stored_scale` keeps it);
- `zero_point`: int8, the same shape, for asymmetric weights;
- `least`: as `scale`, what integer minima between the codes are multiplied by, for k-quants that have them;
- `global_scale`: as stored, for block floats that have one;
- `runs`, `first_run`: where groups of zeros are left out of `weight`, `[stored groups, bytes]` then (`zero_groups.py`);
- `sums`: int16 `[panels, groups, 32]`, sums of the kept codes (2:4 layout only, `sparse24.py`);
- `weight_bitmap`, `weight_metadata`: as stored, where zeros that were kept could not be told from zeros that were pruned.

What fills up the last panel is never stored, what fills up the last group is multiplied with zeros. The stored weight comes back
exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from runtime.formats.bitpack import row_slices
from runtime.formats.block_float import HALVES
from runtime.formats.float8 import FLOAT8
from runtime.formats.k_quant import KQuant
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.formats.trellis import Trellis
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.planes import from_stream, pack_planes, unpack_planes, words_of
from runtime.kernels.cpu.zero_groups import kept_of, runs_of

# Scales and zero points in panels of 32 rows, `[panels, groups, 32]`, there and back.

PANEL = 32


def to_panels(tensors: Tensors, layer: Layer) -> Tensors:
    """Scales and zero points of stored tensors as panels."""
    scale, rows = tensors["weight_scale"], layer.shape[0]
    out = {"scale": panels_of(scale, rows)}
    if scale.dtype not in library.SCALES or (scale.dtype == FLOAT8 and bool(scale.isnan().any())):
        out |= {"scale": out["scale"].float(), "stored_scale": scale}
    if "weight_global_scale" in tensors:
        out["global_scale"] = tensors["weight_global_scale"]
    zero = layer.storage.zero_point(tensors, layer.grid)
    if zero is not None:
        out["zero_point"] = panels_of(zero, rows)
    return out


def panels_of(grid: torch.Tensor, rows: int) -> torch.Tensor:
    """`[out, groups]` (or `[1]`: one for all) -> `[panels, groups, 32]`."""
    grid = grid.view(1, 1).expand(rows, 1) if grid.dim() == 1 else grid
    panels = -(-rows // PANEL)
    high = torch.zeros(panels * PANEL, grid.shape[1], dtype=grid.dtype)
    high[:rows] = grid
    return high.view(panels, PANEL, -1).transpose(1, 2).contiguous()


def weight_of(values: torch.Tensor, mask: torch.Tensor | None, tensors: Tensors, layer: Layer) -> CompressedWeight:
    """The weight whose codes were unpacked, with its grids."""
    parameters = {}
    for name in ("scale", "zero_point"):
        if (panels := tensors.get(name)) is not None:
            flat = panels.transpose(1, 2).reshape(-1, panels.shape[1])[: layer.shape[0]]
            flat = flat[:1, 0] if layer.grid.strategy == "tensor" else flat
            parameters[name] = flat.clone(
                memory_format=torch.contiguous_format
            )  # with the strides of a tensor read from disk
    for name, stored in (("scale", "stored_scale"), ("global_scale", "global_scale")):
        if stored in tensors:
            parameters[name] = tensors[stored]
    return CompressedWeight.of(values, parameters, mask, layer.entry.scheme, layer.dtype)


def _unsigned(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes + (1 << (bits - 1)) if bits < 8 else codes ^ -128


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes - (1 << (bits - 1)) if bits < 8 else codes ^ -128


_LARGEST, _PREFERRED = 256, 128  # columns of an activation group; integer sums have room for no more
_BLOCK_FLOATS = frozenset({"nvfp4-pack-quantized", "mxfp4-pack-quantized"})
_STREAMS = _BLOCK_FLOATS | {"pack-quantized", "packed"}  # whose codes of 4 bits need no unpacking
SLICE = 1 << 20  # codes rearranged at once, so that they stay in the cache
# Of the groups. Measured (one row, 11008 x 4096, group 128, one thread, zeros spread at random): with 5 % of zeros a product takes 0.95
# to 1.04 of the time, with 10 % 0.87 to 0.93, with half 0.51 (AVX2) to 0.63 (AVX-512).
_WORTH_SKIPPING = 0.1


class Panels(ABC):
    """One of the layouts.

    Attributes:
        name: how kernels say that they read it.
        formats: storage formats it is made from.
        bits: smallest and largest code width it holds.
        multiple: what the group size must be a multiple of.
    """

    name: str
    formats: frozenset[str]
    bits: tuple[int, int]
    multiple: int = 16

    # ---------------------------------------------------------------- what fits
    def why_not(self, layer: Layer) -> str | None:
        """The reason this layout cannot hold the layer, or None."""
        return library.why_not_dtype(layer.dtype) or layer.why_not_integers(*self.bits, self.multiple)

    def group(self, layer: Layer) -> int:
        """Columns of the activations that share a scale: they never cross a group of the weight."""
        activations, columns, whole = layer.entry.scheme.activations, layer.shape[1], layer.group
        if activations is not None and activations.group_size:
            whole = math.gcd(whole, activations.group_size)
        if not whole:
            count = -(-columns // _PREFERRED)
            return max(1, -(-columns // (count * 32))) * 32 if count else 32
        if whole <= _LARGEST:
            return whole
        fitting = [g for g in range(self.multiple, _LARGEST + 1, self.multiple) if whole % g == 0]
        return _PREFERRED if _PREFERRED in fitting else fitting[-1]

    @abstractmethod
    def kind(self, layer: Layer) -> str:
        """One of `library.KINDS`."""

    def share(self, layer: Layer) -> int:
        """Groups of the activations that have one scale of the weight."""
        group = self.group(layer)
        return layer.group // group if layer.group else max(1, -(-layer.shape[1] // group))

    def group_bytes(self, layer: Layer) -> int:
        """Bytes of a group of activations' columns in a panel."""
        return library.group_bytes(library.KINDS[self.kind(layer)], self.group(layer)) * PANEL

    # ---------------------------------------------------------------- there and back
    @abstractmethod
    def pack(self, tensors: Tensors, layer: Layer) -> Tensors:
        """Stored tensors -> prepared ones."""

    @abstractmethod
    def unpack(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        """Prepared tensors -> the weight, exactly."""

    def sample(self, layer: Layer) -> Tensors:
        """Prepared tensors of random codes, to measure with."""
        panels, group = -(-layer.shape[0] // PANEL), self.group(layer)
        groups = -(-layer.shape[1] // group)
        weight = torch.randint(0, 256, (panels, groups, self.group_bytes(layer)), dtype=torch.uint8)
        sets = -(-groups // self.share(layer))
        return {
            "weight": weight,
            "scale": torch.ones(panels, sets, PANEL, dtype=torch.bfloat16),
            "sums": torch.zeros(panels, groups, PANEL, dtype=torch.int16),
        }

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        """What the C library is given: addresses of the tensors, which must outlive it. `bias` is float32 `[out]`."""
        weight, scale, group = tensors["weight"], tensors["scale"], self.group(layer)
        groups = -(-layer.shape[1] // group)
        found = library.Linear(library.KINDS[self.kind(layer)], scale_type=library.SCALES[scale.dtype], factor=1.0)
        found.group, found.share, found.groups = group, self.share(layer), groups
        found.rows, found.columns = layer.shape
        found.weight, found.scale = weight.data_ptr(), scale.data_ptr()
        also = (*(tensors.get(name) for name in ("least", "zero_point", "sums", "runs", "first_run")), bias)
        found.least, found.zero, found.sums, found.runs, found.first_run, found.bias = (
            x if x is None else x.data_ptr() for x in also
        )
        return found


class Dense(Panels):
    """Every code is there, at its own width."""

    def __init__(self, name: str, bits: tuple[int, int], storage: frozenset[str]) -> None:
        self.name, self.bits, self.formats = name, bits, storage

    def kind(self, layer: Layer) -> str:
        return f"w{layer.grid.bits}"

    def width(self, layer: Layer) -> int:
        """Bits of a code."""
        return layer.grid.bits

    def numbers(self, codes: torch.Tensor, layer: Layer) -> torch.Tensor:
        """What codes of the panels count, int8."""
        return _signed(codes, layer.grid.bits)

    def codes(self, numbers: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Inverse of `numbers`."""
        return _unsigned(numbers, layer.grid.bits)

    def code_bytes(self, layer: Layer) -> int:
        """Those of `group_bytes` that are codes."""
        return self.group_bytes(layer)

    def scales(self, tensors: Tensors, weight: CompressedWeight, layer: Layer) -> Tensors:
        """Prepared scales, and what belongs to them."""
        return to_panels(tensors, layer)

    def pack(self, tensors: Tensors, layer: Layer) -> Tensors:
        (rows, columns), group = layer.shape, self.group(layer)
        panels, groups, size = -(-rows // PANEL), -(-columns // group), self.code_bytes(layer)
        width, (row_words, scales) = groups * size // (4 * PANEL), self._reader(tensors, layer)
        words = library.pack_stream(words_of(tensors["weight_packed"]), panels, width) if _streams(layer) else None
        if words is None:
            words = torch.empty(panels, width, PANEL, dtype=torch.int32)
            for start, end in row_slices(panels, groups * group * PANEL, SLICE):
                part = torch.zeros((end - start) * PANEL, width, dtype=torch.int32)
                read = row_words(slice(start * PANEL, min(rows, end * PANEL)))
                part[: read.shape[0], : read.shape[1]] = read
                words[start:end] = part.view(end - start, PANEL, -1).transpose(1, 2)
        out = {"weight": words.view(torch.uint8).view(panels, groups, size)} | scales
        if layer.entry.scheme.sparsity is not None and panels * groups:
            kept = self._kept(tensors, layer, scales["scale"])
            if kept.float().mean() <= 1 - _WORTH_SKIPPING:
                out |= {"weight": out["weight"][kept]} | runs_of(kept)
        positions = layer.storage.positions
        return out if positions is None else out | {positions: tensors[positions]}

    def _kept(self, tensors: Tensors, layer: Layer, scale: torch.Tensor) -> torch.Tensor:
        """Bool `[panels, groups]`: False where all weights are zero, whatever they are multiplied with: their scales are finite."""
        (rows, columns), group = layer.shape, self.group(layer)
        panels, groups, weight = -(-rows // PANEL), -(-columns // group), layer.unpack(tensors)
        zero = 0 if weight.zero_point is None else layer.grid.spread(weight.zero_point, columns)
        other = torch.nn.functional.pad(weight.values != zero, (0, groups * group - columns, 0, panels * PANEL - rows))
        sets = ~scale.isfinite().all(-1).repeat_interleave(self.share(layer), 1)[:, :groups]
        kept = other.view(panels, PANEL, groups, group).any(-1).any(1) | sets
        kept.view(-1)[:1] = True  # so that there is a group
        return kept

    def _reader(self, tensors: Tensors, layer: Layer) -> tuple[Callable[[slice], torch.Tensor], Tensors]:
        """A function that makes some rows' words `[rows, words]`, and the prepared scales and zero points."""
        columns, bits, group = layer.shape[1], self.width(layer), self.group(layer)
        if _streams(layer):
            layer.storage.validate(tensors, layer.entry.scheme, layer.shape, layer.dtype)
            packed = words_of(tensors["weight_packed"])
            return lambda rows: from_stream(packed[rows]), to_panels(tensors, layer)
        weight = layer.unpack(tensors)

        def row_words(rows: slice) -> torch.Tensor:
            codes = torch.zeros(rows.stop - rows.start, -(-columns // group) * group, dtype=torch.int8)
            codes[:, :columns] = self.codes(weight.values[rows], layer)
            units, half = codes.view(codes.shape[0], -1, group).split((group // 32 * 32, group % 32), -1)
            whole = pack_planes(units.unflatten(-1, (-1, 32)).contiguous(), bits).flatten(-2)
            return (
                torch.cat((whole, pack_planes(half.contiguous(), bits)), -1).flatten(1)
                if group % 32
                else whole.flatten(1)
            )

        return row_words, self.scales(tensors, weight, layer)

    def values(self, tensors: Tensors, layer: Layer, kept: torch.Tensor | None = None) -> torch.Tensor:
        """What the codes count, int8 `[out, in]`. `kept`: bool `[panels, groups]`, those that are stored; None: all."""
        (rows, columns), bits, group = layer.shape, self.width(layer), self.group(layer)
        packed, groups = tensors["weight"], -(-columns // group)
        if kept is not None:
            packed = packed.new_zeros(*kept.shape, packed.shape[-1]).masked_scatter_(kept[..., None], packed)
        panels = packed.shape[0]
        words = packed.view(panels, -1).view(torch.int32).view(panels, -1, PANEL)
        values = torch.empty(rows, columns, dtype=torch.int8)
        for start, end in row_slices(panels, groups * group * PANEL, SLICE):
            row_words = words[start:end].transpose(1, 2).reshape((end - start) * PANEL, groups, -1)
            whole = row_words[..., : group // 32 * bits]
            codes = unpack_planes(whole.unflatten(-1, (-1, bits)), bits, 32).flatten(-2) if group >= 32 else None
            if group % 32:
                half = unpack_planes(row_words[..., group // 32 * bits :], bits, 16)
                codes = half if codes is None else torch.cat((codes, half), -1)
            assert codes is not None
            part = values[start * PANEL : end * PANEL]
            part.copy_(self.numbers(codes, layer).flatten(1)[: part.shape[0], :columns])
        return values

    def unpack(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        (rows, columns), group = layer.shape, self.group(layer)
        kept = kept_of(tensors, -(-columns // group)) if "runs" in tensors else None
        values = self.values(tensors, layer, kept)
        weight = weight_of(values, layer.storage.mask(tensors, columns), tensors, layer)
        if kept is None:
            return weight
        there = kept.repeat_interleave(PANEL, 0)[:rows].repeat_interleave(group, 1)[:, :columns]
        zero = (
            torch.zeros((), dtype=torch.int8)
            if weight.zero_point is None
            else layer.grid.spread(weight.zero_point, columns)
        )
        return replace(weight, values=torch.where(there, weight.values, zero))


class BlockFloats(Dense):
    """4-bit block floats: codes and scales are the stored bytes. Minus zero, which others' files may hold, comes back as zero."""

    def __init__(self) -> None:
        super().__init__("panels-e2m1", (4, 4), _BLOCK_FLOATS)

    def kind(self, layer: Layer) -> str:
        return "e2m1"

    def why_not(self, layer: Layer) -> str | None:
        return library.why_not_dtype(layer.dtype)

    def numbers(self, codes: torch.Tensor, layer: Layer) -> torch.Tensor:
        return HALVES[codes.int()]

    def sample(self, layer: Layer) -> Tensors:
        made = super().sample(layer)
        scale = made["scale"].to(FLOAT8)  # of one byte, whatever it means
        return made | {"scale": scale if layer.grid.group_size == 16 else scale.view(torch.uint8)}

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        found = super().linear(tensors, layer, bias)
        found.factor = 0.5 * (library.FLOAT8_UNIT if found.scale_type == library.FLOAT8 else 1.0)  # codes are in halves
        if "global_scale" in tensors:
            found.factor = float(found.factor / tensors["global_scale"].double())
        return found


class KQuants(Dense):
    """Block types of GGUF: codes as integers of their width, and before those of every 32 columns the integer scales (planes.h).

    Bits a weight beyond those of llama.cpp: 1/8 with minima of 6 bits or scales of 6 bits for 16 columns, 1/16 for IQ4_XS; none for others.
    """

    def __init__(self) -> None:
        super().__init__("panels-k", (2, 6), frozenset({KQuant.name}))

    def kind(self, layer: Layer) -> str:
        return self._grid(layer).kind

    def why_not(self, layer: Layer) -> str | None:
        return library.why_not_dtype(layer.dtype)

    def group(self, layer: Layer) -> int:
        return min(_PREFERRED, self._grid(layer).facts.block)

    def share(self, layer: Layer) -> int:
        return self._grid(layer).facts.block // self.group(layer)

    def code_bytes(self, layer: Layer) -> int:
        return library.group_bytes(layer.grid.bits, self.group(layer)) * PANEL

    def numbers(self, codes: torch.Tensor, layer: Layer) -> torch.Tensor:
        return self._grid(layer).signed(codes)

    def codes(self, numbers: torch.Tensor, layer: Layer) -> torch.Tensor:
        return self._grid(layer).unsigned(numbers).view(torch.int8)

    def scales(self, tensors: Tensors, weight: CompressedWeight, layer: Layer) -> Tensors:
        panels = {name: panels_of(p, layer.shape[0]) for name, p in weight.parameters.items()}
        found = {new: panels[name] for new, name in (("scale", "d"), ("least", "dmin")) if name in panels}
        if not self._levels(layer):
            return found
        levels, minimum = (panels[name].view(torch.uint8) if name in panels else None for name in ("scale", "minimum"))
        assert levels is not None
        if layer.group == 16:
            levels = levels if minimum is None else levels | minimum << 4
            levels = levels.unflatten(1, (-1, 2)).transpose(2, 3).flatten(2)
        elif minimum is not None:
            levels = torch.cat((levels, minimum), 2)
        return found | {"levels": levels}

    def sample(self, layer: Layer) -> Tensors:
        made = super().sample(layer)
        scale = made.pop("scale").to(torch.float16)
        return made | {"scale": scale} | ({} if layer.grid.symmetric else {"least": scale})

    def pack(self, tensors: Tensors, layer: Layer) -> Tensors:
        out = super().pack(tensors, layer)
        if (levels := out.pop("levels", None)) is None:
            return out
        codes = out["weight"]
        units = torch.cat((levels, codes.view(*levels.shape[:2], -1)), 2)
        return out | {"weight": units.view(*codes.shape[:2], -1)}

    def unpack(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        weight, width, (rows, columns) = tensors["weight"], self._levels(layer) * PANEL, layer.shape
        units = weight.view(weight.shape[0], columns // 32, -1)
        levels, codes = units.split((width, units.shape[2] - width), 2)
        codes = codes.reshape(*weight.shape[:2], -1)
        found = super().unpack(tensors | {"weight": codes}, layer)

        def rows_of(panels: torch.Tensor) -> torch.Tensor:
            return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:rows].contiguous()

        own = {name: rows_of(tensors[new]) for new, name in (("scale", "d"), ("least", "dmin")) if new in tensors}
        if not width:
            return replace(found, own=own | {"scale": torch.ones_like(own["d"], dtype=torch.int8)})
        parts = [levels]
        if layer.group == 16:
            levels = levels.unflatten(2, (PANEL, 2)).transpose(2, 3).flatten(1, 2)
            parts = [levels] if layer.grid.symmetric else [levels & 15, levels >> 4]
        elif not layer.grid.symmetric:
            parts = list(levels.split(PANEL, 2))
        names = ("scale", "minimum")[: len(parts)]
        own |= {name: rows_of(part).view(torch.int8) for name, part in zip(names, parts, strict=True)}
        return replace(found, own=own)

    def _levels(self, layer: Layer) -> int:
        """Bytes of levels that a row has for 32 columns."""
        return (self.group_bytes(layer) - self.code_bytes(layer)) // PANEL // max(1, self.group(layer) // 32)

    def _grid(self, layer: Layer) -> KQuant:
        assert isinstance(layer.grid, KQuant)
        return layer.grid


class Trellises(Panels):
    """Words of a trellis, as they are stored: those of a panel's rows for the same 16 columns are neighbours."""

    name = "panels-trellis"
    formats = frozenset({Trellis.name})

    def why_not(self, layer: Layer) -> str | None:
        return library.why_not_dtype(layer.dtype)

    def kind(self, layer: Layer) -> str:
        return "trellis"

    def pack(self, tensors: Tensors, layer: Layer) -> Tensors:
        rows, columns = layer.shape
        words = panels_of(tensors["weight_words"], rows)
        groups = columns // self.group(layer)
        return {
            "weight": words.view(torch.uint8).view(len(words), groups, -1),
            "scale": panels_of(tensors["weight_scale"], rows),
        }

    def unpack(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        weight = tensors["weight"]
        words = weight.view(torch.int32).view(len(weight), -1, PANEL)
        codes, scale = (part.transpose(1, 2).flatten(0, 1)[: layer.shape[0]] for part in (words, tensors["scale"]))
        parameters = {"scale": scale.contiguous()}
        return CompressedWeight.of(codes.contiguous(), parameters, None, layer.entry.scheme, layer.dtype)


W4 = Dense("panels-w4", (2, 4), frozenset({"pack-quantized", "packed", "int-quantized", "sparse24", "bitmap"}))
W8 = Dense("panels-w8", (5, 8), frozenset({"pack-quantized", "packed", "int-quantized", "sparse24", "bitmap"}))
FP4 = BlockFloats()
K_QUANTS = KQuants()
TRELLIS = Trellises()


def _streams(layer: Layer) -> bool:
    return layer.entry.format in _STREAMS and layer.grid.bits == 4
