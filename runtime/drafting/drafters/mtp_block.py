"""Block of a recursive head (multi-token prediction) and the cache of its keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

#: Cosines and sines `[..., 1, rotary / 2]`, float32, of some positions.
Turns = tuple[torch.Tensor, torch.Tensor]
_EPSILON = 1e-6


@dataclass(frozen=True)
class BlockSizes:
    """Of the block.

    Attributes:
        hidden: the target's. intermediate: of its gated MLP.
        heads, kv_heads: of attention, each of `head_dim`.
        rotary: dimensions of a head that are rotated, even.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int


class MTPBlock(nn.Module):
    """Norms of state and embedding, a linear map of both to one, a Llama-like block, and a final norm whose output the target's head
    reads; so does the block itself for the token after that, in the place of the target's state.

    An entry at position p is made of the state after token p and the embedding of token p + 1; its output says token p + 2. It sees
    the entries before it and itself.

    Source: Cai et al., FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction, arXiv 2509.18362; the module is that
    of DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """

    frequencies: torch.Tensor

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, wide = sizes.hidden, sizes.heads * sizes.head_dim
        self.state_norm, self.token_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.attention_norm, self.mlp_norm, self.final_norm = RMSNorm(hidden), RMSNorm(hidden), RMSNorm(hidden)
        self.query = nn.Linear(hidden, wide, bias=False)
        self.key_value = nn.Linear(hidden, 2 * sizes.kv_heads * sizes.head_dim, bias=False)
        self.output = nn.Linear(wide, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * sizes.intermediate, bias=False)
        self.down = nn.Linear(sizes.intermediate, hidden, bias=False)
        self.register_buffer("frequencies", torch.zeros(sizes.rotary // 2))

    def mixed(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """What the block reads, `[..., hidden]`, of states `[..., hidden]` and of embeddings of the tokens after them."""
        return self.mix(torch.cat([self.state_norm(states), self.token_norm(embeddings)], -1))

    def turns(self, positions: torch.Tensor) -> Turns:
        """Rotations at int64 positions `[...]`."""
        angles = (positions[..., None].float() * self.frequencies)[..., None, :]
        return angles.cos(), angles.sin()

    def keys_values(self, x: torch.Tensor, turns: Turns) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what `mixed` gave: keys, rotated, and values, `[..., kv_heads, head_dim]` each."""
        sizes = self.sizes
        both = self.key_value(self.attention_norm(x)).unflatten(-1, (2, sizes.kv_heads, sizes.head_dim))
        return rotated(both[..., 0, :, :], turns), both[..., 1, :, :]

    def queries(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Rotated and scaled, `[..., kv_heads, heads of each, head_dim]`."""
        sizes = self.sizes
        found = self.query(self.attention_norm(x)).unflatten(-1, (sizes.heads, sizes.head_dim))
        found = rotated(found, turns) * sizes.head_dim**-0.5
        return found.unflatten(-2, (sizes.kv_heads, sizes.heads // sizes.kv_heads))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next states `[..., hidden]`, of what `mixed` gave and what its queries found, `[..., kv_heads, heads of each, head_dim]`."""
        x = x + self.output(attended.flatten(-3))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return self.final_norm(x + self.down(functional.silu(gate) * up))


def rotated(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """The first dimensions of `[..., heads, head_dim]` turned, the first half of them against the second, as Llama does."""
    cosine, sine = turns
    half = cosine.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    parts = [a * cosine - b * sine, b * cosine + a * sine]
    return torch.cat(parts if 2 * half == x.shape[-1] else [*parts, x[..., 2 * half :]], -1).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` normalized over its last dimension in float32, in the dtype of `x`."""
        wide = x.float()
        # On a row or two several times as fast as torch's own.
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON) * self.weight).to(x.dtype)


_FIRST = 64  # entries that there is room for at first


class Entries:
    """A cache that grows at its end, is cut back there, and forgets at its beginning what nothing sees any more.

    Args:
        sizes: of the block.
        window: entries that each one sees, its own included. Memory is that of four times as many at most.
    """

    def __init__(self, sizes: BlockSizes, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self._window = window
        shape = (2, sizes.kv_heads, 0, sizes.head_dim)
        self._memory = torch.empty(shape, dtype=dtype, device=device)
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Memory as allocated, bytes."""
        return self._memory.numel() * self._memory.element_size()

    def reserve(self, more: int) -> None:
        """Room for so many more, so that adding them (and taking them back) moves nothing."""
        room = self._memory.shape[2]
        if self.count + more <= room:
            return
        kept = min(self.count, self._window)
        old = self._memory[:, :, self.count - kept : self.count]
        if self.count >= 2 * self._window and kept + more <= room:
            self._memory[:, :, :kept] = old.clone()
        else:
            kinds, heads, _, dim = self._memory.shape
            self._memory = old.new_empty(kinds, heads, max(_FIRST, 2 * room, kept + more), dim)
            self._memory[:, :, :kept] = old
        self.count = kept

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`[new, kv_heads, head_dim]` each, after room was made for them."""
        end = self.count + len(keys)
        self._memory[0, :, self.count : end] = keys.transpose(0, 1)
        self._memory[1, :, self.count : end] = values.transpose(0, 1)
        self.count = end

    def drop(self, count: int) -> None:
        """Take the last so many back."""
        self.count -= count

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """What queries of the last entry find, `[kv_heads, heads of each, head_dim]` as they are themselves."""
        keys, values = self._memory[:, :, max(0, self.count - self._window) : self.count]
        weights = torch.softmax(queries @ keys.transpose(1, 2), -1, dtype=torch.float32)
        return weights.to(values.dtype) @ values
