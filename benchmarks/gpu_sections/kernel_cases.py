"""Made-up weights, and the cases of every kernel against its float64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from runtime.kernels.triton.layout import BLOCK

FLOAT8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """`run` must give `expected` up to a relative error of `tolerance`, launched as `config` says (None: as it chooses)."""

    name: str
    run: Callable[[], torch.Tensor]
    expected: torch.Tensor
    tolerance: float
    config: dict[str, Any] | None = None


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


def block_weight(n: int, k: int, kind: str, device: str, seed: int = 0) -> Any:
    """Block floats `mxfp4`, `nvfp4` or `mxfp8`, NaN left out."""
    from triton_references import block_floats

    generator, bits = torch.Generator(device).manual_seed(seed), int(kind[-1])
    fields = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device, generator=generator)
    if bits == 8:
        fields[fields % 128 == 127] = 0
    if kind != "nvfp4":
        scale = torch.randint(110, 122, (n, k // 32), dtype=torch.uint8, device=device, generator=generator)
        return block_floats(fields, scale, bits)
    scale = (torch.rand(n, k // 16, device=device, generator=generator) * 448).to(FLOAT8)
    return block_floats(fields, scale, bits, torch.tensor([1234.5], device=device))


def codebook_weight(n: int, k: int, group: int, device: str, seed: int = 0) -> Any:
    """A row codebook of 4 bits."""
    from runtime.kernels.triton import layout

    generator = torch.Generator(device).manual_seed(seed)
    table = torch.randint(-128, 128, (n, 16), dtype=torch.int8, device=device, generator=generator)
    w = int_weight(n, k, group, 4, device, seed=seed)
    return dataclasses.replace(w, codes="table", table=layout.table_words(table))


def k_quant_weight(n: int, k: int, kind: str, device: str, seed: int = 0) -> Any:
    """Codes like those of `q4_k` (minima, groups of 32) or `q6_k` (groups of 16), under scales that are products."""
    from runtime.kernels.triton import layout

    group, field = (32, 4) if kind == "q4_k" else (16, 8)
    generator, w = torch.Generator(device).manual_seed(seed), int_weight(n, k, group, field, device, seed=seed)

    def products(name: str, factor: str) -> dict[str, torch.Tensor]:
        blocks = torch.rand(n, k // BLOCK, device=device, generator=generator) * 1e-3
        integers = torch.randint(0, 64, (n, k // group), dtype=torch.int8, device=device, generator=generator)
        return {name: integers if kind == "q4_k" else integers - 32, factor: blocks.half()}

    minima = products("minimum", "dmin") if kind == "q4_k" else {}
    scale = layout.pack_products(products("scale", "d") | minima)
    return dataclasses.replace(w, scale=scale, codes="minimum" if minima else "integer")


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


def error_of(case: Case) -> float:
    """Relative error of a case, not a number where a second call gives other bits."""
    import triton_references as references

    with references.forced(case.config):
        y = case.run()
        error = float((y.double() - case.expected).norm() / case.expected.norm().clamp(min=1e-30))
        return error if torch.equal(y, case.run()) else float("nan")


def cases(device: str, small: bool) -> Iterator[Case]:
    """Every kernel as it launches by itself, then every launch that tuning may choose; `small`: few and tiny ones."""
    shapes = [(1, 1), (7, 172)] if small else [
        (4096, 4096), (28672, 4096), (4096, 14336), (4099, 4100), (256, 4096), (127, 1000), (33, 260), (7, 172), (1, 1),
    ]  # fmt: skip
    for n, k in shapes:
        yield from integer_cases(n, k, device, small)
        yield from block_float_cases(n, k - k % 32, device, small)
        yield from codebook_cases(n, k, device, small)
        yield from w8a8_cases(n, k, device, small)
        yield from rounded_cases(n, k, device, small)
        if k % 4 == 0:
            yield from sparse_cases(n, k, device, small)
    yield from fused_cases(device, small)
    yield from candidate_cases(*((7, 172) if small else (4096, 4096)), device, small)
    if not small:
        yield from candidate_cases(4099, 4100, device, small)


def integer_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """Integer weights of 4 and 8 bits: dequantized, and multiplied with few and many rows."""
    grids = [(0, True), (128, False), (16, True), (48, False)]
    for field in (4, 8):
        for group, zero in grids[:2] if small else grids:
            if group > k or (n * k > 1 << 25 and group not in (0, 128)):
                continue
            w = int_weight(n, k, group, field, device, zero)
            label = f"{n}x{k} w{field} group {group}{' asymmetric' if zero else ''}"
            yield from weight_only_cases(w, label, small)


def block_float_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """Block floats, likewise."""
    for kind in ("mxfp4", "nvfp4", "mxfp8"):
        if k and n * k <= 1 << 25:
            yield from weight_only_cases(block_weight(n, k, kind, device), f"{n}x{k} {kind}", small)
    if k:
        for name in ("MXFP4", "NVFP4", "MXFP8"):
            yield round_case(name, 3 if small else 300, k, device)
            if device == "cpu" or torch.cuda.get_device_capability()[0] == 10:
                for m in (3,) if small else (65, 1024):
                    yield scaled_case(n, k, m, name, device)


def codebook_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """Row codebooks and GGUF's types, likewise."""
    if n * k <= 1 << 25:
        for group in (0,) if small else (0, 128):
            w = codebook_weight(n, k, group, device)
            yield from weight_only_cases(w, f"{n}x{k} codebook group {group}", small)
        yield outliers_case(n, k, 3 if small else 16, device)
        whole = k - k % BLOCK
        for kind in ("q4_k", "q6_k") if whole else ():
            yield from weight_only_cases(k_quant_weight(n, whole, kind, device), f"{n}x{whole} {kind}", small)


