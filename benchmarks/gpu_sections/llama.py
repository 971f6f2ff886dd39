#!/usr/bin/env python
"""Decode speed on a GPU: the lean engine with and without CUDA graphs, against the bandwidth bound and transformers' compiled decode.

    python benchmarks/decode_gpu.py --output benchmarks/results/decode_gpu.json      an 8B Llama, made on the GPU
    python benchmarks/decode_gpu.py --tiny                                           a smoke test, on a CPU too

Random weights: speed only. First the engine is checked on this device: attention against plain torch, logits against
transformers' own forward pass, graphs against plain calls. The bound of a step is what it must read (packed weights, head, norms,
keys and values) at the copy bandwidth measured here; the aim is 75 % of it. A step ends when its tokens are on the host;
`device_ms` is the same without reading them back. What cannot run is in the JSON with its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.engines.base import Chunk
from runtime.engines.cuda import CudaEngine, ops
from runtime.engines.cuda.cache import CacheLayer
from runtime.engines.cuda.engine import CudaGraphs
from runtime.engines.llama_structure import read_program
from runtime.engines.torch.engine import TorchEngine
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear

AIM = 0.75
GROUP = 128
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
    },
}  # fmt: skip


# -------------------------------------------------------------------- models
def dense_model(shape: dict[str, int], device: torch.device) -> Any:
    """A random Llama in bfloat16, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def pack(model: Any, kernels: str) -> str:
    """Replace the layers of all blocks by random 4-bit ones, one at a time; returns what computes them."""
    device, used = model.device, set()
    entry = ModuleEntry(Scheme(GridScheme(4, "int", True, "group", GROUP)), "pack-quantized")
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, old in list(parent.named_children()):
                if not isinstance(old, nn.Linear):
                    continue
                shape = (old.out_features, old.in_features)
                setattr(parent, name, nn.Identity())  # the dense weight goes before the packed one comes
                del old
                tensors = {}
                for key, spec in CompressedLinear.specs(entry, shape, torch.bfloat16).items():
                    if key == "weight_shape":
                        tensors[key] = torch.tensor(shape, dtype=spec.dtype, device=device)
                    elif spec.dtype.is_floating_point:  # outputs of about the size of the inputs
                        scale = 0.2 / shape[1] ** 0.5
                        tensors[key] = torch.full(spec.shape, scale, dtype=spec.dtype, device=device)
                    else:
                        tensors[key] = torch.randint(-(2**31), 2**31, spec.shape, dtype=spec.dtype, device=device)
                new = CompressedLinear.from_tensors(entry, shape, tensors, None, torch.bfloat16)
                new.prepare(kernels)
                used.add(new.kernel_name)
                setattr(parent, name, new)
    return ", ".join(sorted(used))


def step_bytes(engine: CudaEngine, batch: int, positions: float) -> int:
    """What one decode step must read: weights as they are held (no embedding table), keys and values of all positions."""
    parts = engine.parts
    modules = [parts.head]
    for block in parts.blocks:
        modules += [*block.qkv.layers, block.output, *block.gate_up.layers, block.down]
    tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
    norms = [block.input_norm for block in parts.blocks] + [block.mlp_norm for block in parts.blocks]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, *norms])
    return int(weights + batch * positions * engine.page_bytes / engine.page_size)


# -------------------------------------------------------------------- time
def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written a second by a copy of `size` bytes: the best of several."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(5):
            target.copy_(source)
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / 5)
    return 2 * size / best


def sequences(engine: CudaEngine, batch: int, context: int, steps: int) -> tuple[Any, Iterator[list[Chunk]]]:
    """A pool and the pieces of one step after another; each `next` wants the tokens sent to it."""
    each = -(-(context + steps) // engine.page_size)
    order = list(range(batch * each))
    random.Random(0).shuffle(order)
    tables = [order[row * each : (row + 1) * each] for row in range(batch)]

    def pieces() -> Iterator[list[Chunk]]:
        for place in range(context, context + steps):
            yield [Chunk([(place + row) % 97], place, table) for row, table in enumerate(tables)]

    return engine.new_pages(batch * each), pieces()


def decode_speed(engine: CudaEngine, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step: median with the tokens read back each time, and the mean without."""
    warm = 8
    pool, pieces = sequences(engine, batch, context, warm + 2 * steps)
    for _ in range(warm):
        engine.step(pool, next(pieces)).argmax(-1).tolist()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step(pool, next(pieces)).argmax(-1).tolist()
        times.append(time.perf_counter() - start)
    synchronize(engine.device)
    start = time.perf_counter()
    for _ in range(steps):
        engine.step(pool, next(pieces)).argmax(-1)
    synchronize(engine.device)
    device = (time.perf_counter() - start) / steps
    median = statistics.median(times)
    return {
        "step_ms": round(median * 1e3, 4), "device_ms": round(device * 1e3, 4), "tokens_per_second": round(batch / median, 1),
    }  # fmt: skip


def transformers_speed(model: Any, batch: int, context: int, steps: int, static: bool) -> dict[str, Any]:
    """`generate`, from the difference of a long and a short run. With a static cache transformers compiles the decode step
    (`mode="reduce-overhead"`) where the device is a GPU.
    """
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=model.device)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"

    def run(count: int) -> float:
        synchronize(model.device)
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        synchronize(model.device)
        return time.perf_counter() - start

    long, short = 2 * steps, 8
    for _ in range(2):  # one size of static cache for both: the longest first
        run(long)
    seconds = statistics.median(run(long) for _ in range(3)) - statistics.median(run(short) for _ in range(3))
    each = seconds / (long - short)
    return {"step_ms": round(each * 1e3, 4), "tokens_per_second": round(batch / each, 1)}


# -------------------------------------------------------------------- checks
def attention_error(device: torch.device) -> float:
    """Decode attention as the engine computes it here, against plain torch: largest error over ragged lengths and a window."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    keys, values = (torch.randn(2, 200, 64, 8, 128, generator=generator).to(device, torch.bfloat16)).unbind(0)
    positions = torch.tensor([0, 63, 64, 1000, 3001], dtype=torch.int32, device=device)
    tables = torch.randint(0, 200, (5, 64), generator=generator, dtype=torch.int32).to(device)
    q = torch.randn(5, 32, 128, generator=generator).to(device, torch.bfloat16)
    for window in (0, 700):
        arguments = (q, CacheLayer(keys, values), tables, positions, 128**-0.5, window)
        found, wanted = ops.choose(device).decode_attention(*arguments), ops.decode_attention(*arguments)
        worst = max(worst, float((found.float() - wanted.float()).abs().max()))
    return worst


def check(model: Any, device: torch.device, fuse: bool) -> dict[str, Any]:
    """Largest relative errors; raises when one is too large to be rounding."""
    ids = random.Random(1).choices(range(512), k=140)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids], device=device)).logits[0, 129:].float()
    out: dict[str, Any] = {"attention": attention_error(device)}
    logits = {}
    for graphs in (True, False):
        engine = lean(model, device, graphs, fuse)
        pool = engine.new_pages(6)
        table = [4, 0, 3]
        engine.step(pool, [Chunk(ids[:70], 0, table)])
        rows = [engine.step(pool, [Chunk(ids[70:130], 70, table)])[0]]
        rows += [engine.step(pool, [Chunk([token], 130 + i, table)])[0] for i, token in enumerate(ids[130:])]
        logits[graphs] = torch.stack(rows)
    out["logits"] = float((logits[True] - wanted).norm() / wanted.norm())
    out["graphs_differ"] = float((logits[True] - logits[False]).abs().max())
    if not (out["attention"] < 0.02 and out["logits"] < 0.05 and out["graphs_differ"] == 0):
        raise SystemExit(f"the engine is wrong on this device: {out}")
    return out


