"""Constants in the dtype of a graph, refused where that dtype cannot hold them."""

from __future__ import annotations

import torch

from runtime.errors import RequestError


def in_dtype(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`values` in `dtype`; RequestError where one overflows, or where a scale (`*_scale`) becomes zero."""
    result = values.to(dtype)
    if not bool(result.isfinite().all()) and bool(values.isfinite().all()):
        largest = float(values.float().abs().max())
        raise RequestError(
            f"{name} holds {largest:.3g}, beyond the range of {str(dtype).removeprefix('torch.')}; choose another dtype"
        )
    if values.numel() and bool(((result == 0) & (values != 0)).any()) and name.endswith("_scale"):
        raise RequestError(
            f"{name} holds scales too small for {str(dtype).removeprefix('torch.')}; choose another dtype"
        )
    return result
