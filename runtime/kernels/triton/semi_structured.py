"""2:4 weights on sparse tensor cores, through torch's semi-structured tensors (cuSPARSELt, unless the user forces CUTLASS).

The weight is dequantized and compressed at each call, into scratch memory: some 5 bytes of traffic a weight, which pays from
some thousand rows on if at all. So it is one of the candidates that are timed (`tuning.choose`), never assumed to win.
"""

from __future__ import annotations

import logging
import warnings
from functools import cache

import torch

from runtime.kernels.triton import gpu, tuning

LEAST_CLASS = 512  # of rows (`tuning.row_class`): fewer cannot pay for compressing the weight
_log = logging.getLogger("compress.kernels")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias`: `[M, K]` -> `[M, N]`; `weight` `[N, K]` dense, of each four in a row at most two are not zero.

    Raises:
        RuntimeError: torch has no such product for the device, dtype or shape.
    """
    from torch.sparse import to_sparse_semi_structured

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that these tensors are a prototype
        compressed = to_sparse_semi_structured(weight)
    # Contiguous, since torch takes the distance of rows for granted.
    return torch.nn.functional.linear(x.contiguous(), compressed, bias)


def worth_timing(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product `[rows, K] x [N, K]^T` could go this way; the same for all rows of a class, which share a choice."""
    fits = tuning.row_class(rows) >= LEAST_CLASS and shape[0] % 32 == 0 and shape[1] % 64 == 0
    with gpu.entered(device):
        busy = device.type != "cuda" or torch.cuda.is_current_stream_capturing()
    if not fits or busy:
        return False
    return works(dtype, device)


@cache
def works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch computes a small product rightly this way on the device, tried once; where it does not, the log says why."""
    draw = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(64, 32, 4, generator=draw, device="cpu")
    weight = (weight * (weight.abs().argsort(-1).argsort(-1) >= 2)).flatten(1).to(dtype)
    x = torch.randn(64, 256, generator=draw, device="cpu").to(dtype)[:, :128]  # rows further apart than they are long
    bias = torch.randn(64, generator=draw, device="cpu").to(dtype)
    try:
        found = linear(x.to(device), weight.to(device), bias.to(device))
    except (RuntimeError, NotImplementedError, ImportError) as error:
        _log.info("2:4 products of torch do not run on %s: %s", device, error)
        return False
    expected = x.double() @ weight.double().t() + bias.double()
    wrong = (found.double().cpu() - expected).abs().max().item()
    if not wrong <= 0.02 * expected.abs().max().item():  # NaN is wrong too
        _log.warning("2:4 products of torch are wrong on %s (by %.3g), so they are not used", device, wrong)
        return False
    return True
