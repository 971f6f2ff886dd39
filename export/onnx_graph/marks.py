"""Marks: operators of our own that stand for layers while a model is traced, so that no weight takes part in the tracing.

A mark becomes what a dialect of ONNX says for it afterwards (`export.onnx_graph.write`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOMAIN = "compress"
ATTENTION = "compress_mark"  # what transformers calls our attention function


class MarkError(Exception):
    """Attention has a part that the mark cannot say; the model is traced with transformers' own attention then."""


class Mark(nn.Module):
    """`compress::Linear(x [..., columns]) -> [..., rows]`, the bias in it, or `compress::Embedding(ids [...]) -> [..., columns]`: an
    operator with the attribute `module`, which the writer replaces. An embedding is times the model's scale."""

    def __init__(self, kind: str, name: str, shape: tuple[int, int], dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.kind, self.name, self.dtype, self.embed_scale = kind, name, dtype, scale
        self.out_features, self.in_features = self.num_embeddings, self.embedding_dim = shape
        # Some models look at a layer's weight to learn its dtype.
        self.register_buffer("weight", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        table = self.kind == "Embedding"
        shape = (*x.shape, self.embedding_dim) if table else (*x.shape[:-1], self.out_features)
        attributes: dict[str, Any] = {"module": self.name}
        dtype = self.dtype if table else x.dtype
        found = torch.onnx.ops.symbolic(f"{DOMAIN}::{self.kind}", (x,), attributes, dtype=dtype, shape=shape, version=1)
        return found if self.embed_scale == 1.0 else found * self.embed_scale


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`compress::Attention(q [b, heads, s, d], k, v [b, kv_heads, t, d], mask [b, 1 or heads, s, t]) -> [b, heads, s, d]`.

    The mask is boolean (true: counts), or what is added to the scores where a model has a bias of its own; it holds causality and
    window too. Attributes: `scale`, `causal` (1: decoders), `window` (0: none), `softcap` (0: none).

    Raises:
        MarkError: an argument that changes the result and that the mark has no word for.
    """
    softcap = kwargs.pop("softcap", None) or 0.0
    window = kwargs.pop("sliding_window", None) or 0
    bias = kwargs.pop("position_bias", None)
    unknown = sorted(name for name in ("s_aux", "head_mask") if kwargs.get(name) is not None)
    if unknown:
        raise MarkError(f"attention with {unknown[0]}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise MarkError("attention with an additive mask")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if bias is not None:
        low = torch.finfo(query.dtype).min / 2  # finite with a score added, and lower than any
        attention_mask = bias if attention_mask is None else torch.where(attention_mask, bias, low)
    inputs = (query, key, value) if attention_mask is None else (query, key, value, attention_mask)
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
    if attention_mask is None and causal:
        raise MarkError("causal attention without a mask")
    output = torch.onnx.ops.symbolic(
        f"{DOMAIN}::Attention",
        inputs,
        {"scale": float(scale), "causal": int(causal), "window": int(window), "softcap": float(softcap)},
        dtype=query.dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        version=1,
    )
    return output.transpose(1, 2), None


def mark_layers(model: nn.Module, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Put marks in the place of every linear layer and embedding; returns {module: (rows, columns)}."""
    from runtime.layers.compressed_linear import CompressedEmbedding

    found: dict[str, tuple[int, int]] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
            mark = Mark("Linear", name, shape, dtype)
        elif isinstance(module, (nn.Embedding, CompressedEmbedding)):
            usual = type(module).forward in (nn.Embedding.forward, CompressedEmbedding.forward)
            if not usual and not hasattr(module, "embed_scale"):
                continue  # positions with an offset, sinusoids: traced as they are, with their weights
            weight = module.shape if isinstance(module, CompressedEmbedding) else tuple(module.weight.shape)
            shape = (int(weight[0]), int(weight[1]))
            scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0))
            mark = Mark("Embedding", name, shape, dtype, float(scale))
        else:
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, mark)
        found[name] = shape
    return found


@contextmanager
def marked_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Let the model call `attention` for the time of the block; yields False where it does not go through transformers' interface."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    before = model.config._attn_implementation
    try:
        if not model._can_set_attn_implementation():
            yield False
            return
        model.set_attn_implementation(ATTENTION)
        yield True
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(ATTENTION, None)
