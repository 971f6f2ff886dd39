"""Operations between matrix products: Triton kernels on CUDA (and in Triton's interpreter), torch elsewhere.

In torch, which is the reference of the kernels, values are rounded to the model's dtype where transformers rounds; rotation and attention
are in float32 up to their last rounding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.engines.cuda import stored_pages
from runtime.engines.cuda.cache import CacheLayer, Chunks, Rows, StoredLayers
from runtime.engines.cuda.storage import Storage
from runtime.engines.llama_structure import Program, RoutedExperts, read_program
from runtime.engines.program import expert_stacks
from runtime.engines.program.mixtures import choose as choose_experts
from runtime.modeling.experts import Experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("compress.engine")


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`h = x + residual` and `weight * h / rms(h)` -> (normalized, h), `[..., hidden]`."""
    h = x if residual is None else x + residual
    value = h.float()
    normal = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype), h


def swiglu(parts: Sequence[Tensor]) -> Tensor:
    """`silu(gate) * up`, of both `[..., I]`, or of one joined product `[..., 2 I]`, gate first."""
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads `[rows, heads, head_dim]` by `rotation` float32 `[rows, rotary]`, cosines first; elements past `rotary` stay."""
    half = rotation.shape[-1] // 2
    cosine, sine = rotation[:, None, :half], rotation[:, None, half:]
    value = x.float()
    a, b = value[..., :half], value[..., half : 2 * half]
    turned = torch.cat([a * cosine - b * sine, b * cosine + a * sine, value[..., 2 * half :]], dim=-1)
    return turned.to(x.dtype)


def rotate_and_store(
    qkv: Sequence[Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotations: Tensor,
    rows: Rows,
    layer: CacheLayer,
) -> Tensor:
    """Norms of the heads (if any), rotation, keys and values into the cache; returns the queries `[rows, heads, head_dim]`.

    Args:
        qkv: queries, keys and values, `[rows, heads * head_dim]`, views of a joined product allowed.
        norms: weights of the query and key norms.
        rotations: float32 `[positions, rotary]`, see `rotate`.
        rows: where the tokens are.
        layer: of the cache, written to.
    """
    heads, size = layer.keys.shape[-2:]
    q, k, v = (each.reshape(len(each), -1, size) for each in qkv)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps)[0], rms_norm(k, norms[1], eps)[0]
    rotation = rotations[rows.positions.long()]
    at = rows.slots.long()
    layer.keys.view(-1, heads, size).index_copy_(0, at, rotate(k, rotation))
    layer.values.view(-1, heads, size).index_copy_(0, at, v)
    return rotate(q, rotation)


def decode_attention(
    q: Tensor, layer: CacheLayer, tables: Tensor, positions: Tensor, scale: float, window: int, width: int | None = None
) -> Tensor:
    """One query a sequence against its pages.

    Args:
        q: `[rows, heads, head_dim]`.
        layer: of the cache.
        tables: `[rows, most pages]`: position p of a row lies in page `tables[row, p // page_size]`; entries behind
            its position are any valid pages.
        positions: `[rows]`: of the query; keys 0..position are seen.
        window: only the last `window` of them; 0: all. Always 0 for a layer with stored pages.
        width: pages of the longest row, where the caller knows; None: all columns of the table are read.

    Returns:
        `[rows, heads, head_dim]`.
    """
    rows, heads, size = q.shape
    page, kv_heads = layer.keys.shape[1:3]
    chosen = tables[:, :width].long()
    if layer.stored is None:
        k, v = (tensor[chosen].view(rows, -1, kv_heads, size) for tensor in layer[:2])
    else:
        k, v = stored_pages.states(layer, chosen, positions)
    at = torch.arange(chosen.shape[1] * page, device=q.device)[None]
    last = positions.long()[:, None]
    seen = at <= last
    if window:
        seen &= at > last - window
    groups = q.float().view(rows, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("rkgd,rtkd->rkgt", groups, k.float()) * scale
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    v = v.float().masked_fill(~seen[:, :, None, None], 0.0)  # what lies behind was never written, and 0 * NaN is NaN
    return torch.einsum("rkgt,rtkd->rkgd", weights, v).reshape(rows, heads, size).to(q.dtype)


def chunk_attention(q: Tensor, layer: CacheLayer, chunks: Chunks, scale: float, window: int) -> Tensor:
    """Causal attention of chunks of prompts: each token sees those of its sequence before it, and itself.

    Args:
        q: `[rows, heads, head_dim]`, the chunks' tokens one chunk after another.
        layer: of the cache; the keys and values of the chunks are written.
        window: only the last `window` positions; 0: all. Always 0 for a layer with stored pages.

    Returns:
        `[rows, heads, head_dim]`.
    """
    found = []
    for mine, start, pages in zip(q.split(chunks.counts), chunks.starts, chunks.tables, strict=True):
        if layer.stored is None:
            end = start + len(mine)
            keys, values = (side[pages].flatten(0, 1)[:end] for side in layer[:2])
            found.append(causal_attention(mine, keys, values, start, scale, window))
        else:
            found.append(stored_pages.chunk_attention(mine, layer, pages, start, scale))
    return torch.cat(found)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int) -> Tensor:
    """Of one chunk.

    Args:
        q: `[tokens, heads, head_dim]`, at positions start ...
        k, v: `[start + tokens, kv_heads, head_dim]`.
        window: as in `chunk_attention`.
    """
    tokens, heads, _ = q.shape
    first = max(0, start + 1 - window) if window else 0  # nobody sees what lies before
    if start == 0 and (not window or window >= tokens):
        queries, keys, values = (each.transpose(0, 1)[None] for each in (q, k, v))
        grouped = heads != k.shape[1]
        y = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return y[0].transpose(0, 1)
    place = torch.arange(first, len(k), device=q.device)[None]

    def seen(at: Tensor) -> Tensor:
        return (place <= at) & (place > at - window) if window else place <= at

    return stored_pages.masked_attention(q, k[first:], v[first:], start, scale, seen)


def router_logits(x: Tensor, experts: RoutedExperts) -> Tensor:
    """`[rows, experts]` of rows `[rows, hidden]`, in the router's dtype."""
    return functional.linear(x.to(experts.router.dtype), experts.router)


