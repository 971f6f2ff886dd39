"""The compressed-tensors layout: formats that package knows are copied, ours become the nearest of them.

What vLLM takes is read off its `CompressedTensorsConfig._get_scheme_from_parts` and `CompressedTensorsWNA16` (2026): weight-only
integers of 4 and 8 bits in groups or rows; int8 activations with symmetric weights a row or a tensor; float8 likewise, and with int4 in
groups of 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from export.huggingface.fused_layers import grid_of, words
from export.huggingface.grids import KERNEL_GROUPS, group_for, regrid, widened
from export.huggingface.plan import Layout, Plan, UnfitError, integer_goal, same
from export.huggingface.shards import Part, stored_part
from export.source import Source
from export.target import Job
from runtime import formats
from runtime.formats import TensorSpec
from runtime.formats.block_float import BlockFloat
from runtime.formats.quantization_config import ModuleEntry, build
from runtime.formats.scheme import GridScheme, Scheme


class CompressedTensors(Layout):
    """See the module."""

    name = "compressed-tensors"

    def goal(self, entry: ModuleEntry, shape: tuple[int, int], keep_bits: bool) -> ModuleEntry | None:
        weights, activations = entry.scheme.grid, entry.scheme.activations
        if weights is None:
            # A format of that package as it is, or dense with zeros in it, for which it has none any more.
            return None if formats.get(entry.format).own else entry
        if activations is not None and activations.own:
            raise UnfitError(
                f"({words(entry)}) keeps outliers of its inputs unrounded, which compressed-tensors cannot express; compress with "
                "W8A8-INT8 instead"
            )
        grid: GridScheme | None = weights
        if activations is None and weights.type == "int":
            grid = integer_goal(weights, shape[1], keep_bits)
        elif weights.strategy == "group" or weights.type == "int":
            grid = _with_activations(weights, shape[1], keep_bits)
        if grid is None:
            if activations is not None:
                raise UnfitError(f"({words(entry)}) has groups of which no part divides rows of {shape[1]}")
            return None
        scheme = Scheme(grid, activations)
        every = (formats.get(name) for name in formats.names())
        storage = next((f for f in every if not f.own and f.why_not(scheme, shape) is None), None)
        if storage is None:
            raise UnfitError(
                f"({words(entry)}) has no layout of compressed-tensors: weights and activations differ in type"
            )
        return ModuleEntry(scheme, storage.name)

    def specs(self, source: Source, module: str, entry: ModuleEntry) -> dict[str, TensorSpec]:
        checkpoint = source.artifact.checkpoint
        dtype = checkpoint.dtype(f"{module}.weight_scale")
        specs = formats.get(entry.format).tensors(entry.scheme, source.shapes[module], dtype)
        for name in specs:
            if name.startswith("input_"):
                specs[name] = replace(specs[name], dtype=checkpoint.dtype(f"{module}.{name}"))
        return {f"{module}.{name}": spec for name, spec in specs.items()}

    def parts(self, job: Job, module: str, entry: ModuleEntry) -> list[Part]:
        source = job.source
        specs = self.specs(source, module, entry)
        if same(source.entries[module], entry):
            return [stored_part(source, name, spec) for name, spec in specs.items()]

        def make() -> Mapping[str, torch.Tensor]:
            weight = regrid(source.weight(module), grid_of(entry))
            inputs = {"input_scale": source.input_scale(module), "input_zero_point": source.input_zero_point(module)}
            tensors = formats.get(entry.format).pack(weight, **inputs)
            return {f"{module}.{name}": tensor for name, tensor in tensors.items()}

        return [Part(specs, make)]

    def check(self, entries: Mapping[str, ModuleEntry], source: Source) -> str | None:
        config = build(entries, list(entries)) if entries else {}
        if not config.get("dequantize") or len(config["config_groups"]) == 1:
            return None
        schemes = dict.fromkeys(words(entry) for entry in entries.values())
        return (
            "transformers unpacks asymmetric weights with the scheme of the first group for all layers, so it cannot load several "
            f"schemes with an asymmetric one among them ({'; '.join(schemes)})"
        )

    def config(self, source: Source, plan: Plan, options: Any) -> dict[str, Any]:
        return build(plan.entries, [name for name in source.shapes if name not in source.embeddings])

    def objections(self, entry: ModuleEntry, shape: tuple[int, int], options: Any) -> Iterator[str]:
        why = refusal(entry)
        if why is not None:
            yield why
        yield from slower(entry, shape)


def refusal(entry: ModuleEntry) -> str | None:
    """The sentence that says why vLLM's loader has no scheme for a layer of one of these formats; None where it has one."""
    weights, activations = entry.scheme.grid, entry.scheme.activations
    if weights is None:
        block = entry.scheme.weights
        if isinstance(block, BlockFloat) and block.bits == 8 and activations is None:
            return f"vLLM has no scheme for {words(entry)} without quantized activations: it loads in transformers only"
        return None
    if activations is not None and activations.type == "int" and activations.bits != 8:
        return f"vLLM has no scheme for int{activations.bits} activations: it loads in transformers only"
    if activations is None and weights.type == "int":
        if weights.bits not in (4, 8):
            return f"vLLM reads pack-quantized of 4 and 8 bits: int{weights.bits} loads in transformers only"
        return None
    if activations is not None and (weights.type, activations.type) == ("int", "float"):
        if weights != GridScheme(4, group_size=128) or activations.strategy != "token":
            return f"vLLM takes float8 activations with int4 in groups of 128, not {words(entry)}: this loads in transformers only"
        return None
    if weights.strategy == "group" and not (weights.bits == 4 and activations is not None and activations.dynamic):
        return f"vLLM has no kernel for {words(entry)}: it loads in transformers only"
    if activations is None:
        return None
    if weights.type == "int" and not weights.symmetric:
        return "vLLM takes int8 activations with symmetric weights only: this loads in transformers only"
    if not activations.dynamic and activations.strategy != "tensor":
        return "vLLM takes static activation scales a tensor only: this loads in transformers only"
    if weights.type == "int" and activations.dynamic and activations.strategy != "token":
        return "vLLM takes dynamic int8 activations a token only: this loads in transformers only"
    return None


def slower(entry: ModuleEntry, shape: tuple[int, int]) -> Iterator[str]:
    """Sentences on what keeps vLLM's fast kernel of weight-only integers from a layer, and on what its kernels round on loading."""
    weights, activations = entry.scheme.grid, entry.scheme.activations
    if weights is not None and activations is not None and (weights.type, activations.type) == ("int", "float"):
        yield "vLLM rounds the scales of these groups to float8 as it loads them"
    if entry.scheme.activations is not None or weights is None or weights.type != "int":
        return
    if weights.strategy == "group" and weights.group_size not in KERNEL_GROUPS:
        size = weights.group_size
        yield f"vLLM's Marlin kernel knows groups of 32, 64 and 128: groups of {size} fall back to slower kernels or none"
    if shape[0] % 64 or shape[1] % 128:
        yield (
            "vLLM's Marlin kernel wants (fused) rows in 64s and columns in 128s: "
            f"{shape[0]} x {shape[1]} falls back to slower kernels or none"
        )


def _with_activations(weights: GridScheme, columns: int, keep_bits: bool) -> GridScheme | None:
    """Grids beside quantized activations, and float8 in groups: only ragged groups and odd widths change."""
    bits = widened(weights.bits) if weights.type == "int" and not keep_bits else weights.bits
    size = weights.group_size
    if weights.strategy == "group" and size is not None and columns % size:
        size = group_for(size, columns)
        if size is None:
            return None
    return replace(weights, bits=bits, group_size=size)
