"""Numbers with their units, as commands and reports print them."""

from __future__ import annotations

from runtime.system.sizes import size

__all__ = ["duration", "size"]


def duration(seconds: float) -> str:
    """Seconds in words: `8.1 s`, `2 min 05 s`, `1 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