def mixture(x: Tensor, experts: RoutedExperts) -> Tensor:
    """The weighted sum of what the chosen experts make of rows `[rows, hidden]`, `[rows, hidden]`; in float32 up to its last rounding.

    Every expert computes all rows: which ones are its own is not known to the host.
    """
    index, weights = choose_experts(router_logits(x, experts).float(), experts.routing, None)
    module, total = experts.module, torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in range(len(experts.router)):
        if isinstance(module, Experts):
            y = module.run(number, x)
        else:
            wide, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
            y = functional.linear(swiglu([functional.linear(x, wide[number])]), down[number])
        mine = index == number
        weight = weights.masked_fill(~mine, 0.0).sum(-1, keepdim=True)
        total += torch.where(mine.any(-1, keepdim=True), y.float() * weight, 0.0)
    return total.to(x.dtype)


@dataclass(frozen=True)
class Ops:
    """Functions with the arguments and results of those in this file.

    Attributes:
        name: "triton", "triton, compiled ahead" or "torch".
    """

    name: str
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[[Sequence[Tensor]], Tensor]
    rotate_and_store: Callable[..., Tensor]
    decode_attention: Callable[..., Tensor]
    chunk_attention: Callable[..., Tensor]
    store: Callable[[StoredLayers, Tensor], None]
    mixture: Callable[[Tensor, RoutedExperts], Tensor]


TORCH = Ops("torch", rms_norm, swiglu, rotate_and_store, decode_attention, chunk_attention, stored_pages.store, mixture)


