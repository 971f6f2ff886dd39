"""Division of a model under a memory bound: blocks that stay in memory, and blocks that are streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import RequestError
from runtime.modeling.layer_sizes import uniform

#: What a bound has to hold besides weights and the working memory of a step: the modules that loading imports (some 130 MB where
#: transformers was not imported before), what generating takes in Python, keys and values of a context of a few thousand tokens.
RESERVE = 224 << 20
CACHE = 64 << 20  # what it holds for keys and values
_POSITIONS = 2048  # they have room for these, also where that is more
_ROWS = 512  # tokens of a step of the native engine
_BUFFERS = 3  # one that is computed with, one that is ready, one that is being read


class TooLittleError(RequestError):
    """A bound under which a model cannot be; `least` bytes would do."""

    def __init__(self, sentence: str, least: int) -> None:
        self.least = least
        super().__init__(sentence)


@dataclass(frozen=True)
class Plan:
    """What is where.

    Attributes:
        streamed: indices of the blocks that are read for every step, in order.
        buffers: how many of them are in memory at a time.
        bytes: memory that weights take: outside the blocks, blocks that stay, buffers.
    """

    streamed: tuple[int, ...]
    buffers: int
    bytes: int


def plan(max_memory: int, outside: int, blocks: Sequence[int], reserve: int) -> Plan:
    """Which blocks stay, where all that is `outside` the blocks does.

    Args:
        max_memory: bytes that all may take.
        outside: bytes of embedding, head and final norm.
        blocks: bytes of each block.
        reserve: bytes that are needed besides weights.

    Raises:
        TooLittleError: not even two blocks fit at a time.
    """
    everything = outside + sum(blocks)
    if reserve + everything <= max_memory:
        return Plan((), 0, everything)
    largest = max(blocks, default=0)
    least = reserve + outside + 2 * largest
    if not blocks or least > max_memory:
        parts = f"the weights outside the blocks ({text(outside)}), two blocks ({text(2 * largest)}) and {text(reserve)} besides weights"
        if not blocks:
            least, parts = reserve + everything, "all of it, since it has no blocks that could be read one by one"
        sentence = (
            f"max_memory {text(max_memory)} is too little: this model needs at least {text(least, up=True)}, {parts}"
        )
        raise TooLittleError(sentence, least)
    slots = (max_memory - reserve - outside) // largest
    buffers = min(_BUFFERS, slots)
    stay = max(0, min(slots, len(blocks)) - buffers)
    streamed = _spread(len(blocks), len(blocks) - stay)
    resident = sum(size for i, size in enumerate(blocks) if i not in streamed)
    return Plan(streamed, buffers, outside + resident + buffers * largest)


def reserve_for(config: Any, dtype: torch.dtype) -> int:
    """What a model needs besides its weights: `RESERVE`, a larger cache where it wants one, and the activations of a step in float32."""
    text_config: Any = uniform(config).get_text_config()
    hidden = getattr(text_config, "hidden_size", 0)
    inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
    return RESERVE + cache_floor(config, dtype) - CACHE + 4 * _ROWS * (4 * hidden + 3 * inner)


def cache_floor(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values that a bound has room for whatever else it holds: `CACHE`, or some positions of a wide model."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = positions if isinstance(positions, int) and positions else _POSITIONS
    return max(CACHE, position_bytes(config, dtype) * min(_POSITIONS, most))


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token, all layers together."""
    text_config = config.get_text_config()

    def count(name: str) -> int:
        value = getattr(text_config, name, None)
        return value if isinstance(value, int) else 0

    heads = count("num_attention_heads")
    width = count("head_dim") or count("hidden_size") // max(1, heads)
    return 2 * count("num_hidden_layers") * (count("num_key_value_heads") or heads) * width * dtype.itemsize


def cache_budget(max_memory: int, weights: int, config: Any, dtype: torch.dtype) -> int:
    """Bytes that keys and values of a call may take: what weights and `reserve_for` leave, and what that holds for them."""
    left = max_memory - weights - reserve_for(config, dtype)
    return max(0, left) + cache_floor(config, dtype)


def text(count: int, up: bool = False) -> str:
    """Bytes for people; `up` rounds so that the number, given back as a bound, is enough."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            hundredths = -(-count * 100 // size) if up else round(count * 100 / size)
            return f"{hundredths / 100:g} {unit}"
    return f"{count} bytes"


def _spread(total: int, count: int) -> tuple[int, ...]:
    """`count` of `total` indices at even distances: blocks that stay give the reader time for the next one."""
    return tuple(i for i in range(total) if (i + 1) * count // total > i * count // total)
