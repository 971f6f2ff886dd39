"""Plan of a checkpoint: scheme and layout of every compressed module, or dense; decided before anything is read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from export.huggingface.fused_layers import disagreement, fused_sets, words
from export.huggingface.grids import group_for, union, widened
from export.huggingface.shards import Part
from export.source import Source, dtype_name
from export.target import Conversion, merged
from runtime.formats import TensorSpec
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme, Scheme


class UnfitError(Exception):
    """A module that the layout cannot hold; the message is the reason, a clause that follows the module's name."""


@dataclass(frozen=True)
class Plan:
    """How the export stores an artifact.

    Attributes:
        entries: {module: scheme and layout} of the modules that stay compressed, in the model's order.
        dense: modules that are compressed in the artifact and dense in the export.
        problem: why the artifact does not fit, or None; the rest is then incomplete.
    """

    entries: Mapping[str, ModuleEntry]
    dense: tuple[str, ...] = ()
    problem: str | None = None


class Layout(ABC):
    """One of the two ways to store: what fits, which tensors that makes, and what readers make of it."""

    name: str

    @abstractmethod
    def goal(self, entry: ModuleEntry, shape: tuple[int, int], keep_bits: bool) -> ModuleEntry | None:
        """How a linear layer is stored; None: dense.

        Raises:
            UnfitError: not at all.
        """

    @abstractmethod
    def specs(self, source: Source, module: str, entry: ModuleEntry) -> dict[str, TensorSpec]:
        """{full name: shape and dtype} of the tensors of one compressed module."""

    @abstractmethod
    def parts(self, job: Any, module: str, entry: ModuleEntry) -> list[Part]:
        """What makes those tensors. `job` is an `export.target.Job`."""

    @abstractmethod
    def objections(self, entry: ModuleEntry, shape: tuple[int, int], options: Any) -> Iterator[str]:
        """What kernels do not take, in sentences; `shape` is that of the fused layer."""

    @abstractmethod
    def config(self, source: Source, plan: Plan, options: Any) -> dict[str, Any]:
        """`quantization_config` of a plan that compresses something."""

    def remarks(self, source: Source, plan: Plan, options: Any) -> list[Conversion]:
        """What readers of this layout should know."""
        rows = {name: source.shapes[name][0] for name in plan.entries}
        for fused, shards in fused_sets(plan.entries).items():
            if not fused.endswith(".experts"):  # which are not stacked in rows
                rows |= {name: sum(source.shapes[shard][0] for shard in shards) for name in shards}
        return merged(
            remark(text, [name])
            for name, entry in plan.entries.items()
            for text in self.objections(entry, (rows[name], source.shapes[name][1]), options)
        )

    def check(self, entries: Mapping[str, ModuleEntry], source: Source) -> str | None:
        """Why these modules cannot be stored together, or None."""
        return None


def make_plan(layout: Layout, source: Source, options: Any) -> Plan:
    """Decide for every module, and hold the result against what engines fuse."""
    entries: dict[str, ModuleEntry] = {}
    dense = []
    for name, entry in source.entries.items():
        if name in source.embeddings:
            dense.append(name)  # no loader of either layout takes a packed table
            continue
        try:
            goal = layout.goal(entry, source.shapes[name], options.keep_bits)
        except UnfitError as reason:
            return Plan(entries, tuple(dense), f"{name} {reason}")
        if goal is None:
            dense.append(name)
        else:
            entries[name] = goal
    linear = [name for name in source.shapes if name not in source.embeddings]
    sets = fused_sets(linear)
    if options.unify:
        entries = _unify(entries, sets.values(), source)
        if layout.check(entries, source) is not None:
            entries = _unify(entries, [tuple(entries)], source)
    problem = disagreement(sets, entries) or layout.check(entries, source)
    if problem is not None and not options.unify:
        problem += "; unify=true stores such integer weights in one scheme that holds them all exactly"
    return Plan(entries, tuple(dense), problem)


def integer_goal(weights: GridScheme, columns: int, keep_bits: bool) -> GridScheme | None:
    """The nearest grid that kernels for 16-bit activations know and that holds these integer weights; None: only dense will do."""
    bits = weights.bits if keep_bits else widened(weights.bits)
    if weights.strategy != "group":
        return GridScheme(bits, "int", weights.symmetric, "channel", None)
    size = group_for(weights.group_size or columns, columns)
    return None if size is None else GridScheme(bits, "int", weights.symmetric, "group", size)


def _unify(
    entries: Mapping[str, ModuleEntry], sets: Iterable[tuple[str, ...]], source: Source
) -> dict[str, ModuleEntry]:
    """One scheme for each set of weight-only integer layers; the other sets as they are."""
    result = dict(entries)
    for shards in sets:
        found = [entries[name] for name in shards if name in entries]
        schemes = [entry.scheme.grid for entry in found]
        grids = [grid for grid in schemes if grid is not None]
        if len(grids) < len(shards) or len(set(found)) == 1 or any(e.scheme.activations for e in found):
            continue
        widths = [source.shapes[name][1] for name in shards]
        # a scale a row, whatever its length, or groups that divide every row
        columns = math.gcd(*widths) if any(grid.strategy == "group" for grid in grids) else max(widths)
        goal = union(grids, columns)
        if goal is not None:
            for name in shards:
                result[name] = replace(entries[name], scheme=Scheme(goal))
    return result


def changes(layout: Layout, source: Source, plan: Plan) -> Iterator[Conversion]:
    """Modules whose scheme differs between artifact and export."""
    for name in (*plan.entries, *plan.dense):
        before, after = source.entries[name], plan.entries.get(name)
        if after is not None and same(before, after):
            continue
        pattern = f", {before.scheme.sparsity} sparse" if before.scheme.sparsity else ""
        was, exact = f"{words(before)} ({before.format}{pattern})", after is not None
        if after is not None:
            what = f"{was} becomes {words(after)} ({after.format}{', zeros stored' if before.scheme.sparsity else ''})"
        elif before.scheme.weights is None:
            what, exact = f"{before.scheme.sparsity} sparse floats ({before.format}) become dense, zeros stored", True
        else:
            dtype = dtype_name(source.dtype)
            what = f"{was} becomes dense, rounded to {dtype} as the artifact does when it computes in {dtype}"
        yield Conversion(what, (name,), exact, bytes_after(layout, source, plan, name) - source.module_bytes(name))


def same(before: ModuleEntry, after: ModuleEntry) -> bool:
    """True when the stored tensors can be copied: only the note of a sparsity pattern may go."""
    return before.format == after.format and replace(before.scheme, sparsity=None) == after.scheme


def bytes_after(layout: Layout, source: Source, plan: Plan, module: str) -> int:
    """Bytes of the same module in the export."""
    if module in plan.dense:
        rows, columns = source.shapes[module]
        return rows * columns * source.dtype.itemsize
    return sum(spec.bytes for spec in layout.specs(source, module, plan.entries[module]).values())


def remark(text: str, modules: Iterable[str]) -> Conversion:
    """Something to know about a layout that changes no stored number."""
    return Conversion(text, tuple(modules), True, 0)
