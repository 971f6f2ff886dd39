"""Correctness part of `kernels_gpu.py`: made-up weights, and every kernel against its float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

FLOAT8 = torch.float8_e4m3fn
Results = dict[str, Any]


def int_weight(n: int, k: int, group: int, field: int, device: str, zero: bool = False, seed: int = 0) -> Any:
    from triton_references import reorder

    generator = torch.Generator(device).manual_seed(seed)
    low, groups = -(1 << field - 1), -(-k // group) if group else 1
    codes = torch.randint(low, -low, (n, k), dtype=torch.int8, device=device, generator=generator)
    scale = ((torch.rand(n, groups, device=device, generator=generator) - 0.4) * 0.02).bfloat16()
    zeros = (
        torch.randint(low, -low, (n, groups), dtype=torch.int8, device=device, generator=generator) if zero else None
    )
    return reorder(codes, scale, zeros, group, field)


def sparse_weight(n: int, k: int, group: int, device: str, seed: int = 0) -> Any:
    from triton_references import sparse

    generator = torch.Generator(device).manual_seed(seed)
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device=device)
    chosen = pairs[torch.randint(0, 6, (n, k // 4), device=device, generator=generator)]
    codes = torch.randint(-8, 8, (n, k // 2), dtype=torch.int8, device=device, generator=generator)
    scale = (
        (torch.rand(n, -(-k // group) if group else 1, device=device, generator=generator) - 0.4) * 0.02
    ).bfloat16()
    return sparse(codes, chosen, scale, None, k, group)


def codes8(shape: tuple[int, int], float8: bool, device: str) -> torch.Tensor:
    if float8:
        return (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(FLOAT8)
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


def check(device: str, small: bool) -> Results:
    """Every kernel against its float64 reference; also that a second call gives the same bits."""
    import triton_references as references

    from runtime.engines.cuda import ops
    from runtime.kernels.triton import few_rows, fused, many_rows, matvec, semi_structured, sparse24_w4, w8a8

    shapes = [(1, 1), (7, 172)] if small else [
        (1, 1), (7, 172), (33, 260), (127, 1000), (256, 4096), (4096, 4096), (4099, 4100), (28672, 4096), (4096, 14336),
    ]  # fmt: skip
    passed, failed, worst = 0, [], {}

    def compare(name: str, run: Callable[[], torch.Tensor], expected: torch.Tensor, tolerance: float) -> None:
        nonlocal passed
        kernel = name.split()[0]
        try:
            y = run()
            error = float((y.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            repeats = torch.equal(y, run())
        except Exception as problem:
            failed.append(f"{name}: {type(problem).__name__}: {str(problem)[:200]}")
            return
        worst[kernel] = max(worst.get(kernel, 0.0), error)
        if not error <= tolerance or not repeats:  # also when it is not a number
            failed.append(f"{name}: relative error {error:.2e}" + ("" if repeats else ", and not the same twice"))
        else:
            passed += 1

    for n, k in shapes:
        grids = [(0, True), (128, False), (16, True), (48, False)]
        for field in (4, 8):
            for group, zero in grids[:2] if small else grids:
                if group > k or (n * k > 1 << 25 and group not in (0, 128)):
                    continue
                w = int_weight(n, k, group, field, device, zero)
                dense = references.dequantize(w, torch.bfloat16)
                label = f"{n}x{k} w{field} group {group}{' asymmetric' if zero else ''}"
                compare(f"dequantize {label}", lambda w=w: many_rows.dequantize(w, torch.bfloat16), dense.double(), 0.0)
                cases = (
                    (matvec.matvec, (1, 2)),
                    (few_rows.few_rows, (3, 16, 33)),
                    (many_rows.many_rows, (65, 300, 1024)),
                )
                for function, counts in cases:
                    for m in counts[:1] if small else counts:
                        x = torch.randn(m, k, device=device).bfloat16()
                        bias = torch.randn(n, device=device).bfloat16()
                        run = lambda f=function, x=x, w=w, bias=bias: f(x, w, bias)  # noqa: E731
                        expected = x.double() @ references.dequantize(w, torch.float64).t() + bias.double()
                        compare(f"{function.__name__} {label} rows {m}", run, expected, 5e-3)
        # Every launch that tuning may choose; in the interpreter the defaults, at one shape.
        if k == 172 if small else k in (4096, 4100) and 4096 <= n < 5000:
            w, sparse = int_weight(n, k, 128, 4, device), sparse_weight(n, k, 128, device)
            dense = references.dequantize(w, torch.float64).t()
            for module, counts in ((matvec, (1, 2)), (few_rows, (16, 64)), (many_rows, (64, 200, 1024))):
                function = getattr(module, module.__name__.rpartition(".")[2])
                for m in counts[:1] if small else counts:
                    x = torch.randn(m, k, device=device).bfloat16()
                    for c in module.configurations(m, w)[: 1 if small else None]:
                        run = lambda f=function, x=x, w=w: f(x, w)  # noqa: E731
                        with references.forced(c):
                            compare(f"{function.__name__} {n}x{k} rows {m} {c}", run, x.double() @ dense, 5e-3)
            if not small and n % 32 == 0 and k % 64 == 0:  # 2:4 for many rows, on sparse tensor cores
                halved = sparse24_w4.dequantize(sparse, torch.bfloat16)
                for m in (300, 1024):
                    x = torch.randn(m, k, device=device).bfloat16()
                    run = lambda x=x, w=halved: semi_structured.linear(x, w)  # noqa: E731
                    compare(f"semi_structured {n}x{k} rows {m}", run, x.double() @ halved.double().t(), 5e-3)
            x = torch.randn(1, k, device=device).bfloat16()
            for c in sparse24_w4.configurations(sparse)[: 1 if small else None]:
                run = lambda x=x, s=sparse: sparse24_w4.linear(x, s)  # noqa: E731
                with references.forced(c):
                    compare(f"sparse24 {n}x{k} {c}", run, references.linear(x, sparse), 8e-3)
        float8s = (False, True) if small or torch.cuda.get_device_capability() >= (8, 9) else (False,)
        for float8 in float8s:
            w8, w_scale = codes8((n, k), float8, device), (torch.rand(n, device=device) * 0.01).bfloat16()
            for m in (3,) if small else (1, 16, 65, 1024):
                codes, scale, _ = w8a8.quantize(torch.randn(m, k, device=device).bfloat16(), float8)
                run = lambda c=codes, s=scale, w=w8, ws=w_scale: w8a8.product(c, s, w, ws, torch.bfloat16)  # noqa: E731
                expected = references.w8a8(codes, scale, w8, w_scale)
                label = f"{n}x{k} {'float8' if float8 else 'int8'} rows {m}"
                compare(f"w8a8 {label}", run, expected, 5e-3)
                for c in w8a8.configurations(m, (n, k)) if (n, k) == (4096, 4096) else ():
                    run = partial(w8a8.product, codes, scale, w8, w_scale, torch.bfloat16)
                    with references.forced(c):
                        compare(f"w8a8 {label} {c}", run, expected, 5e-3)
        if k % 4 == 0:
            for group in (0, 128) if k >= 128 else (0,):
                s = sparse_weight(n, k, group, device)
                for m in (1,) if small else (1, 3, 32):
                    x = torch.randn(m, k, device=device).bfloat16()
                    run = lambda x=x, s=s: sparse24_w4.linear(x, s)  # noqa: E731
                    compare(f"sparse24 {n}x{k} group {group} rows {m}", run, references.linear(x, s), 8e-3)
    for tokens, size in ((3, 100),) if small else ((1, 4096), (7, 100), (513, 4096)):
        x, residual, w = (torch.randn(s, device=device).bfloat16() for s in ((tokens, size), (tokens, size), (size,)))
        expected = ops.rms_norm(x.double(), w.double(), 1e-5, residual.double())[0]
        compare(
            f"rms_norm {tokens}x{size}", lambda x=x, w=w, r=residual: fused.rms_norm(x, w, 1e-5, r)[0], expected, 8e-3
        )
        compare(f"swiglu {tokens}x{size}", lambda x=x: fused.swiglu(x), ops.swiglu([x.double()]), 8e-3)
    return {"passed": passed, "failed": failed, "worst_relative_error": worst}
