"""`quantization_config` of the GPTQ layout: one scheme for most layers, and who is different.

Readers find out in three ways which layers are dense: GPTQModel and vLLM by `dynamic` (regular expressions; "-:" leaves a layer
dense, "+:" gives it numbers of its own; vLLM matches the names of its fused layers), transformers by
`modules_in_block_to_quantize`, which is the same list for every block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from export.huggingface.fused import fused_sets
from export.source import Source
from runtime.formats.quantization_config import ModuleEntry

HEAD = "lm_head"
_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")
# GPTQModel refuses asymmetric "gptq" files unless they name it as (one) writer: older ones stored such zero points wrongly.
_ASYMMETRIC_MARK = "gptqmodel:0.9.0"


def base_entry(entries: Mapping[str, ModuleEntry]) -> ModuleEntry | None:
    """The scheme of most layers; of two that are as frequent the first."""
    counts = Counter(entries.values())
    return counts.most_common(1)[0][0] if counts else None


def quantization_config(source: Source, entries: Mapping[str, ModuleEntry], checkpoint_format: str) -> dict[str, Any]:
    """The whole object; `entries` is not empty."""
    base = base_entry(entries)
    assert base is not None
    config: dict[str, Any] = {"quant_method": "gptq", **_numbers(base)}
    quantizers = [f"compress:{_own_version()}"]
    asymmetric = any(e.scheme.grid is not None and not e.scheme.grid.symmetric for e in entries.values())
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
    weights = entry.scheme.grid
    assert weights is not None
    return {
        "bits": weights.bits,
        "group_size": weights.group_size if weights.strategy == "group" else -1,
        "sym": weights.symmetric,
    }


def _own_version() -> str:
    try:
        return version("compress")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"
