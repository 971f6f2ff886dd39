"""How a process that was started here ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int | None) -> str:
    """What follows "the process ...", given its return code as `subprocess` tells it (None: it is not known)."""
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with exit code {code}"
    if -code == signal.SIGKILL:
        return (
            "was killed (SIGKILL), most likely by the kernel because the machine ran out of memory: close other programs, ask for "
            "less at once, or use a machine with more"
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"