def lean(model: Any, device: torch.device, graphs: bool, fuse: bool) -> CudaEngine:
    program = read_program(model, fuse)
    if isinstance(program, str):
        raise SystemExit(f"the lean engine does not take this model over: {program}")
    capture = CudaGraphs(device) if graphs and device.type == "cuda" else None
    return CudaEngine(TorchEngine(model, device), program, capture=capture)


# -------------------------------------------------------------------- all of it
def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except Exception as error:  # what a peer cannot do is a result
        return {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    shape = SHAPES["tiny" if arguments.tiny else arguments.shape]
    bandwidth = copy_bandwidth(device, (1 << 22) if arguments.tiny else (1 << 30))
    result: dict[str, Any] = {
        "shape": shape, "context": arguments.context, "steps": arguments.steps, "machine": machine(device),
        "copy_bandwidth": bandwidth, "aim": AIM, "rows": [],
    }  # fmt: skip

    def add(name: str, batch: int, found: dict[str, Any], size: int = 0) -> None:
        if size and "step_ms" in found:
            bound = size / bandwidth
            found |= {"bytes": size, "bound_ms": round(bound * 1e3, 4)}
            found["share_of_bound"] = round(bound * 1e3 / found["step_ms"], 3)
            found["reaches_aim"] = found["share_of_bound"] >= AIM
        result["rows"].append({"engine": name, "batch": batch, **found})
        print(json.dumps(result["rows"][-1]), file=sys.stderr, flush=True)

    model = dense_model(shape, device)
    peers = {"transformers bf16, static cache, compiled": True, "transformers bf16, eager": False}
    for name, static in {} if arguments.no_peers else peers.items():
        for batch in arguments.batches:
            found = attempt(
                lambda b=batch, s=static: transformers_speed(model, b, arguments.context, arguments.steps, s)
            )
            add(name, batch, found)
    if not arguments.no_peers:
        torch.compiler.reset()
        model = dense_model(shape, device)  # nothing of what was compiled stays with it
    for weights in ("bf16", "w4"):
        if weights == "w4":
            result["kernels"] = pack(model, arguments.kernels)
        result[f"check_{weights}"] = check(model, device, fuse=True)
        for graphs in (True, False):
            engine = lean(model, device, graphs, fuse=True)
            result[f"lean_{weights}"] = {
                "products_a_block": sum(len(x.layers) for x in (engine.parts.blocks[0].qkv, engine.parts.blocks[0].gate_up)) + 2,
                "ops": engine.decoder.ops.name,
            }  # fmt: skip
            for batch in arguments.batches:
                found = attempt(lambda e=engine, b=batch: decode_speed(e, b, arguments.context, arguments.steps))
                size = step_bytes(engine, batch, arguments.context + arguments.steps)
                add(f"ours {weights}, {'graphs' if graphs else 'no graphs'}", batch, found, size)
                engine.trim()
            del engine
            gc.collect()
    return result


def machine(device: torch.device) -> dict[str, Any]:
    import transformers

    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "cuda": torch.version.cuda, "device": str(device), "when": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
        }
    else:
        found["cpu"] = platform.processor() or platform.machine()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["8b", "1b"], default="8b")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, a few steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512, help="positions in the cache when decoding starts")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        raise SystemExit("an 8B model on a CPU takes hours: use --tiny there")
    if arguments.device == "cuda":
        arguments.device = "cuda:0"
    if arguments.tiny:
        arguments.context, arguments.steps = min(arguments.context, 64), min(arguments.steps, 12)
    text = json.dumps(measure(arguments), indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
