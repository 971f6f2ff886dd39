"""Layers that engines fuse into one, and that must therefore be stored in one scheme.

vLLM and SGLang load q, k and v as one matrix, gate and up as another, and all experts of a layer as one kernel's operand. vLLM
refuses shards of different schemes ("Found a different quantization schemes for ...", `should_ignore_layer` in its
compressed_tensors/utils.py), and where the shards' schemes are listed apart takes the first one's for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme
from runtime.modeling.tensor_names import FUSED_INTO


def fused_sets(modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """{name of the fused layer: its shards}, for every set of which at least two are among `modules`."""
    sets: dict[str, list[str]] = {}
    for name in modules:
        parent, _, leaf = name.rpartition(".")
        experts = re.match(r"(.*\.experts)\.\d+\.", name)
        if experts is not None:
            sets.setdefault(experts[1], []).append(name)
        elif leaf in FUSED_INTO:
            sets.setdefault(f"{parent}.{FUSED_INTO[leaf]}" if parent else FUSED_INTO[leaf], []).append(name)
    return {fused: tuple(shards) for fused, shards in sets.items() if len(shards) > 1}


def disagreement(sets: Mapping[str, tuple[str, ...]], stored: Mapping[str, ModuleEntry]) -> str | None:
    """The first fused layer whose shards differ, with both schemes, in a clause; None when all agree.

    Args:
        stored: how each compressed module will be stored; the others are dense.
    """
    for fused, shards in sets.items():
        first = shards[0]
        for other in shards[1:]:
            if _key(stored.get(first)) != _key(stored.get(other)):
                return (
                    f"engines load {first} and {other} as one layer ({fused.rpartition('.')[2]}), which needs one scheme, but "
                    f"{first.rpartition('.')[2]} is {words(stored.get(first))} and {other.rpartition('.')[2]} is "
                    f"{words(stored.get(other))}"
                )
    return None


def words(entry: ModuleEntry | None) -> str:
    """A scheme for people: "int4 in groups of 64, symmetric"."""
    if entry is None or entry.scheme.weights is None:
        return "dense"
    weights, activations = entry.scheme.grid, entry.scheme.activations
    text = entry.scheme.weights.describe()
    if weights is not None:
        spread = {"group": f"in groups of {weights.group_size}", "channel": "a scale a row", "tensor": "one scale"}
        text = f"{weights.type}{weights.bits} {spread[weights.strategy]}"
        if weights.type == "int":
            text += ", symmetric" if weights.symmetric else ", asymmetric"
    if activations is not None:
        text += f", activations {activations.type}{activations.bits}"
        text += "" if activations.outliers is None else f" but those above {activations.outliers:g}"
    return text


def grid_of(entry: ModuleEntry) -> GridScheme:
    """The grid of an entry that a layout stores; the others are dense."""
    assert entry.scheme.grid is not None
    return entry.scheme.grid


def _key(entry: ModuleEntry | None) -> object:
    return None if entry is None or entry.scheme.weights is None else (entry.scheme, entry.format)
