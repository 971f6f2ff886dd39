"""FastMTP: one head on the artifact, applied again and again; its states are the target's at first and then its own.

FastMTP (arXiv 2509.18362): one head shared by all positions, its loss falling exponentially with the token ahead, the target frozen. Each
anchor's recursion sees what it will see when it drafts: the entries of the target's states up to the anchor and those of its own, and not
what other anchors' recursions made (as EAGLE-3 trains, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from compress.distill.draft.features import Features
from compress.distill.draft.heads import HeadsConfig, HeadStudent, check_heads, train_heads
from compress.distill.draft.training import DraftMethod
from runtime.drafting.drafters.mtp_block import BlockSizes, MTPBlock
from runtime.modeling.layer_sizes import uniform

_THETA = 10000.0  # of rotations, where the target has none


class MTPConfig(HeadsConfig):
    """A block as of the artifact's own, on its hidden states and the tokens after them; it predicts the next token but one, and out of its
    own output the ones after that. One set of weights serves all places. `vocabulary` decides much of what a token costs.
    """

    method: Literal["mtp"] = Field("mtp", description="Name of the method.")
    tokens: int = Field(3, ge=1, le=16, description="Tokens ahead that are trained.")
    decay: float = Field(
        0.6, gt=0, le=1, description="Weight of the loss of each further token, of that of the one before."
    )
    intermediate: int | None = Field(None, ge=1, description="Width of the block's MLP; none: the artifact's.")


class MTPStudent(HeadStudent):
    """A block that predicts token after token; it can be asked for more than the `tokens` that it is trained for.

    Attributes:
        window: entries that the block sees.
    """

    window = 2048

    def __init__(self, features: Features, config: MTPConfig, kept: torch.Tensor | None = None) -> None:
        block = MTPBlock(block_sizes(features, config.intermediate))
        begin(block, features, config.seed)
        super().__init__(features, block, config, kept)

    @property
    def sizes(self) -> dict[str, int]:
        module: Any = self.draft.module
        return {**asdict(module.sizes), "steps": self.levels}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "window": self.window}

    def states(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        block: Any = self.draft.module
        with torch.no_grad():
            embeddings = self.features.parts.embed(ids).to(ids.device, torch.float32)
        states = self.features.hidden(ids)[:, :-1]
        count = states.shape[1]
        places = torch.arange(count, device=ids.device)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for ahead in range(length):
            own = count - ahead  # entries whose next tokens are all there
            x = block.mixed(states[:, :own], embeddings[:, 1 + ahead :])
            turns = block.turns(places[:own] + ahead)
            key, value = block.keys_values(x, turns)
            keys.append(key)
            values.append(value)
            queries = block.queries(x, turns)
            states = block.finish(x, attended(queries, keys, values, self.window))
            yield states


def attended(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], window: int) -> torch.Tensor:
    """What the queries of each anchor's latest entry find: among the first entries of anchors up to it, and its own later ones.

    Args:
        queries: `[b, n, kv_heads, heads of each, head_dim]`, scaled.
        keys, values: of entry 0, 1, ... of each anchor, `[b, at least n, kv_heads, head_dim]`; the first are all anchors'.
        window: entries that are seen, the latest ones.
    """
    count, ahead = queries.shape[1], len(keys) - 1
    place = torch.arange(keys[0].shape[1], device=queries.device)
    row = place[:count, None]
    seen = (place <= row) & (place > row + ahead - window)
    scores = [torch.einsum("bnhgd,bmhd->bhgnm", queries, keys[0]).masked_fill(~seen, -torch.inf)]
    for step, key in enumerate(keys[1:], 1):
        if step > ahead - window:
            scores.append(torch.einsum("bnhgd,bnhd->bhgn", queries, key[:, :count])[..., None])
    weights = torch.cat(scores, -1).softmax(-1)
    found = torch.einsum("bhgnm,bmhd->bnhgd", weights[..., : len(place)], values[0])
    for column, value in enumerate(values[1 + len(keys) - len(scores) :], len(place)):
        found = found + torch.einsum("bhgn,bnhd->bnhgd", weights[..., column], value[:, :count])
    return found


def block_sizes(features: Features, intermediate: int | None = None) -> BlockSizes:
    """A block with the attention of the target's."""
    config: Any = uniform(features.config)
    hidden, heads = features.parts.hidden, int(config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or hidden // heads)
    wide = intermediate or int(getattr(config, "intermediate_size", None) or 4 * hidden)
    frequencies = _frequencies(features, dim)
    return BlockSizes(
        hidden, wide, heads, int(getattr(config, "num_key_value_heads", None) or heads), dim, 2 * len(frequencies)
    )


@torch.no_grad()
def begin(block: MTPBlock, features: Features, seed: int = 0) -> None:
    """Weights to train from: random ones of the usual size, and the target's rotations. The residual branches begin small."""
    generator = torch.Generator().manual_seed(seed)
    for module in block.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, module.in_features**-0.5, generator)
    for layer in (block.output, block.down):
        layer.weight.mul_(0.1)
    hidden = block.sizes.hidden
    block.mix.weight[:, :hidden] += torch.eye(hidden)
    block.frequencies = _frequencies(features, block.sizes.head_dim)


def _frequencies(features: Features, dim: int) -> torch.Tensor:
    """Radians a position, float32 `[rotary / 2]`, of the target's own rotary module."""
    rotary = getattr(features.module.get_decoder(), "rotary_emb", None)
    found = getattr(rotary, "inv_freq", None)
    if isinstance(found, torch.Tensor) and found.dim() == 1 and 2 * len(found) <= dim:
        return found.detach().float().cpu().clone()
    return _THETA ** (-torch.arange(0, dim, 2).float() / dim)


METHOD = DraftMethod(
    name="mtp",
    config=MTPConfig,
    summary="one small block on the artifact that predicts token after token",
    paper="Cai et al., FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction, 2025, arXiv 2509.18362",
    make=partial(train_heads, student=MTPStudent),
    check=check_heads,
)
