"""Names of compute dtypes, and their short aliases (`fp16`, `bf16`)."""

from __future__ import annotations

from typing import Any

import torch

from runtime.config.messages import did_you_mean
from runtime.errors import RequestError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ALIASES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def dtype_name(written: Any) -> Any:
    """The full name of a dtype ("bf16", "torch.bfloat16", `torch.bfloat16`: "bfloat16"); other values are returned unchanged."""
    if not isinstance(written, str | torch.dtype):
        return written
    name = str(written).removeprefix("torch.")
    return _ALIASES.get(name.lower(), name)


def read_dtype(written: str | torch.dtype | None) -> torch.dtype | None:
    """The compute dtype, None for None; RequestError if it is not one of `DTYPES`."""
    if written is None:
        return None
    name = dtype_name(written)
    if name not in DTYPES:
        allowed = f"{', '.join(DTYPES)} (or fp32, fp16, bf16)"
        raise RequestError(f"dtype {str(name)!r} is unknown{did_you_mean(name, DTYPES)}; allowed are {allowed}")
    return DTYPES[name]
