"""Split-K: launches of a product whose programs share the columns of the weight, and the parts added in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from runtime.kernels.triton import tuning
from runtime.kernels.triton.codes import row_major, sum_parts
from runtime.kernels.triton.jit import Entry
from runtime.kernels.triton.layout import Weight
from runtime.kernels.triton.tuning import Config


def product(
    kernel: Entry, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, candidates: Sequence[Config],
    grid: Callable[[Config], tuple[int, ...]], key: int, **arguments: Any,
) -> torch.Tensor:  # fmt: skip
    """`x W^T + bias` by a kernel that takes a weight's operands: `[M, K]` -> `[M, N]` in the dtype of `x`; sums in float32.

    Args:
        candidates: launches to choose among, see `split_k`.
        grid: programs of one of them.
        key: rows of `x`, or their class, as far as the choice depends on them.
        arguments: of this kernel alone.
    """
    x = row_major(x)
    (rows, _), (n, columns) = x.shape, weight.shape

    def launch(config: Config, target: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernel[grid(config)](
            x, *weight.operands, x if bias is None else bias, target,
            x.stride(0), rows, n, columns, weight.words.shape[0], weight.groups,
            **weight.constants, **arguments, HAS_BIAS=bias is not None,
            EVEN_K=columns % (config.get("TILES", 1) * weight.tile) == 0, **config,
        )  # fmt: skip

    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    return split_k(kernel.name.partition(".")[0], (*weight.key, key), x, out, bias, candidates, launch)


def split_k(
    kernel: str, key: Sequence[Any], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
    candidates: Sequence[Config], launch: Callable[[Config, torch.Tensor, torch.Tensor | None], None],
) -> torch.Tensor:  # fmt: skip
    """Fill `out` `[M, N]` by the tuned one of the candidates, or the only one; returns it.

    Args:
        kernel, key, x: of `tuning.choose`.
        launch: `launch(config, target, bias)` runs the kernel into `target`: `out` itself, or float32 parts `[SPLIT_K, M, N]`, which
            are summed afterwards (so results repeat bit for bit) and have no bias.
    """

    def run(config: Config) -> None:
        parts = config["SPLIT_K"]
        if parts == 1:
            launch(config, out, bias)
        else:
            target = torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device)
            launch(config, target, None)
            sum_parts(target, bias, out)

    if out.numel():
        run(candidates[0] if len(candidates) == 1 else tuning.choose(kernel, key, x, candidates, run))
    return out


def widest_split(blocks: int, programs: int, most: int) -> int:
    """The power of two by which K is split so that blocks of rows make some `programs`; not much beyond `most`."""
    split = 1
    while blocks * split < programs and split <= most:
        split *= 2
    return split


def vector_configurations(chosen: Iterable[tuple[int, int, int, int]], tiles: int) -> list[Config]:
    """Launches of a matrix-vector product: those of `(BLOCK_N, TILES, SPLIT_K, num_warps)` that a weight of so many tiles allows."""
    names = ("BLOCK_N", "TILES", "SPLIT_K", "num_warps")
    fitting = [each for each in chosen if each[2] == 1 or each[2] * each[1] <= tiles]
    return [dict(zip(names, each, strict=True)) for each in fitting or [(16, 4, 1, 4)]]