def outliers_case(n: int, k: int, rows: int, device: str) -> Case:
    """A product with outliers in every seventh column."""
    import triton_references as references

    from runtime.kernels.triton.matvec import add_outliers

    w, x = codebook_weight(n, k, 0, device), torch.randn(rows, k, device=device).bfloat16()
    places = torch.arange(0, k, 7, device=device).expand(n, -1).contiguous()
    values, dense = torch.randn(places.shape, device=device).bfloat16(), references.dequantize(w, torch.float64)
    held = torch.randint(-9, 10, (n,), dtype=torch.int8, device=device)  # stands in these places
    rest = dense.scatter(1, places, (held * w.scale[0].double())[:, None].expand(places.shape))
    y = (x.double() @ rest.t()).bfloat16()
    expected = x.double() @ dense.scatter(1, places, values.double()).t()
    run = partial(add_outliers, y, x, w, held, places.to(torch.int16), values)
    return Case(f"outliers, {n}x{k} rows {rows}", run, expected, 8e-3)


def scaled_case(n: int, k: int, rows: int, name: str, device: str) -> Case:
    """Block floats of both sides, multiplied under their scales."""
    import triton_references as references

    from runtime.formats.presets import preset
    from runtime.kernels.activations import fake_quantize
    from runtime.kernels.triton import block_float

    scheme, x = preset(name).activations, torch.randn(rows, k, device=device).bfloat16()
    assert scheme is not None
    w, global_scale = block_weight(n, k, name.lower(), device), torch.tensor([900.0], device=device)
    wide = fake_quantize(x, scheme, {"input_global_scale": global_scale})

    def run() -> torch.Tensor:
        own = global_scale if name == "NVFP4" else None
        return block_float.product(*block_float.quantize(x, scheme, own), own, w, torch.bfloat16)

    return Case(f"block floats, {n}x{k} {name} rows {rows}", run, references.linear(wide, w), 5e-3)


def round_case(name: str, rows: int, k: int, device: str) -> Case:
    """Inputs rounded to block floats, bit for bit as torch rounds them."""
    from runtime.formats.presets import preset
    from runtime.kernels.activations import fake_quantize
    from runtime.kernels.triton.block_float import round_inputs

    scheme, x = preset(name).activations, torch.randn(rows, k, device=device).bfloat16()
    assert scheme is not None
    global_scale = torch.tensor([900.0], device=device) if name == "NVFP4" else None
    expected = fake_quantize(x, scheme, {} if global_scale is None else {"input_global_scale": global_scale})
    return Case(
        f"round inputs, {rows}x{k} {name}", partial(round_inputs, x, scheme, global_scale), expected.double(), 0.0
    )


