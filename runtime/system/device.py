"""Device that a command or a call names."""

from __future__ import annotations

import torch

from runtime.errors import RequestError, first_line


def choose_device(device: str | torch.device) -> torch.device:
    """The device that a name means; "auto" is the first GPU where there is one, else the CPU.

    Raises:
        RequestError: torch does not know it, or cannot use it here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        text = f"device {str(device)!r} cannot be used here: {first_line(error)}; use auto, cpu or cuda"
        raise RequestError(text) from error
    return chosen
