"""Marlin and Machete with the signatures of vLLM 0.11: shapes are checked, results are zeros."""

from __future__ import annotations

import torch


def gptq_marlin_gemm(
    a: torch.Tensor, c: torch.Tensor | None, b_q_weight: torch.Tensor, b_bias: torch.Tensor | None, b_scales: torch.Tensor,
    global_scale: torch.Tensor | None, b_zeros: torch.Tensor | None, g_idx: torch.Tensor | None, perm: torch.Tensor | None,
    workspace: torch.Tensor, b_q_type: str, size_m: int, size_n: int, size_k: int, is_k_full: bool = True,
    use_atomic_add: bool = False, use_fp32_reduce: bool = False, is_zp_float: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert a.shape == (size_m, size_k)
    assert b_q_weight.shape == (size_k // 16, size_n * 2)
    assert b_scales.shape == (size_k // 128, size_n)
    return a.new_zeros(size_m, size_n)


def machete_prepack_B(  # noqa: N802
    b_q_weight: torch.Tensor, a_type: torch.dtype, b_type: str, group_scales_type: torch.dtype | None
) -> torch.Tensor:
    assert b_q_weight.stride(0) == 1, "columns lie together"
    return b_q_weight


def machete_mm(
    a: torch.Tensor, b_q: torch.Tensor, b_type: str, out_type: torch.dtype | None = None,
    b_group_scales: torch.Tensor | None = None, b_group_zeros: torch.Tensor | None = None, b_group_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    assert b_group_scales is not None
    assert b_group_size == 128
    assert b_q.shape[0] * 8 == a.shape[1]
    return a.new_zeros(a.shape[0], b_group_scales.shape[1])
