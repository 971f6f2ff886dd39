"""Peers of the product with 4-bit weights in groups of 128: each gives calls on so many copies of a random weight.

Weights are random bits: speed only. Functions of vLLM get the arguments that their signature names, which changes with versions.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

GROUP = 128
Calls = list[Callable[[], Any]]


def words(*shape: int, device: torch.device) -> torch.Tensor:
    """Random bits."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)


def tinygemm(shape: tuple[int, int], x: torch.Tensor, count: int) -> Calls:
    """The int4 kernel that torch brings along."""
    n, k = shape
    scales = torch.full((k // GROUP, n, 2), 0.01, dtype=torch.bfloat16, device=x.device)
    calls: Calls = []
    for _ in range(count):
        codes = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device=x.device)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        calls.append(partial(torch.ops.aten._weight_int4pack_mm, x, packed, GROUP, scales))
    return calls


def torchao(shape: tuple[int, int], x: torch.Tensor, count: int) -> Calls:
    """torchao's int4 weights, as its documentation makes them for CUDA."""
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    calls: Calls = []
    for _ in range(count):
        layer = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device=x.device)
        holder = torch.nn.Sequential(layer)
        quantization.quantize_(holder, config)
        calls.append(partial(holder[0], x))
    return calls


def gemlite(shape: tuple[int, int], x: torch.Tensor, count: int) -> Calls:
    """gemlite's Triton kernels."""
    core = importlib.import_module("gemlite.core")
    n, k = shape
    calls: Calls = []
    for _ in range(count):
        dtypes = {"input_dtype": core.DType.BF16, "output_dtype": core.DType.BF16}
        layer = core.GemLiteLinear(4, group_size=GROUP, in_features=k, out_features=n, **dtypes)
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=x.device)
        grid = torch.full((n * k // GROUP, 1), 0.01, dtype=torch.bfloat16, device=x.device)
        layer.pack(codes, grid, torch.full_like(grid, 8), None)
        calls.append(partial(layer, x))
    return calls


def marlin(shape: tuple[int, int], x: torch.Tensor, count: int) -> Calls:
    """vLLM's Marlin."""
    ops, types = _vllm()
    utilities = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    function = getattr(ops, "gptq_marlin_gemm", None) or ops.marlin_gemm
    n, k = shape
    nothing = torch.empty(0, dtype=torch.int32, device=x.device)
    calls: Calls = []
    for _ in range(count):
        known = {
            "a": x, "c": None, "b_q_weight": words(k // 16, n * 2, device=x.device), "b_bias": None, "a_scales": None,
            "b_scales": torch.full((k // GROUP, n), 0.01, dtype=x.dtype, device=x.device), "global_scale": None,
            "b_zeros": nothing, "g_idx": nothing, "perm": nothing,
            "workspace": utilities.marlin_make_workspace_new(x.device), "b_q_type": types.uint4b8,
            "size_m": x.shape[0], "size_n": n, "size_k": k, "is_k_full": True, "use_atomic_add": False,
            "use_fp32_reduce": True, "is_zp_float": False,
        }  # fmt: skip
        calls.append(partial(function, **_named(function, known)))
    return calls


def machete(shape: tuple[int, int], x: torch.Tensor, count: int) -> Calls:
    """vLLM's Machete, for Hopper."""
    ops, types = _vllm()
    n, k = shape
    calls: Calls = []
    for _ in range(count):
        codes = words(n, k // 8, device=x.device).t()
        prepacked = ops.machete_prepack_B(codes, x.dtype, types.uint4b8, x.dtype)
        known = {
            "a": x, "b_q": prepacked, "b_type": types.uint4b8, "out_type": x.dtype, "b_group_size": GROUP,
            "b_group_scales": torch.full((k // GROUP, n), 0.01, dtype=x.dtype, device=x.device),
        }  # fmt: skip
        calls.append(partial(ops.machete_mm, **_named(ops.machete_mm, known)))
    return calls


def semi_structured(shape: tuple[int, int], x: torch.Tensor, count: int) -> Calls:
    """2:4 in bfloat16 through torch's semi-structured tensors."""
    from torch.sparse import to_sparse_semi_structured

    calls: Calls = []
    for _ in range(min(count, 2)):  # slow to make, and read from memory at these sizes all the same
        w = torch.randn(shape, device=x.device).bfloat16()
        keep = (w.view(-1, 4).abs().argsort(-1).argsort(-1) >= 2).view_as(w)
        calls.append(partial(torch.nn.functional.linear, x, to_sparse_semi_structured(w * keep)))
    return calls


def _vllm() -> tuple[Any, Any]:
    types = importlib.import_module("vllm.scalar_type").scalar_types
    return importlib.import_module("vllm._custom_ops"), types


def _named(function: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function names."""
    return {name: known[name] for name in inspect.signature(function).parameters if name in known}


PEERS: dict[str, Callable[[tuple[int, int], torch.Tensor, int], Calls]] = {
    "tinygemm": tinygemm, "torchao": torchao, "gemlite": gemlite, "marlin": marlin, "machete": machete,
    "torch_2:4_bf16": semi_structured,
}  # fmt: skip
