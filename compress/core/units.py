"""Numbers with their units, as commands and reports print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.system.sizes import size

__all__ = ["decoding_speed", "duration", "size"]


def duration(seconds: float) -> str:
    """Seconds in words: `8.1 s`, `2 min 05 s`, `1 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def decoding_speed(measured: Sequence[Mapping[str, Any]] | None, machine: str = "the machine that made it") -> str:
    """The `speed` of a run record's samples in a sentence; empty where it was not measured.

    `Decodes 45 tokens/s with its compressed cache, 890 with a plain cache (48 tokens, on this machine; a rough figure).`
    """
    if not measured:
        return ""
    rates = [one["tokens_per_second"] for one in measured]
    shown = [f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}" for rate in rates]
    shown[0] += " tokens/s"
    numbers = ", ".join(f"{rate} {one['how']}".strip() for rate, one in zip(shown, measured, strict=True))
    engines = list(dict.fromkeys(str(one["engine"]) for one in measured))
    by = f"; engines: {', '.join(engines)}" if len(engines) > 1 else ""
    return f"Decodes {numbers} ({measured[0]['tokens']} tokens, on {machine}; a rough figure{by})."
