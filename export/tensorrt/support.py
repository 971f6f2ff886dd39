"""Support of TensorRT for artifacts: reasons against, and what changes on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from export.onnx.grid import NEGATIVE, TENSORRT, conversion, turns_positive, why_not
from export.target import Conversion
from export.tensorrt.model import HEAD
from export.tensorrt.options import TensorrtOptions
from runtime.formats.quantization_config import ModuleEntry
from runtime.modeling.skeleton import model_kind

if TYPE_CHECKING:
    from export.source import Source

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
    model = source.skeleton
    if not model._can_set_attn_implementation():
        return None
    for name, module in model.named_modules():
        cap = getattr(module, "attn_logit_softcapping", None)
        if cap:
            return f"{name} caps its attention scores at {cap:g} (attn_logit_softcapping), which TensorRT's Attention cannot"
        size = max((n for n in (getattr(module, a, None) for a in _HEAD_SIZES) if isinstance(n, int)), default=0)
        if size > HEAD:
            return f"{name} has heads of {size}, and TensorRT's Attention takes at most {HEAD}"
    return None


def _negative(source: Source) -> str | None:
    """The first layer whose scales cannot be made positive. Scales are read first: most weights need no look at their codes."""
    checkpoint = source.artifact.checkpoint
    for name, _ in _linear(source):
        scale = f"{name}.weight_scale"
        if (
            checkpoint.has(scale)
            and bool((checkpoint.get(scale).float() < 0).any())
            and not turns_positive(source.weight(name))
        ):
            return f"{name} has {NEGATIVE} (--requantize rounds such layers anew)"
    return None


def conversions(source: Source, options: TensorrtOptions) -> list[Conversion]:
    """What is stored in another way; see `export.target.Target.conversions`."""
    found: dict[tuple[str, bool], list[str]] = {}
    for name, entry in source.entries.items():
        for what, exact in _changes(source, name, entry, options):
            found.setdefault((what, exact), []).append(name)
    result = [Conversion(what, tuple(names), exact) for (what, exact), names in found.items()]
    stored = str(source.dtype).removeprefix("torch.")
    if options.dtype not in (None, stored):
        dense = tuple(name for name in source.dense_names())
        result.append(Conversion(f"{stored} numbers become {options.dtype}", dense, exact=options.dtype == "float32"))
    return result


def _changes(source: Source, name: str, entry: ModuleEntry, options: TensorrtOptions) -> Iterator[tuple[str, bool]]:
    scheme, shape = entry.scheme, source.shapes[name]
    if name in source.embeddings:
        yield "the compressed embedding is stored dense", True
        return
    if scheme.grid is None:
        yield f"{scheme.sparsity} values are stored with their zeros", True
    elif why_not(scheme.grid, shape, TENSORRT) is not None:
        yield f"{why_not(scheme.grid, shape, TENSORRT)}: rounded anew", False
    else:
        exact = conversion(scheme.grid, shape, TENSORRT)
        if exact is not None:
            yield exact, True
        if options.requantize:
            yield "negative scales become positive; where a code has no opposite the layer is rounded anew", False
    if scheme.activations is not None and scheme.activations.dynamic:
        yield "inputs are no longer rounded (TensorRT has no dynamic int8 or fp8 grid a token)", False


def _linear(source: Source) -> list[tuple[str, ModuleEntry]]:
    return [(name, entry) for name, entry in source.entries.items() if name not in source.embeddings]


def dropped_activations(source: Source) -> list[str]:
    """Layers whose inputs are rounded in the artifact and will not be in the engine."""
    return [n for n, e in _linear(source) if e.scheme.activations is not None and e.scheme.activations.dynamic]


def expressible(source: Source) -> Source:
    """The artifact without the activation grids that TensorRT has no word for: their layers keep codes and scales of the weight."""
    changed = copy.copy(source)
    changed.entries = {
        name: replace(entry, scheme=replace(entry.scheme, activations=None))
        if entry.scheme.activations is not None and entry.scheme.activations.dynamic
        else entry
        for name, entry in source.entries.items()
    }
    return changed