def choose(device: torch.device) -> Ops:
    """The best for tensors on this device."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return TORCH
    try:
        from runtime.kernels.triton import aot, jit

        if jit.INSTALLED:
            return kernels()
    except ImportError as error:
        _log.warning("triton cannot be used, attention and norms run in torch: %s", error)
        return TORCH
    if aot.offers(device):
        return with_fallback(kernels())
    _log.warning("triton is not installed, attention and norms run in torch")
    return TORCH


def kernels() -> Ops:
    """Those of triton, compiled when they are first launched, or ahead."""
    from runtime.engines.cuda import chunk_attention as prefill
    from runtime.engines.cuda import page_store, paged_attention, rotary_store, stored_attention
    from runtime.kernels.triton import experts as grouped
    from runtime.kernels.triton import fused, routing

    def joined_swiglu(parts: Sequence[Tensor]) -> Tensor:
        return fused.swiglu(parts[0]) if len(parts) == 1 else swiglu(parts)

    def attention(q: Tensor, layer: CacheLayer, *others: Any) -> Tensor:
        module = paged_attention if layer.stored is None else stored_attention
        return module.decode_attention(q, layer, *others)

    def stacked_mixture(x: Tensor, experts: RoutedExperts) -> Tensor:
        stacks, rule = experts.stacks, experts.routing
        if stacks is None:
            return mixture(x, experts)
        chosen, weights = routing.route(router_logits(x, experts), rule.chosen, rule.score == "chosen", rule.scale)
        return grouped.experts(x, chosen, weights, stacks.gate_up, stacks.down)

    return Ops(
        "triton", fused.rms_norm, joined_swiglu, rotary_store.rotate_and_store, attention, prefill.chunk_attention,
        page_store.store, stacked_mixture,
    )  # fmt: skip


def with_fallback(ops: Ops) -> Ops:
    """Plain torch for every call that no kernel was compiled ahead for (the log says which), where there is no compiler.

    Not for mixtures: see `missing_launch`.
    """

    def guarded(name: str) -> Callable[..., Any]:
        from runtime.kernels.triton.jit import MissingKernelError

        first, second = getattr(ops, name), getattr(TORCH, name)

        def call(*args: Any) -> Any:
            try:
                return first(*args)
            except MissingKernelError:
                return second(*args)

        return call

    names = ("rms_norm", "swiglu", "rotate_and_store", "decode_attention", "chunk_attention", "store")
    changes: dict[str, Any] = {name: guarded(name) for name in names}
    return replace(ops, name=f"{ops.name}, compiled ahead", **changes)


def missing_launch(model: PreTrainedModel, device: torch.device) -> str | None:
    """Where there is no compiler, the first launch of a model's experts that no kernel was compiled ahead for; None: all are there.

    In torch every expert would compute every row, so they are asked for before an engine takes a model over.
    """
    from runtime.kernels.triton import aot, jit
    from runtime.kernels.triton import experts as grouped

    program = None if jit.INSTALLED else read_program(model)
    if not isinstance(program, Program):
        return None
    layers: dict[Hashable, RoutedExperts] = {}
    for each in program.mixtures:
        if expert_stacks.why_not(each.module, program.dtype) is None:  # else the model is refused for that
            stacks = expert_stacks.blank_stacks(each.module)
            tensors = (each.router, *stacks.gate_up.operands, *stacks.down.operands)
            facts = (replace(each.routing, module=""), *((tensor.shape, tensor.dtype) for tensor in tensors))
            layers[facts] = replace(each, router=each.router.to("meta"), stacks=stacks)
    compute = kernels().mixture

    def every_launch() -> None:
        for layer in layers.values():
            count, hidden = layer.router.shape
            for tokens in grouped.token_counts(count, layer.routing.chosen):
                compute(torch.empty(tokens, hidden, dtype=program.dtype, device="meta"), layer)

    return aot.missing(every_launch, device)


def missing_page_kernel(program: Program, storage: Storage, page: int, device: torch.device) -> str | None:
    """The first launch over stored pages without a kernel compiled ahead, where triton is not installed; None: all are there.

    In torch every step would decode whole tables of pages, so this is asked before an engine takes a model over.
    """
    from runtime.kernels.triton import aot, jit

    if jit.INSTALLED:
        return None
    computing, meta = kernels(), torch.device("meta")
    layers = StoredLayers.zeros(storage, 1, 2, 2, (page, program.kv_heads, program.head_dim), program.dtype, meta)
    numbers, tables = (torch.empty(shape, dtype=torch.int32, device=meta) for shape in ((1,), (1, 16)))
    q = torch.empty(1, program.heads, program.head_dim, dtype=program.dtype, device=meta)

    def every_launch() -> None:
        computing.store(layers, numbers)
        held = CacheLayer(layers.keys[0], layers.values[0], layers)
        computing.decode_attention(q, held, tables, numbers, program.scale, 0)

    return aot.missing(every_launch, device)
