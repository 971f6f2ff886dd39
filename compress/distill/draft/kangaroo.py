"""Kangaroo: a small attention block goes on from the artifact's first layers to its head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import nn

from compress.distill.draft.checks import Prospect, RefusedError, check_in_c
from compress.distill.draft.config import DraftConfig
from compress.distill.draft.cut import cut_checkpoint, final_norm
from compress.distill.draft.student import TensorStudent, read_bytes
from compress.distill.draft.training import DraftMethod, DraftTraining
from compress.distill.train.losses import Objective
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter.safetensors"


class KangarooConfig(DraftConfig):
    """The artifact's own first layers draft, and between them and its head a block of attention (by default with no feed-forward half) and
    a norm, which alone are trained. They read what the artifact computes anyway, so the draft costs little memory.
    """

    method: Literal["kangaroo"] = Field("kangaroo", description="Name of the method.")
    exit_layer: int = Field(2, ge=1, description="Layers of the artifact before the adapter.")
    feed_forward: bool = Field(False, description="Give the adapter a feed-forward half too.")
    quantize: Literal["none"] = Field("none", description="Adapters are stored as they are, in bfloat16.")


class NoFeedForward(nn.Module):
    """In the place of a feed-forward half: adds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape, dtype and device of `x`."""
        return torch.zeros_like(x)


class KangarooStudent(TensorStudent):
    """The first layers of a target, frozen, an adapter above them, and the target's frozen head.

    Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting, arXiv 2404.18911. The adapter begins as the target's
    next layer, which reads what it will read.

    Args:
        draft: the target's first layers, at least one, and the one that becomes the adapter (`cut`), float32. It is changed: all but the
            adapter is frozen.
        objective: None: the default, forward KL to the target's distribution.
        feed_forward: the adapter has a feed-forward half.

    Attributes:
        exit_layer: how many layers come before the adapter.
    """

    file = ADAPTER

    def __init__(self, draft: PreTrainedModel, objective: Objective | None = None, feed_forward: bool = False) -> None:
        super().__init__(draft, objective)
        blocks = find_blocks(draft)[1]
        self.exit_layer, self.feed_forward = len(blocks) - 1, feed_forward
        self._block: Any = blocks[-1]
        draft.requires_grad_(False)
        trained = [self._block.self_attn, self._block.input_layernorm, final_norm(draft)]
        if feed_forward:
            trained += [self._block.mlp, self._block.post_attention_layernorm]
        else:
            self._block.mlp = NoFeedForward()
        for module in trained:
            module.requires_grad_(True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What was trained, as `runtime.engines.native.sublayers.Adapter` names them."""
        trained = {name: value for name, value in self._block.named_parameters() if value.requires_grad}
        norm: Any = final_norm(self.draft)
        return {**trained, "norm.weight": norm.weight}

    @property
    def content(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "exit_layer": self.exit_layer}

    def bytes_read(self, directory: Path, artifact: Path) -> float:
        """Those of the artifact up to the exit and of its head, and the adapter's."""
        checkpoint, blocks = Checkpoint(artifact), find_blocks(self.draft)[0]
        later = (
            checkpoint.nbytes(name)
            for name in checkpoint.names()
            if name.startswith(f"{blocks}.") and int(name[len(blocks) + 1 :].partition(".")[0]) >= self.exit_layer
        )
        return read_bytes(artifact) - sum(later) + sum(2 * value.numel() for value in self.tensors().values())

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.content | {"feed_forward": self.feed_forward}


def make(training: DraftTraining, config: KangarooConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    training.facts["exit_layer"] = config.exit_layer
    draft = cut_checkpoint(training.artifact, range(config.exit_layer + 1))
    return training.run(config, KangarooStudent(draft, config.objective(), config.feed_forward))


def check(config: KangarooConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_in_c(target, 2)
    if config.exit_layer >= target.depth:
        text = f"the model has {target.depth} layers; the draft must leave it before the last, not after {config.exit_layer}"
        raise RefusedError("exit_layer", text)


METHOD = DraftMethod(
    name="kangaroo",
    config=KangarooConfig,
    summary="the artifact's first layers draft, with a small trained block between them and its head",
    paper="Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting, 2024, arXiv 2404.18911",
    make=make,
    check=check,
)
