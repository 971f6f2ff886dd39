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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch  # noqa: E402
from kernels_gpu_check import Results, check, codes8, int_weight, sparse_weight  # noqa: E402

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def weight_bytes(weight: Any) -> int:
    """Bytes that a product with this weight must read."""
    return sum(part.nbytes for part in vars(weight).values() if isinstance(part, torch.Tensor))


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
    from runtime.kernels.triton import linear, sparse24_w4, w8a8

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
            attempt(row, "w4a16", lambda x=x, ws=weights: seconds([lambda w=w: linear.multiply(x, w) for w in ws]))
            moved = weight_bytes(weights[0]) + 2 * rows * (n + k)
            if row["w4a16"]:
                row["w4a16_share_of_copy_bandwidth"] = moved / row["w4a16"] / bandwidth
            if layer in ("o", "down") and rows <= 16:
                eights = [int_weight(n, k, 0, 8, "cuda", seed=i) for i in range(min(8, copies(n * k)))]
                attempt(row, "w8a16", lambda x=x, ws=eights: seconds([lambda w=w: linear.multiply(x, w) for w in ws]))
                if row["w8a16"]:
                    row["w8a16_share_of_copy_bandwidth"] = (
                        (weight_bytes(eights[0]) + 2 * rows * (n + k)) / row["w8a16"] / bandwidth
                    )
            if rows <= 4 or rows > 256:
                sparse = [sparse_weight(n, k, 128, "cuda", seed=i) for i in range(min(24, copies(n * k * 3 // 8)))]
                attempt(
                    row,
                    "sparse24_w4",
                    lambda x=x, ws=sparse: seconds([lambda w=w: sparse24_w4.linear(x, w) for w in ws]),
                )
                if row["sparse24_w4"]:
                    row["sparse24_w4_share_of_copy_bandwidth"] = (
                        weight_bytes(sparse[0]) / row["sparse24_w4"] / bandwidth
                    )
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
    from runtime.engines.cuda import ops
    from runtime.kernels.triton import fused

    out = []
    for tokens in (1, 16, 2048):
        say(f"fused, {tokens} tokens")
        x, residual = torch.randn(2, tokens, 4096, device="cuda").bfloat16()
        w, both = torch.ones(4096, device="cuda").bfloat16(), torch.randn(tokens, 28672, device="cuda").bfloat16()
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
            "rms_norm": (
                lambda x=x, w=w, r=residual: fused.rms_norm(x, w, 1e-5, r),
                lambda x=x, w=w, r=residual: ops.rms_norm(x, w, 1e-5, r),
                8 * x.numel(),
            ),
            "swiglu": (lambda b=both: fused.swiglu(b), lambda b=both: ops.swiglu([b]), 3 * both.numel()),
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
    import gpu_launches

    table: Results = {}
    for name, (call, least) in gpu_launches.hot_launches().items():
        for capability in (80, 90, 100):
            if capability >= least:
                say(f"sm_{capability} {name}")
                for kernel, used in gpu_launches.report(name, call, capability).items():
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
            from triton_interpreter import repair

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