def weight_only_cases(w: Any, label: str, small: bool) -> Iterator[Case]:
    """A weight dequantized, and multiplied with few and many rows."""
    import triton_references as references

    from runtime.kernels.triton import matmul, matvec

    (n, k), device = w.shape, w.words.device
    dense = references.dequantize(w, torch.bfloat16)
    yield Case(f"dequantize, {label}", partial(matmul.dequantize, w, torch.bfloat16), dense.double(), 0.0)
    dense = references.dequantize(w, torch.float64).t()
    for function, counts in ((matvec.matvec, (1, 2)), (matmul.matmul, (3, 16)), (matmul.matmul, (33, 65, 300, 1024))):
        for m in counts[:1] if small else counts:
            x = torch.randn(m, k, device=device).bfloat16()
            bias = torch.randn(n, device=device).bfloat16()
            expected = x.double() @ dense + bias.double()
            yield Case(f"{function.__name__}, {label} rows {m}", partial(function, x, w, bias), expected, 5e-3)
    half = dataclasses.replace(w, scale=w.scale.half()) if w.scale.is_floating_point() else w
    if half.scale.dtype != torch.uint8:  # e8m0 has a wider range than float16
        dense = references.dequantize(half, torch.float16)
        name = f"dequantize, {label} float16"
        yield Case(name, partial(matmul.dequantize, half, torch.float16), dense.double(), 0.0)
        dense = references.dequantize(half, torch.float64).t()
        for m in (16,) if small else (16, 300):
            x = torch.randn(m, k, device=device).half()
            yield Case(f"matmul, {label} float16 rows {m}", partial(matmul.matmul, x, half), x.double() @ dense, 5e-3)


def candidate_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """Every launch that tuning may choose for one shape; in the interpreter the defaults alone."""
    import triton_references as references

    from runtime.kernels.triton import matmul, matvec, rounded, semi_structured, sparse24_w4, w8a8

    first = 1 if small else None
    w, sparse = int_weight(n, k, 128, 4, device), sparse_weight(n, k, 128, device)
    dense = references.dequantize(w, torch.float64).t()
    for module, counts in ((matvec, (1, 2)), (matmul, (16,)), (matmul, (64, 200, 1024))):
        function = getattr(module, module.__name__.rpartition(".")[2])
        for m in counts[:1] if small else counts:
            x = torch.randn(m, k, device=device).bfloat16()
            for c in module.configurations(m, w)[:first]:
                name = f"{function.__name__}, {n}x{k} rows {m} {c}"
                yield Case(name, partial(function, x, w), x.double() @ dense, 5e-3, c)
    if not small and n % 32 == 0 and k % 64 == 0:  # 2:4 for many rows, on sparse tensor cores
        halved = sparse24_w4.dequantize(sparse, torch.bfloat16)
        for m in (300, 1024):
            x = torch.randn(m, k, device=device).bfloat16()
            expected = x.double() @ halved.double().t()
            yield Case(f"semi_structured, {n}x{k} rows {m}", partial(semi_structured.linear, x, halved), expected, 5e-3)
    x = torch.randn(1, k, device=device).bfloat16()
    expected = references.linear(x, sparse)
    for c in sparse24_w4.configurations(sparse)[:first]:
        yield Case(f"sparse24, {n}x{k} {c}", partial(sparse24_w4.linear, x, sparse), expected, 8e-3, c)
    for float8 in float8s(device):
        for m in (3,) if small else (16, 65, 1024):
            case = w8a8_case(n, k, m, float8, device)
            for c in w8a8.configurations(m, (n, k))[:first]:
                yield case._replace(name=f"{case.name} {c}", config=c)
    for m in (3,) if small else (16, 65, 1024):
        case = rounded_case(n, k, m, 128, 0, device)
        for c in rounded.configurations(m, w)[:first]:
            yield case._replace(name=f"{case.name} {c}", config=c)


