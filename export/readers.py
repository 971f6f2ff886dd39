"""Readers of an artifact: the engines that load it directly, after an export, or not at all, with the reason.

Each answer is derived from what is stored, not from a list of recipes:

- this runtime: every artifact (`compress apply` has loaded it back).
- transformers: `quant_method`. It knows `compressed-tensors`; our own method is registered by `import runtime`. It can build neither
  layers of different sizes nor 8-bit integer experts (`compress.weights.artifact`).
- vLLM: the schemes that its `CompressedTensorsConfig._get_scheme_from_parts` accepts (`export.huggingface.compressed_tensors`); layers that
  it fuses must agree. It has removed support for 2:4 sparse checkpoints (Marlin 2:4 and Sparse24, early in 2026), so an export must store
  the zeros.
- SGLang: the same, without what its copy of that class lacks: formats per layer, zero points, int4 with int8 activations.
- llama.cpp, and every engine after an export: what the export target accepts (`Target.why_not`, `Target.conversions`).

Whether an engine supports the architecture is not checked. No other engine has our cache policies and drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from export import targets
from export.huggingface.compressed_tensors import CompressedTensors, refusal, slower
from export.huggingface.fused_layers import disagreement, fused_sets
from export.huggingface.plan import make_plan
from export.source import Source
from export.target import WORTH_SAYING, missing_packages, needs
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.formats.block_float import BlockFloat
from runtime.formats.quantization_config import OWN_METHOD
from runtime.modeling.layer_sizes import differing, is_ours
from runtime.modeling.skeleton import model_kind, read_config
from runtime.system.sizes import size

YES, NO, EXPORT, IMPORT = "yes", "no", "after export", "with import runtime"


def readable_by(path: str | Path, entries: Mapping[str, Any]) -> list[dict[str, str]]:
    """Readers of an artifact.

    Args:
        path: its directory; only headers, scales and the tokenizer are read, not the manifest.
        entries: of its manifest; `kv_cache` and `draft` are used.

    Returns:
        For each reader `name`, `how` ("yes", "no", "after export" or "with import runtime") and `note`, a short clause, or "". Models that
        exports do not support have only this runtime.
    """
    rows = [{"name": "this runtime", "how": YES, "note": "runtime.load()"}]
    if (reason := _unknown(Path(path))) is not None:
        stored = read_json(Path(path) / "config.json").get("quantization_config") or {}
        shared = stored.get("quant_method") != OWN_METHOD
        rows = [{"name": name, "how": NO, "note": reason} for name in ("this runtime", "transformers")]
        note = "if it has the architecture" if shared else "it does not know these formats"
        return [*rows, *({"name": name, "how": YES if shared else NO, "note": note} for name in ("vLLM", "SGLang"))]
    try:
        source = Source(path)
    except CompressError:
        return rows
    own = [what for what, key in (("cache policy", "kv_cache"), ("draft", "draft")) if entries.get(key)]
    found = [("transformers", *_transformers(source))]
    found += [(name, *_server(source, name)) for name in ("vLLM", "SGLang")]
    found.append(("llama.cpp", *_exported(source, "gguf")))
    without = f"without its {' and '.join(own)}" if own else ""
    for name, how, note in found:
        rows.append({"name": name, "how": how, "note": "; ".join(filter(None, (note, without if how != NO else "")))})
    return rows


def _unknown(path: Path) -> str | None:
    """Why nothing here builds a model that was compressed without code (`model_free`); None: transformers has its code."""
    try:
        read_config(path)
    except ArtifactError:
        named = read_json(path / "config.json").get("model_type")
        return f"transformers has no code for {'this model' if named is None else f'model_type {named}'}"
    return None


def _method(source: Source) -> str | None:
    return (source.artifact.config.get("quantization_config") or {}).get("quant_method")


def _transformers(source: Source) -> tuple[str, str]:
    if is_ours(source.skeleton):
        return NO, f"layers differ in {', '.join(sorted(differing(source.config)))}, and it needs equal layers"
    if _method(source) == OWN_METHOD:
        return IMPORT, "without it, loading is refused"
    expert = source.compressed_expert
    if expert is not None and source.entries[expert].format == "int-quantized":
        return NO, "it cannot load 8-bit integer experts"
    note = "with the compressed-tensors package" if source.entries else ""
    blocks = any(isinstance(entry.scheme.weights, BlockFloat) for entry in source.entries.values())
    if blocks and source.dtype != torch.bfloat16:
        note += ", dtype=torch.bfloat16 (it unpacks block floats to nothing else)"
    return YES, note


def _server(source: Source, name: str) -> tuple[str, str]:
    """`how` and `note` for vLLM or SGLang."""
    kind = model_kind(source.config)
    if kind != "decoder":
        return NO, f"not known to serve this {kind}"
    if is_ours(source.skeleton):
        return NO, f"layers differ in {', '.join(sorted(differing(source.config)))}, and it needs equal layers"
    why = next(_refusals(source, name), None)
    if why is None:
        return YES, next((text for m, e in source.entries.items() for text in slower(e, source.shapes[m])), "")
    how, note = _exported(source, "huggingface")
    if how == NO:
        return NO, why
    stored = make_plan(CompressedTensors(), source, targets.get("huggingface").options()).entries
    checked = all(refusal(entry) is None for entry in stored.values())
    checked = checked and (name == "vLLM" or all(_sglang(entry) is None for entry in source.entries.values()))
    return (EXPORT, note) if checked else (NO, why)


def _refusals(source: Source, name: str) -> Iterator[str]:
    if _method(source) == OWN_METHOD:
        yield "it does not know these formats"
    for entry in source.entries.values():
        why = refusal(entry)
        if why is not None:
            yield why.partition(":")[0]
        elif name == "SGLang" and (text := _sglang(entry)) is not None:
            yield text
    if name == "SGLang" and len({entry.format for entry in source.entries.values()}) > 1:
        yield "it takes one format for all layers"
    if (text := disagreement(fused_sets(source.shapes), source.entries)) is not None:
        yield text


def _sglang(entry: Any) -> str | None:
    """What SGLang lacks compared with vLLM, in a clause; None: nothing."""
    weights, activations = entry.scheme.grid, entry.scheme.activations
    if weights is None:
        return None if entry.scheme.weights is None else f"it is not known to take {entry.scheme.weights.describe()}"
    if weights.type == "float":
        return None
    if activations is None and not weights.symmetric:
        return "it takes only symmetric weight-only integers"
    if activations is not None and weights.bits != 8:
        return "it takes quantized activations only with 8-bit weights"
    return None


def _exported(source: Source, name: str) -> tuple[str, str]:
    """`how` and `note` after `compress export --target NAME`."""
    target = targets.get(name)
    missing = missing_packages(target.packages)  # without them, only what the structure tells is known
    for requantize in (False, True):
        options = target.options(requantize=requantize)
        try:
            why = target.reason_against(source, options)
            changes = [] if missing or why is not None else target.conversions(source, options)
        except RequestError as error:  # grids that the scales rule out, unless they are rounded anew
            why, changes = str(error), []
        if why is None:
            break
    if why is not None:
        return NO, why
    if missing:
        return EXPORT, f"compress export --target {name}, which {needs(missing, target.extra)}"
    more = sum(change.bytes or 0 for change in changes)
    grown = f", {size(abs(more))} {'more' if more > 0 else 'less'}" if abs(more) >= WORTH_SAYING else ""
    anew = "" if all(change.exact for change in changes) else ", weights change"
    flag = " --requantize" if options.requantize else ""
    return EXPORT, f"compress export --target {name}{flag}{grown}{anew}"
