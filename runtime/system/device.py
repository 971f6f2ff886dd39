"""Device that a command or a call names."""

from __future__ import annotations

import torch

from runtime.errors import RequestError, first_line
from runtime.system import instruction_sets


def choose_device(device: str | torch.device) -> torch.device:
    """The device that a name means; "auto" is the first GPU where there is one, else the CPU.

    Raises:
        RequestError: torch does not know it, or cannot use it here; or it is the CPU, and `COMPRESS_ISA` is wrong.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        text = f"device {str(device)!r} cannot be used here: {first_line(error)}; use auto, cpu or cuda"
        raise RequestError(text) from error
    if chosen.type == "cpu":
        instruction_sets.forced()
    return chosen
