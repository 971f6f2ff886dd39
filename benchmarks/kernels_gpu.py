"""Triton kernels on a GPU: right first, then how fast, against the copy bandwidth and the peers of the same run.

    python benchmarks/kernels_gpu.py [--output benchmarks/results/kernels_gpu.json]     everything
    python benchmarks/kernels_gpu.py --check                                             correctness only
    python benchmarks/kernels_gpu.py --interpret                                         the same on small shapes, without a GPU
    python benchmarks/kernels_gpu.py --compile-only                                      registers and spills, without a GPU

Prints one JSON object on stdout (progress on stderr): machine, versions, every figure, and each aim with whether it was met. Times
are medians of CUDA-event timings; every launch reads another copy of the weight, together more than twice the L2 cache, so nothing
is served from it (the fused operations reuse theirs, as a decode step does). All are replayed from a CUDA graph, as a decode loop
would, else the launch overhead is what is timed.
Shapes are Llama-3-8B's. Exit 1 when a check fails (nothing is timed then).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch  # noqa: E402

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FLOAT8 = torch.float8_e4m3fn
Results = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- inputs


def int_weight(n: int, k: int, group: int, field: int, device: str, zero: bool = False, seed: int = 0) -> Any:
    from runtime.kernels.triton import layout

    generator = torch.Generator(device).manual_seed(seed)
    low, groups = -(1 << field - 1), -(-k // group) if group else 1
    codes = torch.randint(low, -low, (n, k), dtype=torch.int8, device=device, generator=generator)
    scale = ((torch.rand(n, groups, device=device, generator=generator) - 0.4) * 0.02).bfloat16()
    zeros = (
        torch.randint(low, -low, (n, groups), dtype=torch.int8, device=device, generator=generator) if zero else None
    )
    return layout.reorder(codes, scale, zeros, group, field)


def sparse_weight(n: int, k: int, group: int, device: str, seed: int = 0) -> Any:
    from runtime.kernels.triton import sparse24_w4

    generator = torch.Generator(device).manual_seed(seed)
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device=device)
    chosen = pairs[torch.randint(0, 6, (n, k // 4), device=device, generator=generator)]
    codes = torch.randint(-8, 8, (n, k // 2), dtype=torch.int8, device=device, generator=generator)
    scale = (
        (torch.rand(n, -(-k // group) if group else 1, device=device, generator=generator) - 0.4) * 0.02
    ).bfloat16()
    return sparse24_w4.prepare(codes, chosen[..., 0], chosen[..., 1], scale, None, k, group)


def codes8(shape: tuple[int, int], float8: bool, device: str) -> torch.Tensor:
    if float8:
        return (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(FLOAT8)
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)


# --- correctness


def check(device: str, small: bool) -> Results:
    """Every kernel against its float64 reference; also that a second call gives the same bits."""
    from runtime.kernels.triton import few_rows, fused, layout, many_rows, matvec, semi_structured, sparse24_w4, w8a8

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
                dense = layout.dequantize(w, torch.bfloat16)
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
                        expected = x.double() @ layout.dequantize(w, torch.float64).t() + bias.double()
                        compare(f"{function.__name__} {label} rows {m}", run, expected, 5e-3)
        # Every launch that tuning may choose; in the interpreter the defaults, at one shape.
        if k == 172 if small else k in (4096, 4100) and 4096 <= n < 5000:
            w, sparse = int_weight(n, k, 128, 4, device), sparse_weight(n, k, 128, device)
            dense = layout.dequantize(w, torch.float64).t()
            for module, counts in ((matvec, (1, 2)), (few_rows, (16, 64)), (many_rows, (64, 200, 1024))):
                function = getattr(module, module.__name__.rpartition(".")[2])
                for m in counts[:1] if small else counts:
                    x = torch.randn(m, k, device=device).bfloat16()
                    for c in module.configurations(m, w)[: 1 if small else None]:
                        run = lambda f=function, x=x, w=w, c=c: f(x, w, None, c)  # noqa: E731
                        compare(f"{function.__name__} {n}x{k} rows {m} {c}", run, x.double() @ dense, 5e-3)
            if not small and n % 32 == 0 and k % 64 == 0:  # 2:4 for many rows, on sparse tensor cores
                halved = sparse24_w4.dequantize(sparse, torch.bfloat16)
                for m in (300, 1024):
                    x = torch.randn(m, k, device=device).bfloat16()
                    run = lambda x=x, w=halved: semi_structured.linear(x, w)  # noqa: E731
                    compare(f"semi_structured {n}x{k} rows {m}", run, x.double() @ halved.double().t(), 5e-3)
            x = torch.randn(1, k, device=device).bfloat16()
            for c in sparse24_w4.configurations(sparse)[: 1 if small else None]:
                run = lambda x=x, s=sparse, c=c: sparse24_w4.linear(x, s, None, c)  # noqa: E731
                compare(f"sparse24 {n}x{k} {c}", run, sparse24_w4.reference(x, sparse), 8e-3)
        float8s = (False, True) if small or torch.cuda.get_device_capability() >= (8, 9) else (False,)
        for float8 in float8s:
            w8, w_scale = codes8((n, k), float8, device), (torch.rand(n, device=device) * 0.01).bfloat16()
            for m in (3,) if small else (1, 16, 65, 1024):
                codes, scale, _ = w8a8.quantize(torch.randn(m, k, device=device).bfloat16(), float8)
                run = lambda c=codes, s=scale, w=w8, ws=w_scale: w8a8.product(c, s, w, ws, torch.bfloat16)  # noqa: E731
                expected = w8a8.reference(codes, scale, w8, w_scale)
                label = f"{n}x{k} {'float8' if float8 else 'int8'} rows {m}"
                compare(f"w8a8 {label}", run, expected, 5e-3)
                for c in w8a8.configurations(m, (n, k)) if (n, k) == (4096, 4096) else ():
                    run = partial(w8a8.product, codes, scale, w8, w_scale, torch.bfloat16, config=c)
                    compare(f"w8a8 {label} {c}", run, expected, 5e-3)
        if k % 4 == 0:
            for group in (0, 128) if k >= 128 else (0,):
                s = sparse_weight(n, k, group, device)
                for m in (1,) if small else (1, 3, 32):
                    x = torch.randn(m, k, device=device).bfloat16()
                    run = lambda x=x, s=s: sparse24_w4.linear(x, s)  # noqa: E731
                    compare(f"sparse24 {n}x{k} group {group} rows {m}", run, sparse24_w4.reference(x, s), 8e-3)
    for tokens, size in ((3, 100),) if small else ((1, 4096), (7, 100), (513, 4096)):
        x, residual, w = (torch.randn(s, device=device).bfloat16() for s in ((tokens, size), (tokens, size), (size,)))
        expected = fused.rms_norm_reference(x.double(), w.double(), 1e-5, residual.double())[0]
        compare(
            f"rms_norm {tokens}x{size}", lambda x=x, w=w, r=residual: fused.rms_norm(x, w, 1e-5, r)[0], expected, 8e-3
        )
        compare(f"swiglu {tokens}x{size}", lambda x=x: fused.swiglu(x), fused.swiglu_reference(x.double()), 8e-3)
        q, key = (
            torch.randn(tokens, 4, 64, device=device).bfloat16(),
            torch.randn(tokens, 2, 64, device=device).bfloat16(),
        )
        cos, sin = torch.randn(tokens, 64, device=device).bfloat16(), torch.randn(tokens, 64, device=device).bfloat16()
        turned = fused.rotary_reference(q.double(), key.double(), cos.double(), sin.double())[0]
        run = lambda q=q, k=key, c=cos, s=sin: fused.rotary(q.clone(), k.clone(), c, s)[0]  # noqa: E731
        compare(f"rotary {tokens}", run, turned, 8e-3)
    return {"passed": passed, "failed": failed, "worst_relative_error": worst}


# --- time


def seconds(calls: list[Callable[[], Any]], repeats: int = 15) -> float:
    """Median seconds of one call; `calls` are the same work on different buffers, replayed from one CUDA graph if it captures."""
    for call in calls:
        call()  # compiles and tunes
    torch.cuda.synchronize()

    def every() -> None:
        for call in calls:
            call()

    replay: Callable[[], Any] = every
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every()
        replay = graph.replay
    except RuntimeError as error:
        say(f"  not captured, launch overhead included: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times[2:])[repeats // 2]


def copies(size: int) -> int:
    """How many buffers of so many bytes exceed twice the L2 cache, at most 64."""
    return max(2, min(64, -(-2 * torch.cuda.get_device_properties(0).L2_cache_size // size) + 1))


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds([lambda: target.copy_(source)] * 2)


def attempt(figures: Results, name: str, measure: Callable[[], float]) -> None:
    try:
        figures[name] = measure()
    except Exception as error:
        figures[name] = None
        figures[f"{name}_skipped"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        torch.cuda.synchronize()


def tinygemm(n: int, k: int, x: torch.Tensor, count: int) -> float:
    scales = torch.full((k // 128, n, 2), 0.01, dtype=torch.bfloat16, device="cuda")
    packed = [
        torch.ops.aten._convert_weight_to_int4pack(
            torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda"), 8
        )
        for _ in range(count)
    ]
    return seconds([lambda p=p: torch.ops.aten._weight_int4pack_mm(x, p, 128, scales) for p in packed])


def gemlite(n: int, k: int, x: torch.Tensor, count: int) -> float:
    core = importlib.import_module("gemlite.core")
    calls = []
    for _ in range(count):
        dtypes = {"input_dtype": core.DType.BF16, "output_dtype": core.DType.BF16}
        layer = core.GemLiteLinear(4, group_size=128, in_features=k, out_features=n, **dtypes)
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        grid = torch.full((n * k // 128, 1), 0.01, dtype=torch.bfloat16, device="cuda")
        layer.pack(codes, grid, torch.full_like(grid, 8), None)
        calls.append(lambda layer=layer: layer(x))
    return seconds(calls)


def marlin(n: int, k: int, x: torch.Tensor, count: int) -> float:
    package = importlib.import_module("marlin")
    half, calls = x.half(), []
    for _ in range(count):
        b = torch.randint(-(2**31), 2**31 - 1, (k // 16, n * 2), dtype=torch.int32, device="cuda")
        s, c = (
            torch.full((k // 128, n), 0.01, dtype=torch.half, device="cuda"),
            torch.empty(x.shape[0], n, dtype=torch.half, device="cuda"),
        )
        work = torch.zeros(n // 128 * 16, dtype=torch.int32, device="cuda")
        calls.append(lambda b=b, s=s, c=c, work=work: package.mul(half, b, c, s, work))
    return seconds(calls)


def measure_linear(bandwidth: float, rows_list: list[int]) -> list[Results]:
    """Each layer at each row count: ours, cuBLAS bf16, peers; seconds, and our share of the copy bandwidth."""
    from runtime.kernels.triton import sparse24_w4, w4a16, w8a8

    out = []
    for layer, (n, k) in LAYERS.items():
        for rows in rows_list:
            say(f"{layer} {n}x{k} rows {rows}")
            x = torch.randn(rows, k, device="cuda").bfloat16()
            row: Results = {"layer": layer, "shape": [n, k], "rows": rows}
            count = copies(n * k // 2)
            weights = [int_weight(n, k, 128, 4, "cuda", seed=i) for i in range(min(count, 8))]
            weights += [  # the same codes elsewhere in memory
                type(w)(w.words.clone(), w.scale.clone(), None, w.shape, w.group, w.field)
                for w in (weights * 8)[: count - len(weights)]
            ]
            attempt(row, "w4a16", lambda x=x, ws=weights: seconds([lambda w=w: w4a16.linear(x, w) for w in ws]))
            moved = weights[0].bytes + 2 * rows * (n + k)
            if row["w4a16"]:
                row["w4a16_share_of_copy_bandwidth"] = moved / row["w4a16"] / bandwidth
            if layer in ("o", "down") and rows <= 16:
                eights = [int_weight(n, k, 0, 8, "cuda", seed=i) for i in range(min(8, copies(n * k)))]
                attempt(row, "w8a16", lambda x=x, ws=eights: seconds([lambda w=w: w4a16.linear(x, w) for w in ws]))
                if row["w8a16"]:
                    row["w8a16_share_of_copy_bandwidth"] = (
                        (eights[0].bytes + 2 * rows * (n + k)) / row["w8a16"] / bandwidth
                    )
            if rows <= 4 or rows > 256:
                sparse = [sparse_weight(n, k, 128, "cuda", seed=i) for i in range(min(24, copies(n * k * 3 // 8)))]
                attempt(
                    row,
                    "sparse24_w4",
                    lambda x=x, ws=sparse: seconds([lambda w=w: sparse24_w4.linear(x, w) for w in ws]),
                )
                if row["sparse24_w4"]:
                    row["sparse24_w4_share_of_copy_bandwidth"] = sparse[0].bytes / row["sparse24_w4"] / bandwidth
            dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(min(8, copies(2 * n * k)))]
            attempt(
                row, "bf16", lambda x=x, ws=dense: seconds([lambda w=w: torch.nn.functional.linear(x, w) for w in ws])
            )
            for peer in (tinygemm, gemlite, marlin):
                attempt(row, peer.__name__, lambda p=peer, n=n, k=k, x=x, c=count: p(n, k, x, min(c, 16)))
            for kind, float8 in (("int8", False), ("float8", True)):
                ws = [codes8((n, k), float8, "cuda") for _ in range(min(8, copies(n * k)))]
                scale = torch.full((n,), 0.01, dtype=torch.bfloat16, device="cuda")

                def product(
                    w: torch.Tensor, x: torch.Tensor = x, float8: bool = float8, scale: torch.Tensor = scale
                ) -> Any:
                    codes, s, _ = w8a8.quantize(x, float8)  # quantizing the input is part of the price
                    return w8a8.product(codes, s, w, scale, torch.bfloat16)

                attempt(row, f"w8a8_{kind}", lambda ws=ws, f=product: seconds([lambda w=w: f(w) for w in ws]))
            if rows >= 64:
                attempt(row, "bf16_2:4", lambda x=x, w=dense[0]: semi_structured_product(x, w))
            out.append(row)
            del weights, dense
    return out


def semi_structured_product(x: torch.Tensor, w: torch.Tensor) -> float:
    """The product alone of 2:4 through torch's semi-structured tensors; `sparse24_w4` of so many rows also dequantizes and
    compresses at each call, if that was measured to pay.
    """
    from torch.sparse import to_sparse_semi_structured

    keep = w.view(-1, 4).abs().argsort(-1).argsort(-1) >= 2
    sparse = [to_sparse_semi_structured(w * keep.view_as(w)) for _ in range(2)]
    return seconds([lambda s=s: torch.nn.functional.linear(x, s) for s in sparse])


def measure_fused(bandwidth: float) -> list[Results]:
    from runtime.kernels.triton import fused

    out = []
    for tokens in (1, 16, 2048):
        say(f"fused, {tokens} tokens")
        x, residual = torch.randn(2, tokens, 4096, device="cuda").bfloat16()
        w, both = torch.ones(4096, device="cuda").bfloat16(), torch.randn(tokens, 28672, device="cuda").bfloat16()
        q, k = (
            torch.randn(tokens, 32, 128, device="cuda").bfloat16(),
            torch.randn(tokens, 8, 128, device="cuda").bfloat16(),
        )
        cos, sin = torch.randn(2, tokens, 128, device="cuda").bfloat16()
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
            "rms_norm": (
                lambda x=x, w=w, r=residual: fused.rms_norm(x, w, 1e-5, r),
                lambda x=x, w=w, r=residual: fused.rms_norm_reference(x, w, 1e-5, r),
                8 * x.numel(),
            ),
            "swiglu": (lambda b=both: fused.swiglu(b), lambda b=both: fused.swiglu_reference(b), 3 * both.numel()),
            "rotary": (
                lambda q=q, k=k, c=cos, s=sin: fused.rotary(q, k, c, s),
                lambda q=q, k=k, c=cos, s=sin: fused.rotary_reference(q, k, c, s),
                4 * (q.numel() + k.numel()),
            ),
        }
        for name, (ours, theirs, moved) in pairs.items():
            row: Results = {"operation": name, "tokens": tokens}
            attempt(row, "ours", lambda f=ours: seconds([f] * 8))
            attempt(row, "torch", lambda f=theirs: seconds([f] * 8))
            if row["ours"]:
                row["share_of_copy_bandwidth"] = moved / row["ours"] / bandwidth
            out.append(row)
    return out


# --- the aims


def aims(linear: list[Results]) -> list[Results]:
    """What was asked for, the least favourable figure over the layers, and whether it was met (None: not measured)."""

    def of(rows: Callable[[int], bool], value: Callable[[Results], float | None]) -> list[float]:
        found = (value(r) for r in linear if rows(r["rows"]))
        return [v for v in found if v is not None]

    def ratio(ours: str) -> Callable[[Results], float | None]:
        return lambda r: r["bf16"] / r[ours] if r.get("bf16") and r.get(ours) else None

    def against_dense(r: Results) -> float | None:
        return r["w4a16"] / r["sparse24_w4"] if r.get("w4a16") and r.get("sparse24_w4") else None

    wanted = [
        (
            "w4a16 at 1 row, share of the copy bandwidth",
            0.8,
            of(lambda m: m == 1, lambda r: r.get("w4a16_share_of_copy_bandwidth")),
        ),
        ("w4a16 at 16 rows, times cuBLAS bf16", 3.0, of(lambda m: m == 16, ratio("w4a16"))),
        ("w4a16 at 64 rows, times cuBLAS bf16", 1.5, of(lambda m: m == 64, ratio("w4a16"))),
        ("w4a16 at 1024 rows and more, times cuBLAS bf16", 0.9, of(lambda m: m >= 1024, ratio("w4a16"))),
        ("w8a8 int8 at 1024 rows and more, times cuBLAS bf16", 1.5, of(lambda m: m >= 1024, ratio("w8a8_int8"))),
        ("w8a8 float8 at 1024 rows and more, times cuBLAS bf16", 1.5, of(lambda m: m >= 1024, ratio("w8a8_float8"))),
        ("2:4 + w4 at 1 row, times dense w4a16", 1.0, of(lambda m: m == 1, against_dense)),
    ]
    return [
        {"aim": name, "at_least": least, "worst": min(found) if found else None, "best": max(found) if found else None,
         "met": min(found) >= least if found else None}
        for name, least, found in wanted
    ]  # fmt: skip


def registers() -> Results:
    """Registers, spills and shared memory of every hot kernel for each architecture, without a GPU."""
    from runtime.kernels.triton import compiled

    table: Results = {}
    for name, (call, least) in compiled.hot_launches().items():
        for capability in (80, 90, 100):
            if capability >= least:
                say(f"sm_{capability} {name}")
                for kernel, used in compiled.report(name, call, capability).items():
                    table.setdefault(kernel, {})[f"sm_{capability}"] = used
    return {"versions": versions(), "kernels": table}


def versions() -> dict[str, str]:
    import triton

    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument(
        "--interpret", action="store_true", help="correctness on small shapes in triton's interpreter, no GPU"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="registers and spills for sm_80, sm_90, sm_100, no GPU"
    )
    parser.add_argument("--untuned", action="store_true", help="default launch configurations, nothing is autotuned")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096])
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    result: Results
    if options.compile_only:
        result = registers()
    else:
        from runtime.kernels.triton import tuning

        if options.interpret:
            from runtime.kernels.triton.interpreter import repair

            repair()
        elif not torch.cuda.is_available():
            say("there is no GPU here: --interpret and --compile-only work without one")
            return 2
        torch.manual_seed(0)
        device = "cpu" if options.interpret else "cuda"
        name = platform.machine() if options.interpret else torch.cuda.get_device_name()
        result = {
            "machine": name,
            "versions": versions(),
            "interpreted": options.interpret,
            "tuned": not options.untuned,
        }
        say("checking")
        tuning.enabled = False  # odd shapes are not worth tuning; every candidate is checked on some
        result["checks"] = check(device, small=options.interpret)
        tuning.enabled = not options.untuned
        linear: list[Results] = []
        if not options.interpret and not options.check and not result["checks"]["failed"]:
            bandwidth = copy_bandwidth()
            result["copy_bandwidth"] = bandwidth
            linear = measure_linear(bandwidth, options.rows)
            result |= {"linear": linear, "fused": measure_fused(bandwidth)}
        result["aims"] = aims(linear)
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 1 if result.get("checks", {}).get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