def float8s(device: str) -> tuple[bool, ...]:
    """The 8-bit kinds that the device computes: integers, and floats or not."""
    return (False, True) if device == "cpu" or torch.cuda.get_device_capability() >= (8, 9) else (False,)


def w8a8_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """Products of 8-bit codes of weights and activations."""
    for float8 in float8s(device):
        for m in (3,) if small else (1, 16, 65, 1024):
            yield w8a8_case(n, k, m, float8, device)


def w8a8_case(n: int, k: int, rows: int, float8: bool, device: str) -> Case:
    """One of them, with quantized activations."""
    import triton_references as references

    from runtime.kernels.triton import w8a8

    weight, w_scale = codes8((n, k), float8, device), (torch.rand(n, device=device) * 0.01).bfloat16()
    codes, scale, _ = w8a8.quantize(torch.randn(rows, k, device=device).bfloat16(), float8)
    run = partial(w8a8.product, codes, scale, weight, w_scale, torch.bfloat16)
    name = f"w8a8, {n}x{k} {'float8' if float8 else 'int8'} rows {rows}"
    return Case(name, run, references.w8a8(codes, scale, weight, w_scale), 5e-3)


def rounded_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """4-bit weights times inputs of few bits, with a scale a token or a group."""
    for group, x_group in ((128, 0), (0, 0), (128, 128), (64, 32)):
        if group <= k and (not x_group or k % x_group == 0):
            for m in (3,) if small else (1, 16, 65, 1024):
                yield rounded_case(n, k, m, group, x_group, device)


def rounded_case(n: int, k: int, rows: int, group: int, x_group: int, device: str) -> Case:
    """One of them."""
    import triton_references as references

    from runtime.kernels.triton import rounded, w8a8

    w, x = int_weight(n, k, group, 4, device), torch.randn(rows, k, device=device).bfloat16()
    if x_group:
        codes, scale = w8a8.quantize_groups(x, False, x_group, 4)
    else:
        codes, of_tokens, _ = w8a8.quantize(x, False, 4)
        scale = of_tokens[:, None]
    wide = codes.double() * scale.double().repeat_interleave(x_group or k, 1)
    run = partial(rounded.product, codes, scale, w, x_group, torch.bfloat16)
    name = f"rounded, {n}x{k} group {group} inputs {x_group or 'tokens'} rows {rows}"
    return Case(name, run, references.linear(wide, w), 5e-3)


def sparse_cases(n: int, k: int, device: str, small: bool) -> Iterator[Case]:
    """2:4 weights of 4 bits."""
    import triton_references as references

    from runtime.kernels.triton import sparse24_w4

    for group in (0, 128) if k >= 128 else (0,):
        s = sparse_weight(n, k, group, device)
        for m in (1,) if small else (1, 3, 32):
            x = torch.randn(m, k, device=device).bfloat16()
            name = f"sparse24, {n}x{k} group {group} rows {m}"
            yield Case(name, partial(sparse24_w4.linear, x, s), references.linear(x, s), 8e-3)


def fused_cases(device: str, small: bool) -> Iterator[Case]:
    """Norms and activations."""
    from runtime.engines.cuda import ops
    from runtime.kernels.triton import fused

    for tokens, size in ((3, 100),) if small else ((1, 4096), (7, 100), (513, 4096)):
        x, residual, w = (torch.randn(s, device=device).bfloat16() for s in ((tokens, size), (tokens, size), (size,)))
        expected = ops.rms_norm(x.double(), w.double(), 1e-5, residual.double())[0]
        norm = partial(fused.rms_norm, x, w, 1e-5, residual)
        yield Case(f"rms_norm, {tokens}x{size}", lambda norm=norm: norm()[0], expected, 8e-3)
        yield Case(f"swiglu, {tokens}x{size}", partial(fused.swiglu, x), ops.swiglu([x.double()]), 8e-3)
