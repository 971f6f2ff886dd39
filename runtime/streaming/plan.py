"""How much of a model stays in memory under a bound, and which blocks are read again and again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
#: What a bound has to hold besides weights and the working memory of a step: the modules that loading imports (some 130 MB where
#: transformers was not imported before), what generating takes in Python, keys and values of a context of a few thousand tokens.
RESERVE = 224 << 20
_ROWS = 512  # tokens of a step of the lean engine
_BUFFERS = 3  # one that is computed with, one that is ready, one that is being read


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


def parse_memory(value: Any) -> int:
    """Bytes of a bound: an integer, or a text with a unit such as "2GB", "1.5 GiB" or "800MB"."""
    allowed = 'allowed are bytes as an integer, or a text such as "2GB", "1.5GiB" or "800MB"'
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise RequestError(f"max_memory must be a size, not {value!r}: {allowed}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or len(value) > 40:
            raise RequestError(f"max_memory {value[:40]!r} is no size: {allowed}")
        value = int(float(match[1]) * unit)
    if value < 1:
        raise RequestError(f"max_memory must be more than 0 bytes: {allowed}")
    return value


def plan(max_memory: int, outside: int, blocks: Sequence[int], reserve: int) -> Plan:
    """Which blocks stay, where all that is `outside` the blocks does.

    Args:
        max_memory: bytes that all may take.
        outside: bytes of embedding, head and final norm.
        blocks: bytes of each block.
        reserve: bytes that are needed besides weights.

    Raises:
        RequestError: not even two blocks fit at a time.
    """
    everything = outside + sum(blocks)
    if reserve + everything <= max_memory:
        return Plan((), 0, everything)
    largest = max(blocks, default=0)
    least = reserve + outside + 2 * largest
    if not blocks or least > max_memory:
        held = f"the weights outside the blocks ({text(outside)}), two blocks ({text(2 * largest)}) and {text(reserve)} to work with"
        if not blocks:
            least, held = reserve + everything, "all of it, since it has no blocks that could be read one by one"
        raise RequestError(
            f"max_memory {text(max_memory)} is too little: this model needs at least {text(least, up=True)}, {held}"
        )
    slots = (max_memory - reserve - outside) // largest
    buffers = min(_BUFFERS, slots)
    stay = max(0, min(slots, len(blocks)) - buffers)
    streamed = _spread(len(blocks), len(blocks) - stay)
    kept = sum(size for i, size in enumerate(blocks) if i not in streamed)
    return Plan(streamed, buffers, outside + kept + buffers * largest)


def reserve_for(config: Any) -> int:
    """What a model needs besides its weights: `RESERVE`, and the activations of a step in float32."""
    text_config = config.get_text_config()
    hidden = getattr(text_config, "hidden_size", 0)
    inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
    return RESERVE + 4 * _ROWS * (4 * hidden + 3 * inner)


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
