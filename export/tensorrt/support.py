"""Support of TensorRT for artifacts: reasons against, and what changes on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from export.onnx_graph.grid import TENSORRT, fit, to_grid, why_not
from export.source import Source, dtype_name
from export.target import Conversion, merged
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.profiles import HEAD
from runtime.errors import RequestError
from runtime.formats.quantization_config import ModuleEntry
from runtime.modeling.skeleton import model_kind

#: What transformers' attention modules call the width of a head; latent attention has one for queries and one for values.
_HEAD_SIZES = ("head_dim", "qk_head_dim", "v_head_dim")


def reason_against(source: Source, options: TensorrtOptions) -> str | None:
    """Why the artifact cannot be written; see `export.target.Target.why_not`."""
    kind = model_kind(source.config)
    if kind != "decoder":
        return f"it is an {kind}, and engines are built for decoders"
    reason = _attention(source)
    if reason is not None:
        return reason
    for name, entry in _linear(source):
        activations = entry.scheme.activations
        if activations is not None and not activations.dynamic and not activations.symmetric:
            return f"{name} has activations with a zero point, and TensorRT quantizes symmetrically only"
        if entry.scheme.grid is None or options.requantize:
            continue
        reason = why_not(entry.scheme.grid, source.shapes[name], TENSORRT)
        if reason is not None:
            return f"{name} has {reason} (--requantize rounds them anew)"
    return None if options.requantize else _negative(source)


def _attention(source: Source) -> str | None:
    """What TensorRT's Attention cannot say. Where a model does not go through transformers' attention interface, its attention is
    written as products and a softmax, and there is no such operator."""
    if not source.skeleton._can_set_attn_implementation():
        return None
    for name, module in source.skeleton.named_modules():
        cap = getattr(module, "attn_logit_softcapping", None)
        if cap:
            return f"{name} caps its attention scores at {cap:g} (attn_logit_softcapping), which TensorRT's Attention cannot"
        size = max((n for n in (getattr(module, a, None) for a in _HEAD_SIZES) if isinstance(n, int)), default=0)
        if size > HEAD:
            return f"{name} has heads of {size}, and TensorRT's Attention takes at most {HEAD}"
    return None


def _negative(source: Source) -> str | None:
    """The first layer whose scales cannot be made positive. Scales are read first: most weights need no look at their codes."""
    for name, _ in _linear(source):
        scale = source.optional(f"{name}.weight_scale")
        if scale is not None and bool((scale.float() < 0).any()):
            try:
                to_grid(source.weight(name), TENSORRT, False, name)
            except RequestError as error:
                return str(error)
    return None


def conversions(source: Source, options: TensorrtOptions) -> list[Conversion]:
    """What is stored in another way; see `export.target.Target.conversions`."""
    result = merged(
        Conversion(what, (name,), exact)
        for name, entry in source.entries.items()
        for what, exact in _changes(source, name, entry, options)
    )
    stored = dtype_name(source.dtype)
    if options.dtype not in (None, stored):
        dense = tuple(source.dense_names())
        result.append(Conversion(f"{stored} numbers become {options.dtype}", dense, exact=options.dtype == "float32"))
    return result


def _changes(source: Source, name: str, entry: ModuleEntry, options: TensorrtOptions) -> Iterator[tuple[str, bool]]:
    scheme, shape = entry.scheme, source.shapes[name]
    if name in source.embeddings:
        yield "the compressed embedding is stored dense", True
        return
    if scheme.grid is None:
        yield f"{scheme.sparsity} values are stored with their zeros", True
    else:
        said = fit(scheme.grid, shape, TENSORRT, name)
        if said.what is not None:
            yield said.what, said.exact
        if said.exact and options.requantize:
            yield "negative scales become positive; where a code has no opposite the layer is rounded anew", False
    if _is_dropped(entry):
        yield "inputs are no longer rounded (TensorRT has no dynamic int8 or fp8 grid a token)", False


def _linear(source: Source) -> list[tuple[str, ModuleEntry]]:
    return [(name, entry) for name, entry in source.entries.items() if name not in source.embeddings]


def _is_dropped(entry: ModuleEntry) -> bool:
    """Whether the layer's inputs are rounded as they come, which TensorRT does not do."""
    return entry.scheme.activations is not None and entry.scheme.activations.dynamic is not False


def dropped_activations(source: Source) -> list[str]:
    """Layers whose inputs are rounded in the artifact and will not be in the engine."""
    return [name for name, entry in _linear(source) if _is_dropped(entry)]


def expressible(source: Source) -> Source:
    """The artifact without the activation grids that TensorRT has no word for: their layers keep codes and scales of the weight."""
    changed = copy.copy(source)
    changed.entries = dict(source.entries)
    for name in dropped_activations(source):
        entry = source.entries[name]
        changed.entries[name] = replace(entry, scheme=replace(entry.scheme, activations=None))
    return changed
