"""Codes, scales and zero points read from the files that were written, and compared bit for bit with the artifact's.

Where inputs are rounded to int8 a sum in another order moves tokens by more than a wrong scale of one layer does, so that numbers
alone would let such a scale pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from export.onnx_graph.dialect import Dialect, dialect_of, fast_name, layer_rules
from export.onnx_graph.grid import FLOAT8, Grid, to_grid
from export.target import Job
from runtime.errors import CompressError

CODES, SCALE, ZERO = "weight_codes", "weight_scale", "weight_zero_point"


def read_back(job: Job, files: list[str]) -> int:
    """How many compressed layers of `files` (in `job.folder`) were compared; one is in memory at a time.

    Raises:
        CompressError: a constant is not what the artifact has there, or belongs to no layer of it; a decoder's layer has none.
    """
    spoken, compared = dialect_of(job.options), set()
    for file in files:
        constants = _Constants(job.folder / file)
        for stem in [name.removesuffix(f".{CODES}") for name in constants.stored if name.endswith(f".{CODES}")]:
            modules = modules_of(stem)
            unknown = next((m for m in modules if m not in job.source.entries), None)
            if unknown is not None:
                raise CompressError(f"{file} has codes of {unknown}, which the artifact does not compress")
            start = 0
            found = constants.grid(stem, spoken)
            for module in modules:
                scheme = job.source.entries[module].scheme
                wanted = to_grid(job.source.weight(module), layer_rules(scheme, spoken), job.options.requantize, module)
                columns = wanted.codes.shape[1]
                wrong = difference(_columns(found, start, columns, wanted), wanted, spoken.dtype)
                if wrong is not None:
                    raise CompressError(f"{file} does not hold the artifact's {wrong} of {module}")
                start += columns
                compared.add(module)
            if start != found.codes.shape[1]:
                raise CompressError(f"{file} has {found.codes.shape[1]} columns of codes under {stem}, not {start}")
        second = job.folder / fast_name(file)
        if second.is_file() and constants.stored != _Constants(second).stored:
            raise CompressError(f"{second.name} has other weights than {file}")
    # encoders are written without their heads
    entries = job.source.entries if job.facts.get("kind") == "decoder" else {}
    for module, entry in entries.items():
        if entry.scheme.grid is not None and module not in job.source.embeddings and module not in compared:
            raise CompressError(f"no file has codes of {module}, which the artifact compresses")
    return len(compared)


def modules_of(stem: str) -> list[str]:
    """`block.q+k+v` is `block.q`, `block.k` and `block.v` side by side (`export.onnx_graph.linear.joined`)."""
    first, *rest = stem.split("+")
    block = first.rpartition(".")[0]
    return [first, *(f"{block}.{name}" if block else name for name in rest)]


def difference(found: Grid, wanted: Grid, dtype: torch.dtype) -> str | None:
    """What of a written weight is not the artifact's; None where all of it is.

    Args:
        dtype: of the graph; where that is float16 a scale may have been rounded to it.
    """
    codes = [grid.codes.view(torch.uint8) if grid.codes.dtype == FLOAT8 else grid.codes for grid in (found, wanted)]
    if not torch.equal(*codes):
        return "codes"
    scale = wanted.scale.float()
    if found.scale.dtype == torch.float16 and dtype == torch.float16:
        scale = wanted.scale.to(torch.float16).float()
    if not torch.equal(found.scale.float(), scale):
        return "scales"
    ours, theirs = found.zero_point, wanted.zero_point
    same = ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
    return None if same else "zero points"


def _columns(found: Grid, start: int, count: int, like: Grid) -> Grid:
    """`count` columns, with scales in the shape of `like` where that is the same number of them."""
    stop = start + count
    scale = found.scale[..., start:stop] if found.scale.numel() > 1 else found.scale
    if like.block is None and scale.numel() == like.scale.numel():
        scale = scale.reshape(like.scale.shape)  # one scale in all is kept as a vector or as a scalar
    zero = None if found.zero_point is None else found.zero_point[..., start:stop]
    return Grid(found.codes[:, start:stop], found.bits, scale, zero, like.block)


class _Constants:
    """Constants of one file by their names; values are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path = path
        graph = onnx.load(str(path), load_external_data=False).graph
        self.stored = {value.name: value for value in graph.initializer}
        self.packed = {  # codes as MatMulNBits has them, with the inputs that they are padded from
            node.input[1]: {a.name: a.i for a in node.attribute} for node in graph.node if node.op_type == "MatMulNBits"
        }

    def grid(self, stem: str, spoken: Dialect) -> Grid:
        """Codes `[K, N]` and what belongs to them; CompressError where there is no scale."""
        codes, scale, zero = (self.read(f"{stem}.{part}") for part in (CODES, SCALE, ZERO))
        if codes is None or scale is None:
            raise CompressError(f"{self.path.name} has no scales for {stem}")
        shape = self.packed.get(f"{stem}.{CODES}")
        if shape is None:
            return Grid(codes, 8, scale, zero, None)
        assert spoken.own_operators
        bits, inputs, block = shape["bits"], shape["K"], shape["block_size"]
        if zero is not None:
            zero = _signed(zero, bits)[:, : scale.shape[1]].t()
        return Grid(_signed(codes, bits)[:, :inputs].t(), bits, scale.t(), zero, block)

    def read(self, name: str) -> torch.Tensor | None:
        """One constant: int8 for 4-bit codes too, float8 as it is."""
        import numpy
        from onnx import TensorProto, numpy_helper

        stored = self.stored.get(name)
        if stored is None:
            return None
        copy: Any = TensorProto()
        copy.CopyFrom(stored)  # else every matrix would stay in memory
        values = numpy_helper.to_array(copy, str(self.path.parent))
        if copy.data_type == TensorProto.FLOAT8E4M3FN:
            return torch.from_numpy(values.view(numpy.uint8).copy()).view(FLOAT8)
        if copy.data_type == TensorProto.INT4:
            values = values.astype(numpy.int8)
        return torch.from_numpy(values.copy())


def _signed(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[N, ...]` of MatMulNBits as int8 codes `[N, codes]`; the earlier of two 4-bit codes is in the low half."""
    flat = packed.reshape(packed.shape[0], -1)
    if bits == 4:
        flat = torch.stack([flat & 15, flat >> 4], -1).reshape(packed.shape[0], -1)
    return (flat.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
