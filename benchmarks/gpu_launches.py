"""Kernels compiled for a GPU that is not here, and what the compiler says of them: registers, spills, shared memory.

    python benchmarks/gpu_launches.py [--output benchmarks/results/triton_registers.json]     sm_80, sm_90 and sm_100, without a GPU

The wrappers are called with meta tensors while every launch is recorded instead of run, so what is compiled is what a GPU
would get: same constants, same specialization of arguments. The tests use the functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from export.triton_aot.worker import compile_variant, resources
from runtime.kernels.triton import gpu, signature
from runtime.kernels.triton.jit import Launch, recording

if TYPE_CHECKING:
    from runtime.kv_cache.storage.base import Codec


def record(call: Callable[[], Any], capability: int = 90) -> list[Launch]:
    """The launches that `call` makes on a device of compute capability 80, 90 or 100; none of them is run."""
    with gpu.assuming(capability), recording() as found:
        call()
    return found


def build(launch: Launch, capability: int) -> Any:
    """One launch compiled for compute capability `capability` (80, 90, 100): triton's compiled kernel, `.asm` and all."""
    return compile_variant(signature.of(launch), capability)


def hot_launches() -> dict[str, tuple[Callable[[], Any], int]]:
    """{name: (call with meta tensors, least compute capability)}: every kernel at its default for shapes of an 8B Llama."""
    from runtime.formats.presets import preset
    from runtime.kernels.triton import (
        block_float,
        float8_block,
        fused,
        layout,
        linear,
        matmul,
        matvec,
        rounded,
        sparse24_w4,
        w8a8,
    )

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    n, k, tiles = 4096, 4096, 16

    def weight(field: int, group: int = 128, zero: bool = False) -> layout.Weight:
        words = meta(k // layout.tile_columns(field), n, layout.WIDTH, dtype=torch.int32)
        groups = k // group if group else 1
        return layout.Weight(
            words, meta(groups, n), meta(groups, n, dtype=torch.int8) if zero else None, (n, k), group, field
        )

    def half(weight: layout.Weight) -> layout.Weight:
        return dataclasses.replace(weight, scale=weight.scale.half())

    def blocks(kind: str) -> layout.Weight:
        """Block floats: `mxfp4`, `mxfp8` or `nvfp4`."""
        field, group, nv = int(kind[-1]), 16 if kind == "nvfp4" else 32, kind == "nvfp4"
        words = meta(k // layout.tile_columns(field), n, layout.WIDTH, dtype=torch.int32)
        scale, global_scale = meta(k // group, n, dtype=torch.int8 if nv else torch.uint8), meta(1, dtype=torch.float32)
        return layout.Weight(
            words, scale, None, (n, k), group, field, codes="float", global_scale=global_scale if nv else None
        )

    def codebook(kind: str) -> layout.Weight:
        """A row codebook, or a k-quant: `q4_k`, `q6_k` or `iq4_xs`."""
        if kind == "codebook":
            return dataclasses.replace(weight(4, 0), codes="table", table=meta(4, n, dtype=torch.int32))
        field, group, codes = {"q4_k": (4, 32, "minimum"), "q6_k": (8, 16, "integer"), "iq4_xs": (4, 32, "table")}[kind]
        factors = k // layout.BLOCK * (2 if codes == "minimum" else 1)
        return dataclasses.replace(
            weight(field, group), scale=meta(k // group + factors, n, dtype=torch.int16), codes=codes,
            table=meta(4, n, dtype=torch.int32) if codes == "table" else None,
        )  # fmt: skip

    def outliers_call(rows: int) -> torch.Tensor:
        columns, values, held = meta(n, 20, dtype=torch.int16), meta(n, 20), meta(n, dtype=torch.int8)
        return matvec.add_outliers(meta(rows, n), meta(rows, k), codebook("codebook"), held, columns, values)

    def scaled_call(name: str, rows: int) -> torch.Tensor:
        scheme, global_scale = preset(name).activations, meta(1, dtype=torch.float32) if name == "NVFP4" else None
        codes, scale = block_float.quantize(meta(rows, k), scheme, global_scale)
        return block_float.product(codes, scale, global_scale, blocks(name.lower()), torch.bfloat16)

    def w8a8_call(rows: int, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = meta(rows, k, dtype=dtype), meta(rows, dtype=torch.float32)
        return w8a8.product(codes, scale, meta(n, k, dtype=dtype), meta(n), torch.bfloat16)

    def rounded_call(rows: int, group: int) -> torch.Tensor:
        scale = meta(rows, k // group if group else 1, dtype=torch.float32)
        return rounded.product(meta(rows, k, dtype=torch.int8), scale, weight(4), group, torch.bfloat16)

    def blocks_call(rows: int) -> torch.Tensor:
        codes, scale = meta(rows, k, dtype=w8a8.FLOAT8), meta(rows, k // 128, dtype=torch.float32)
        return float8_block.product(
            codes, scale, meta(n, k, dtype=w8a8.FLOAT8), meta(n // 128, k // 128), 128, torch.bfloat16
        )

    def float8_call(rows: int) -> torch.Tensor:
        codes, scale = meta(rows, k, dtype=w8a8.FLOAT8), meta(rows, 1, dtype=torch.float32)
        return rounded.product(codes, scale, weight(4), 0, torch.bfloat16)

    calls: dict[str, tuple[Callable[[], Any], int]] = {}
    for rows in (1, 2, 16, 64, 512):
        calls[f"w4a16 {rows}"] = (partial(linear.multiply, meta(rows, k), weight(4)), 80)
    for rows in (1, 16, 512):
        calls[f"w4a16 asymmetric {rows}"] = (partial(linear.multiply, meta(rows, k), weight(4, zero=True)), 80)
        calls[f"w8a16 {rows}"] = (partial(linear.multiply, meta(rows, k), weight(8, 0)), 80)
    for rows in (16, 512):
        calls[f"w4a16 float16 {rows}"] = (
            partial(linear.multiply, meta(rows, k, dtype=torch.float16), half(weight(4))),
            80,
        )
    calls["mxfp4 float16 16"] = (partial(linear.multiply, meta(16, k, dtype=torch.float16), blocks("mxfp4")), 80)
    calls["w4a16 group 32, 1"] = (partial(linear.multiply, meta(1, k), weight(4, 32)), 80)
    calls["w4a16 float16 1"] = (partial(linear.multiply, meta(1, k, dtype=torch.float16), weight(4)), 80)
    calls["w4a16 dequantize"] = (partial(matmul.dequantize, weight(4), torch.bfloat16), 80)
    for kind in ("mxfp4", "nvfp4", "mxfp8"):
        for rows in (1, 2, 16, 64, 512):
            calls[f"{kind} {rows}"] = (partial(linear.multiply, meta(rows, k), blocks(kind)), 80)
        calls[f"{kind} dequantize"] = (partial(matmul.dequantize, blocks(kind), torch.bfloat16), 80)
    for kind in ("codebook", "q4_k", "q6_k", "iq4_xs"):
        for rows in (1, 2, 16, 64, 512):
            calls[f"{kind} {rows}"] = (partial(linear.multiply, meta(rows, k), codebook(kind)), 80)
        calls[f"{kind} dequantize"] = (partial(matmul.dequantize, codebook(kind), torch.bfloat16), 80)
    for rows in (1, 16):
        calls[f"outliers {rows}"] = (partial(outliers_call, rows), 80)
    for name in ("NVFP4", "MXFP4", "MXFP8"):
        scheme, global_scale = preset(name).activations, meta(1, dtype=torch.float32) if name == "NVFP4" else None
        calls[f"round {name}"] = (partial(block_float.round_inputs, meta(16, k), scheme, global_scale), 80)
        calls[f"quantize {name}"] = (partial(block_float.quantize, meta(16, k), scheme, global_scale), 80)
        for rows in (65, 512, 4096):
            calls[f"{name} {rows}"] = (partial(scaled_call, name, rows), 100)
    for kind, dtype, least in (("int8", torch.int8, 80), ("float8", w8a8.FLOAT8, 89)):
        calls[f"quantize {kind}"] = (partial(w8a8.quantize, meta(16, k), dtype == w8a8.FLOAT8), least)
        for rows in (16, 512, 4096):
            calls[f"w8a8 {kind} {rows}"] = (partial(w8a8_call, rows, dtype), least)
    for rows in (1, 16, 512, 4096):
        calls[f"w4 rounded {rows}"] = (partial(rounded_call, rows, 0), 80)
        calls[f"w4 rounded, groups {rows}"] = (partial(rounded_call, rows, 128), 80)
        calls[f"w4 float8 {rows}"] = (partial(float8_call, rows), 89)
        calls[f"float8 blocks {rows}"] = (partial(blocks_call, rows), 89)
    calls["quantize groups"] = (partial(w8a8.quantize_groups, meta(16, k), False, 128, 4, 128), 80)
    sparse = sparse24_w4.Sparse24Weight(
        meta(tiles, n, 16, dtype=torch.int32),
        meta(32, n),
        None,
        (n, k),
        128,
        4,
        positions=meta(tiles, n // 2, 16, dtype=torch.int32),
    )
    calls["2:4 w4 1"] = (lambda: sparse24_w4.linear(meta(1, k), sparse), 80)
    calls["2:4 w4 dequantize"] = (lambda: sparse24_w4.dequantize(sparse, torch.bfloat16), 80)
    calls["rms_norm"] = (lambda: fused.rms_norm(meta(8, k), meta(k), 1e-5, meta(8, k)), 80)
    calls["swiglu"] = (lambda: fused.swiglu(meta(8, 28672)), 80)
    return calls | {name: (call, 80) for name, call in (expert_launches() | cache_launches()).items()}


def expert_launches() -> dict[str, Callable[[], Any]]:
    """{name: call with meta tensors}: a layer of experts in the shape of Qwen3-30B-A3B, routing included, for so many tokens."""
    from runtime.kernels.triton import experts, routing
    from runtime.kernels.triton.layout import Stack, tile_columns

    count, hidden, inner, choices = 128, 2048, 768, 8

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def dense(tokens: int, dtype: torch.dtype) -> torch.Tensor:
        chosen, weights = routing.route(meta(tokens, count, dtype=dtype), choices, True)
        gate_up, down = (
            Stack.dense(meta(count, *side, dtype=dtype)) for side in ((2 * inner, hidden), (hidden, inner))
        )
        return experts.experts(meta(tokens, hidden, dtype=dtype), chosen, weights, gate_up, down)

    def stack(n: int, k: int, field: int, group: int, zero: bool) -> Stack:
        words, grids = (
            meta(count, k // tile_columns(field), n, 16, dtype=torch.int32),
            (count, k // group if group else 1, n),
        )
        return Stack(words, meta(*grids), meta(*grids, dtype=torch.int8) if zero else None, (n, k), group, field)

    def layer(tokens: int, field: int, group: int = 128, zero: bool = False) -> torch.Tensor:
        chosen, weights = routing.route(meta(tokens, count), choices, True)
        gate_up, down = (stack(*sides, field, group, zero) for sides in ((2 * inner, hidden), (hidden, inner)))
        return experts.experts(meta(tokens, hidden), chosen, weights, gate_up, down)

    calls: dict[str, Callable[[], Any]] = {}
    for tokens in (1, 16, 512, 1024, 2048):
        calls[f"experts w4 {tokens}"] = partial(layer, tokens, 4)
        calls[f"experts bf16 {tokens}"] = partial(dense, tokens, torch.bfloat16)
    calls["experts fp32"] = partial(dense, 512, torch.float32)
    for tokens in (1, 16, 2048):
        calls[f"experts w4 asymmetric {tokens}"] = partial(layer, tokens, 4, zero=True)
        calls[f"experts w8 {tokens}"] = partial(layer, tokens, 8, 0)
    return calls


def cache_launches() -> dict[str, Callable[[], Any]]:
    """{name: call with meta tensors}: attention over 4096 tokens of 8 key heads in every storage, and over those that a step chooses."""
    from runtime.kv_cache.pages import PAGE
    from runtime.kv_cache.storage.bitmap import Bitmap
    from runtime.kv_cache.storage.fp8 import Float8
    from runtime.kv_cache.storage.integer import Integer
    from runtime.kv_cache.storage.plain import Plain

    storages: dict[str, tuple[Codec, Codec]] = {"plain": (Plain(), Plain()), "fp8": (Float8(), Float8())}
    storages |= {f"int{bits}": (Integer(bits, "channel"), Integer(bits, "token")) for bits in (8, 4, 2)}
    storages |= {"int4 groups": (Integer(4, "token", 32), Integer(4, "token", 32)), "bitmap": (Bitmap(), Bitmap())}
    calls = {f"cache {name}": cache_call(*storages[name]) for name in storages}
    for name in ("plain", "fp8", "int8", "int4", "int2"):
        for kind, unit in (("pages", PAGE), ("tokens", 1)):
            calls[f"cache {name} {kind}"] = cache_call(*storages[name], unit=unit)
    return calls


def cache_call(
    keys: Codec,
    values: Codec,
    sizes: tuple[int, int] = (128, 128),
    queries: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    held: torch.dtype | None = None,
    tokens: int = 4096,
    softcap: float = 0.0,
    bias: bool = False,
    visible: bool = False,
    unit: int = 0,
) -> Callable[[], Any]:
    """Attention over `tokens` tokens of 8 key heads, with meta tensors.

    Args:
        keys: how they are stored.
        values: likewise.
        sizes: channels of a key and of a value.
        queries: of a key head.
        dtype: the model's.
        held: of floats in the cache; None: the model's.
        softcap: of the scores; 0: none.
        bias: tokens have one.
        visible: queries see only the front of a row.
        unit: what a step reads is chosen in pages (PAGE) or tokens (1), 1024 tokens; 0: everything is read.
    """
    from runtime.kv_cache.kernels import triton_attention
    from runtime.kv_cache.pages import PAGE
    from runtime.kv_cache.region import Chosen, Queries, Region

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int64, device="meta")

    rows = 8
    region = Region(rows, sizes, held or dtype, torch.device("meta"), keys, values, bias)
    region.table, region.longest = meta(rows, tokens // PAGE), tokens
    query = torch.empty(rows, queries, sizes[0], dtype=dtype, device="meta")
    limit = meta(rows, queries) if visible else None
    chosen = Chosen(meta(rows, 1024 // unit), meta(rows), unit) if unit else None
    return partial(triton_attention.run, Queries(query, sizes[0] ** -0.5, softcap), region, limit, chosen)


def main_loop(kernel: Any) -> list[str]:
    """`longest_loop` of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return longest_loop(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def longest_loop(sass: str) -> list[str]:
    """Opcodes of the longest loop that has no other inside, in order; ValueError if there is no loop.

    Args:
        sass: what nvdisasm prints.
    """
    names: list[str] = []
    places: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            places[label[1]] = len(names)
        elif found := re.match(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([^\s;]+)(.*)", line.strip()):
            names.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            if target and target[0] in places:
                loops.append((places[target[0]], len(names)))
    inner = [
        one for one in loops if not any(one != other and one[0] <= other[0] < other[1] <= one[1] for other in loops)
    ]
    first, last = max(inner, key=lambda one: one[1] - one[0])
    return names[first:last]


def instructions_a_weight(launch: Launch, kernel: Any) -> float:
    """Of the main loop of a product with a packed weight: its instructions for each of the weights that an iteration takes."""
    given = launch.arguments
    tiles = 2 * given["TILES"] if "TILES" in given else 1  # a matrix-vector product owns two blocks of rows
    weights = given["BLOCK_N"] * tiles * (512 // given["FIELD"])
    return len(main_loop(kernel)) * kernel.metadata.num_warps * 32 / weights


def report(name: str, call: Callable[[], Any], capability: int) -> dict[str, dict[str, Any]]:
    """{"name: kernel": registers, spills, shared memory, number of instructions} of the launches that `call` makes."""
    out = {}
    for launch in record(call, capability):
        kernel = build(launch, capability)
        out[f"{name}: {launch.kernel.__name__}"] = resources(kernel, capability)
    return out


def registers() -> dict[str, Any]:
    """Registers, spills and shared memory of every hot kernel for each architecture."""
    import triton

    table: dict[str, Any] = {}
    for name, (call, least) in hot_launches().items():
        for capability in (80, 90, 100):
            if capability >= least:
                print(f"sm_{capability} {name}", file=sys.stderr, flush=True)
                for kernel, used in report(name, call, capability).items():
                    table.setdefault(kernel, {})[f"sm_{capability}"] = used
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {"versions": versions, "kernels": table}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    text = json.dumps(registers(), indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
