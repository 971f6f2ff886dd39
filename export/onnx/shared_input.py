"""Layers that read the same input as one product with a wider matrix: queries, keys and values; gate and up.

Columns of a product do not know of each other, so that nothing changes but the number of calls: on a CPU each costs a round of its
threads, which at one token is as long as a small matrix takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from export.onnx.builder import Builder
from export.onnx.dialect import Dialect
from export.onnx.grid import Grid
from export.onnx.linear import add_bias, written_grid
from export.onnx.matmul_nbits import matmul_nbits
from export.target import Job

if TYPE_CHECKING:
    import onnx_ir


def groups(job: Job, marks: Iterable[onnx_ir.Node]) -> dict[onnx_ir.Node, list[onnx_ir.Node]]:
    """{first mark: its group of two or more}: linear layers of one block and one scheme on one value, whose inputs are not rounded."""
    found: dict[object, list[onnx_ir.Node]] = {}
    modules: list[str] = []
    for mark in marks:
        if mark.op_type != "Linear":
            continue
        module = mark.attributes.get_string("module", "")
        modules.append(module)
        entry = job.source.entries.get(module)
        if entry is None or entry.scheme.grid is None or entry.scheme.grid.type != "int":
            continue
        if entry.scheme.activations is None:
            found.setdefault((mark.inputs[0], module.rpartition(".")[0], entry.scheme.grid), []).append(mark)
    # A layer that is called twice keeps a matrix of its own, which both calls share.
    once = {module for module, count in Counter(modules).items() if count == 1}
    kept = [[m for m in group if m.attributes.get_string("module", "") in once] for group in found.values()]
    return {group[0]: group for group in kept if len(group) > 1}


def write_together(b: Builder, job: Job, modules: list[str], x: onnx_ir.Value, dialect: Dialect) -> list[onnx_ir.Value]:
    """`x [..., K]` times the matrices of `modules`, plus their biases: one `[..., N]` each."""
    grids = [written_grid(job, module, dialect) for module in modules]
    product = matmul_nbits(b, joined(modules), x, _beside(grids), dialect)
    sizes = b.constant([grid.codes.shape[1] for grid in grids])
    parts = b.op("Split", [product, sizes], "Split", outputs=len(modules), axis=-1)
    return [add_bias(b, job, module, part, dialect) for module, part in zip(modules, parts, strict=True)]


def _beside(grids: list[Grid]) -> Grid:
    """One matrix of all columns. One scheme makes grids of one kind."""
    first = grids[0]
    assert all(
        (g.bits, g.block, g.zero_point is None) == (first.bits, first.block, first.zero_point is None) for g in grids
    )
    zeros = [grid.zero_point for grid in grids if grid.zero_point is not None]
    return Grid(
        torch.cat([grid.codes for grid in grids], 1),
        first.bits,
        torch.cat([grid.scale for grid in grids], 1),
        torch.cat(zeros, 1) if zeros else None,
        first.block,
    )


def joined(modules: list[str]) -> str:
    """`model.layers.0.self_attn.q_proj+k_proj+v_proj`."""
    return "+".join([modules[0], *(module.rpartition(".")[2] for module in modules[1:])])
