"""Gradients through compressed linear layers, whose kernels have none, and through deep models without keeping all of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.layer_sizes import uniform
from runtime.linear import CompressedLinear
from runtime.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEEP = 1 << 30


class _Straight(torch.autograd.Function):
    """`y = kernel(x)` with the gradient of `x W^T`; rounding of activations is passed straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: CompressedLinear, run: Any) -> torch.Tensor:
        ctx.module = module
        output: torch.Tensor = run(x)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # One layer's weight at a time is dense, and only while it is used.
        return gradients[0] @ ctx.module.dequantize().to(gradients[0]), None, None


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Within, gradients reach the inputs of the model's compressed layers."""
    layers = [module for module in model.modules() if isinstance(module, CompressedLinear)]
    for layer in layers:
        run = layer.forward
        layer.forward = partial(_forward, layer, run)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own again


@contextmanager
def recomputed(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Within, blocks are computed anew in the backward pass where what they would keep of `tokens` tokens is more than `KEEP` bytes."""
    config: Any = uniform(model.config).get_text_config(decoder=True)
    # Roughly what a block of attention and a gated MLP saves for its backward pass.
    widths = 16 * config.hidden_size + 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if 4 * tokens * widths * config.num_hidden_layers <= KEEP:
        yield
        return
    from torch.utils.checkpoint import checkpoint

    anew: Any = checkpoint
    blocks = list(find_blocks(model)[1])
    for block in blocks:
        again = partial(anew, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = again
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class's own again


def _forward(layer: CompressedLinear, run: Any, x: torch.Tensor) -> torch.Tensor:
    apply: Any = _Straight.apply
    output: torch.Tensor = apply(x, layer, run)
    return output
