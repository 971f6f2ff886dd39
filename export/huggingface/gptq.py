"""The GPTQ layout (`quant_method: gptq`), as AutoGPTQ wrote it and GPTQModel, vLLM, SGLang and transformers read it.

A module `[out, in]` of b bits is `qweight` int32 `[in * b / 32, out]` (column i of the matrix in bits [i b, (i + 1) b) of the stream
that runs down; 3 bits straddle words), `qzeros` int32 `[groups, out * b / 32]` along the row, `scales` float16 `[groups, out]` and
`g_idx` int32 `[in]`, the group of each column; the value is `(q - z) * s` with unsigned q and z. checkpoint_format "gptq" stores
z - 1 (symmetric 4 bits: 7), "gptq_v2" stores z.

z = 0 has no place in "gptq": it would be stored as all ones, which vLLM's kernels read as 2^b, while GPTQModel adds one to whole
words, so that the carry spoils the neighbour too. Such groups are written with codes, zero point and scale reflected, which is
exact; scales may be negative, since readers multiply by them and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from export.huggingface.fused_layers import fused_sets, grid_of, words
from export.huggingface.grids import KERNEL_GROUPS, reflect_low_zeros, regrid
from export.huggingface.plan import Layout, Plan, UnfitError, integer_goal, remark
from export.huggingface.shards import Part
from export.run import tool_versions
from export.source import Source, distance, dtype_name, in_float32
from export.target import Conversion, Job
from runtime.errors import RequestError
from runtime.formats import TensorSpec
from runtime.formats.bitpack import pack_columns, pack_rows
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight, Scheme

FORMAT = "gptq"
HEAD = "lm_head"
_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")
# GPTQModel refuses asymmetric "gptq" files unless they name it as (one) writer: older ones stored such zero points wrongly.
_ASYMMETRIC_MARK = "gptqmodel:0.9.0"
READER_GROUPS = (16, 32, 64, 128, 256, 512, 1024)  # of GPTQModel 7.6


class Gptq(Layout):
    """See the module."""

    name = "gptq"

    def goal(self, entry: ModuleEntry, shape: tuple[int, int], keep_bits: bool) -> ModuleEntry | None:
        weights, activations = entry.scheme.grid, entry.scheme.activations
        if weights is None and entry.scheme.weights is not None:
            raise UnfitError(
                f"is {entry.scheme.weights.describe()}, and the gptq layout stores integers; layout compressed-tensors holds it"
            )
        if weights is None:
            return None
        if weights.type != "int":
            raise UnfitError("is float8, and the gptq layout stores integers; layout compressed-tensors holds it")
        if activations is not None:
            holds = "" if activations.own else "; layout compressed-tensors holds it"
            raise UnfitError(
                f"quantizes activations to {activations.type}{activations.bits}, and the gptq layout knows weights only{holds}"
            )
        if keep_bits and weights.bits in (5, 6, 7):
            raise UnfitError(
                f"has {weights.bits} bits, which readers of gptq do not share; without keep_bits they become 8"
            )
        grid = integer_goal(weights, shape[1], keep_bits)
        if grid is None or (grid.strategy == "group" and grid.group_size not in READER_GROUPS):
            raise UnfitError(
                f"has groups of {weights.group_size} in rows of {shape[1]}, and readers of gptq know groups of "
                f"{', '.join(map(str, READER_GROUPS))} or whole rows"
            )
        for what, extent in (("columns", shape[1]), ("rows", shape[0])):
            if extent * grid.bits % 32:
                raise UnfitError(f"has {extent} {what}, which at {grid.bits} bits do not fill 32-bit words")
        return ModuleEntry(Scheme(grid), FORMAT)

    def specs(self, source: Source, module: str, entry: ModuleEntry) -> dict[str, TensorSpec]:
        weights = grid_of(entry)
        rows, columns = source.shapes[module]
        groups, bits = weights.groups(columns), weights.bits
        return {
            f"{module}.qweight": TensorSpec((columns * bits // 32, rows), torch.int32),
            f"{module}.qzeros": TensorSpec((groups, rows * bits // 32), torch.int32),
            f"{module}.scales": TensorSpec((groups, rows), torch.float16),
            f"{module}.g_idx": TensorSpec((columns,), torch.int32),
        }

    def parts(self, job: Job, module: str, entry: ModuleEntry) -> list[Part]:
        def make() -> Mapping[str, torch.Tensor]:
            first = job.options.checkpoint_format == "gptq"
            weight = regrid(job.source.weight(module), grid_of(entry))
            weight = _in_float16(reflect_low_zeros(weight) if first else weight, job, module)
            return {f"{module}.{name}": tensor for name, tensor in pack(weight, first).items()}

        return [Part(self.specs(job.source, module, entry), make)]

    def remarks(self, source: Source, plan: Plan, options: Any) -> list[Conversion]:
        result = super().remarks(source, plan, options)
        if plan.entries and source.dtype != torch.float16:
            what = "gptq kernels compute in float16 and config.json says so; the other weights stay stored in "
            result.append(remark(f"{what}{dtype_name(source.dtype)}, and loaders convert them", ["config.json"]))
        said = "said under dynamic, which GPTQModel and vLLM read and transformers does not"
        base = base_entry(plan.entries)
        odd = [name for name, entry in plan.entries.items() if entry != base]
        if odd:
            result.append(remark(f"not the scheme of most layers: {said}", odd))
        if uniform_blocks(source, plan.entries) is None:
            dense = [n for n in source.shapes if n not in plan.entries and n not in source.embeddings and "." in n]
            result.append(remark(f"dense in some blocks only: {said}", dense))
        return result

    def config(self, source: Source, plan: Plan, options: Any) -> dict[str, Any]:
        return quantization_config(source, plan.entries, options.checkpoint_format)

    def objections(self, entry: ModuleEntry, shape: tuple[int, int], options: Any) -> Iterator[str]:
        weights = grid_of(entry)
        marlin = "Marlin, the fast kernel of vLLM, SGLang and GPTQModel,"
        if weights.bits not in (4, 8):
            yield f"{marlin} takes gptq of 4 and 8 bits: int{weights.bits} runs on slower kernels"
        elif not weights.symmetric:
            yield f"{marlin} takes symmetric gptq only: {words(entry)} runs on slower kernels"
        if weights.strategy == "group" and weights.group_size not in KERNEL_GROUPS:
            yield f"{marlin} knows groups of 32, 64 and 128: groups of {weights.group_size} run on slower kernels"
        if shape[0] % 64 or shape[1] % 128:
            yield f"{marlin} wants (fused) rows in 64s and columns in 128s: {shape[0]} x {shape[1]} runs on slower kernels"
        if not weights.symmetric and options.checkpoint_format == "gptq":
            yield (
                "asymmetric in checkpoint_format gptq: GPTQModel loads it only where meta.quantizer names gptqmodel 0.9 or newer, so "
                "the config does; checkpoint_format=gptq_v2 needs no such mark, and readers of late 2025 or newer"
            )


def pack(weight: CompressedWeight, first: bool) -> dict[str, torch.Tensor]:
    """The four tensors of a weight-only integer weight whose scales float16 holds.

    Args:
        weight: groups divide the row; columns and rows fill whole words.
        first: checkpoint_format "gptq", which stores zero points less one (none may be the lowest); else "gptq_v2".
    """
    scheme, scale = weight.on_grid
    columns = weight.values.shape[1]
    zero = torch.zeros(scale.shape, dtype=torch.int8) if weight.zero_point is None else weight.zero_point
    if first and bool((zero == scheme.code_range[0]).any()):
        raise ValueError("a zero point of 0 cannot be stored less one: reflect_low_zeros first")
    size = (scheme.group_size if scheme.strategy == "group" else None) or columns
    return {
        "qweight": pack_columns(weight.values.t(), scheme.bits),
        "qzeros": pack_rows((zero - 1 if first else zero).t().contiguous(), scheme.bits),
        "scales": scale.t().to(torch.float16).contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // size,
    }


def _in_float16(weight: CompressedWeight, job: Job, module: str) -> CompressedWeight:
    """The weight with scales that float16 holds; RequestError where that would change them and `requantize` was not asked for."""
    _, scale = weight.on_grid
    rounded = scale.to(torch.float16).to(scale.dtype)
    if not bool(rounded.isfinite().all()):
        raise RequestError(f"{module} has scales beyond 65504; the gptq layout stores float16")
    if torch.equal(rounded, scale):
        return weight
    if not job.options.requantize:
        raise RequestError(
            f"{module} has {int((rounded != scale).sum())} of {scale.numel()} scales that float16, the dtype of the gptq layout's "
            "scales, cannot hold exactly; add requantize=true to round them, or use layout=compressed-tensors"
        )
    result = replace(weight, scale=rounded)
    job.losses[module] = distance(in_float32(weight), in_float32(result))
    return result


def base_entry(entries: Mapping[str, ModuleEntry]) -> ModuleEntry | None:
    """The scheme of most layers; of two that are as frequent the first."""
    counts = Counter(entries.values())
    return counts.most_common(1)[0][0] if counts else None


def quantization_config(source: Source, entries: Mapping[str, ModuleEntry], checkpoint_format: str) -> dict[str, Any]:
    """`quantization_config`: one scheme for most layers, and who is different; `entries` is not empty.

    Readers find out in three ways which layers are dense: GPTQModel and vLLM by `dynamic` (regular expressions; "-:" leaves a layer
    dense, "+:" gives it numbers of its own; vLLM matches the names of its fused layers), transformers by
    `modules_in_block_to_quantize`, which is the same list for every block.
    """
    base = base_entry(entries)
    assert base is not None
    config: dict[str, Any] = {"quant_method": "gptq", **_numbers(base)}
    quantizers = [f"compress:{tool_versions().get('compress', '0')}"]
    asymmetric = any(not grid_of(entry).symmetric for entry in entries.values())
    if asymmetric and checkpoint_format == "gptq":
        quantizers.append(_ASYMMETRIC_MARK)
    config |= {
        "desc_act": False,
        "static_groups": False,
        "true_sequential": True,
        "lm_head": HEAD in entries,
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "meta": {"quantizer": quantizers},
    }
    dynamic = _dynamic(source, entries, base)
    if dynamic:
        config["dynamic"] = dynamic
    kept = uniform_blocks(source, entries)
    if kept:
        config["modules_in_block_to_quantize"] = [kept]
    return config


def uniform_blocks(source: Source, entries: Mapping[str, ModuleEntry]) -> list[str] | None:
    """Names inside a block of the layers that are compressed, where some are dense and all blocks agree.

    [] where no layer of a block is dense, None where blocks differ.
    """
    compressed: set[str] = set()
    dense: set[str] = set()
    for name in source.shapes:
        match = _BLOCK.fullmatch(name)
        if match is not None:
            (compressed if name in entries else dense).add(match[2])
    if compressed & dense:
        return None
    return sorted(compressed) if dense else []


def _dynamic(source: Source, entries: Mapping[str, ModuleEntry], base: ModuleEntry) -> dict[str, dict[str, Any]]:
    """{pattern: what is different}, the dense layers first; of the head only that it differs, if it is compressed at all."""
    found: dict[str, dict[str, Any]] = {}
    linear = [name for name in source.shapes if name not in source.embeddings]
    dense = [name for name in linear if name not in entries and name != HEAD]
    names = [*linear, *fused_sets(linear)]
    first = {name: name for name in linear} | {fused: shards[0] for fused, shards in fused_sets(linear).items()}
    for name in names:
        if first[name] in dense:
            found[f"-:^{re.escape(name)}$"] = {}
    if any(".experts." in name for name in source.dense_names()):
        found[r"-:.*\.experts(\..*)?$"] = {}  # fused matrices here, layers of their own to some readers
    for name in names:
        entry = entries.get(first[name])
        if entry is not None and entry != base:
            found[f"+:^{re.escape(name)}$"] = _numbers(entry)
    return found


def _numbers(entry: ModuleEntry) -> dict[str, Any]:
    weights = grid_of(entry)
    size = weights.group_size if weights.strategy == "group" else -1
    return {"bits": weights.bits, "group_size": size, "sym": weights.symmetric}
