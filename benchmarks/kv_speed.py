"""How fast decoding is over a compressed KV cache, and what it takes in memory, beside transformers' own caches.

    python benchmarks/kv_speed.py [--lengths 1024 8192 32768] [--batches 1 16]

Two measurements, each cell in turn with its peers in the same process, medians over rounds, ratios within a round:

- `attention`: one step of one layer (32 query heads, 8 key heads of 128) over a cache of n tokens: our kernels on plain, int8, int4,
  int2 and fp8 storage, torch's scaled_dot_product_attention in bfloat16 and float32;
- `decode`: whole steps of a Llama of random weights (layers of the 1.1B shape) with transformers' dynamic, static and quantized cache and
  with ours, plain, in int4, and evicted to an eighth beside a plain cache of that length. Caches are filled with random states:
  what was in the prompt does not matter to speed. Memory is the cache's as allocated, and the peak of a process of its own (on a GPU:
  of the allocator) while it decodes, above what it held before the cache was made. transformers' quantized cache wants
  `pip install optimum-quanto`; where it fails, its message is the result.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from where import commit, cpu_name

RESULT = Path(__file__).resolve().parent / "results" / "kv_speed.json"
STORED: dict[str, dict[str, Any]] = {
    "ours plain": {},
    "ours int8": {"keys": "int8", "values": "int8", "recent": 64},
    "ours int4": {"keys": "int4", "values": "int4", "recent": 64},
    "ours int2": {"keys": "int2", "values": "int2", "recent": 64},
    "ours fp8": {"keys": "fp8", "values": "fp8", "recent": 64},
}
EVICTED = 8  # times fewer tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of decoding in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--most-bytes", type=float, default=8e9, help="that a cell may take; larger ones are left out and said"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--no-peaks", dest="peaks", action="store_false", help="no processes that measure peak memory")
    parser.add_argument(
        "--peak-of", metavar="CACHE", help="print the peak memory of this cache alone, for --lengths and --batches"
    )
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(json.dumps(peak(arguments, arguments.peak_of, arguments.lengths[0], arguments.batches[0])))
        return
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else cpu_name()
    result: dict[str, Any] = {
        "machine": name,
        "commit": commit(),
        "torch": torch.__version__,
        "attention": [],
        "decode": [],
    }
    with torch.inference_mode():
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for length in arguments.lengths:
                for batch in arguments.batches:
                    cell = {"threads": threads, "length": length, "batch": batch}
                    for kind, measure in (("attention", attention), ("decode", decode)):
                        found = measure(arguments, length, batch)
                        result[kind].append({**cell, **found})
                        print(kind, json.dumps(result[kind][-1]), file=sys.stderr)
                    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


# ---------------------------------------------------------------- rounds
def in_turn(runs: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each, round by round; the first round, which warms up, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times faster: the median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)), 3)


# ---------------------------------------------------------------- one layer
def attention(arguments: argparse.Namespace, length: int, batch: int) -> dict[str, Any]:
    """Milliseconds of one layer's attention for one new token, and ratios to torch's."""
    from runtime.kv_cache.kernels import attend_region
    from runtime.kv_cache.region import Queries

    heads, kv_heads, size = 32, 8, 128
    dtype, device = torch.bfloat16, torch.device(arguments.device)
    # Keys and values in float32, bfloat16, and as ours in 16, 8, 8, 4 and 2 bits.
    needed = 2 * batch * kv_heads * length * size * 11
    if needed > arguments.most_bytes:
        return {"left out": f"all these caches take {needed / 1e9:.1f} GB, more than --most-bytes"}
    rows = batch * kv_heads
    keys = torch.randn(rows, length, size, dtype=dtype, device=device)
    values = torch.randn_like(keys)
    query = torch.randn(batch, heads, 1, size, dtype=dtype, device=device)
    scale = size**-0.5
    shape = (batch, kv_heads, length, size)
    runs: dict[str, Callable[[], Any]] = {}
    for name, kind in (("sdpa bfloat16", dtype), ("sdpa float32", torch.float32)):
        states = query.to(kind), keys.view(shape).to(kind), values.view(shape).to(kind)
        runs[f"{name}, enable_gqa"] = lambda s=states: functional.scaled_dot_product_attention(
            *s, scale=scale, enable_gqa=True
        )
        # One new token: query heads of a key head may as well be queries, which is faster.
        states = states[0].view(batch, kv_heads, -1, size), *states[1:]
        runs[name] = lambda s=states: functional.scaled_dot_product_attention(*s, scale=scale)
    for name, policy in STORED.items():
        region = stored(policy, keys, values)
        grouped = query.view(rows, heads // kv_heads, size)
        runs[name] = lambda r=region, q=grouped: attend_region(Queries(q, scale), r)
    seconds = in_turn(runs, arguments.rounds, arguments.device)
    return {
        "milliseconds": {name: round(1e3 * statistics.median(s), 3) for name, s in seconds.items()},
        "int4 against sdpa bfloat16": ratio(seconds, "sdpa bfloat16", "ours int4"),
        "int4 against sdpa float32": ratio(seconds, "sdpa float32", "ours int4"),
        "int4 against sdpa bfloat16, enable_gqa": ratio(seconds, "sdpa bfloat16, enable_gqa", "ours int4"),
        "plain against sdpa bfloat16": ratio(seconds, "sdpa bfloat16", "ours plain"),
    }


def stored(policy: dict[str, Any], keys: torch.Tensor, values: torch.Tensor) -> Any:
    """Keys and values `[rows, tokens, size]`, whole pages of them, as a policy stores what is not recent."""
    from runtime.kv_cache.pages import PAGE
    from runtime.kv_cache.policy.policy import Policy
    from runtime.kv_cache.region import Region

    rows, length, size = keys.shape
    tiers = Policy.parse(policy, "policy").plan().storage.tiers
    codecs = (tiers[0].keys, tiers[0].values) if tiers else (None, None)
    region = Region(rows, (size, size), keys.dtype, keys.device, *codecs)
    pages = torch.full((rows,), length // PAGE, device=keys.device)
    for start in range(0, rows, 8):  # a piece at a time: encoding works in float32
        part = slice(start, start + 8)
        counts = torch.zeros_like(pages)
        counts[part] = pages[part]
        region.append_pages(
            region.encoded(*(states[part].reshape(-1, PAGE, size) for states in (keys, values))), counts
        )
    return region


# ---------------------------------------------------------------- whole steps
def decode(arguments: argparse.Namespace, length: int, batch: int) -> dict[str, Any]:
    """Tokens a second and memory of whole steps with each cache."""
    config, dtype = llama(arguments.layers), kind(arguments)
    plain = 2 * batch * config.num_key_value_heads * config.head_dim * length * dtype.itemsize
    if (config.num_hidden_layers + 2) * plain > arguments.most_bytes:
        return {"left out": f"a plain cache takes {config.num_hidden_layers * plain / 1e9:.1f} GB: --most-bytes"}
    sdpa, ours = build(arguments, config, dtype, False), build(arguments, config, dtype, True)
    speed: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    for number in range(arguments.rounds + 1):
        for name, make in makers(arguments, config, length, batch, dtype).items():
            try:
                seconds, size = one(make, ours if name.startswith("ours") else sdpa, batch, arguments)
            except Exception as error:  # a peer's cache may want a package, or fail: that is a result too
                if name.startswith("ours"):
                    raise
                facts[name] = {"error": str(error).splitlines()[0]}
                continue
            if number:
                speed.setdefault(name, []).append(seconds)
                facts[name] = {"cache_bytes": size}
    for name, seconds in speed.items():
        facts[name]["tokens_per_second"] = round(batch * arguments.steps / statistics.median(seconds), 2)
        if arguments.peaks:
            facts[name]["peak_bytes"] = measured_peak(arguments, name, length, batch)
    compared = {
        f"{mine} against {peer}": ratio(speed, peer, mine)
        for mine, peer in (
            ("ours plain", "transformers dynamic"), ("ours int4", "transformers dynamic"), ("ours int4", "transformers static"),
            ("ours int4", "transformers quantized"), ("ours evicted", "ours plain, as short"),
            ("ours evicted", "transformers dynamic, as short"),
        )
        if mine in speed and peer in speed
    }  # fmt: skip
    return {"caches": facts, **compared}


def kind(arguments: argparse.Namespace) -> torch.dtype:
    """What models compute in."""
    return torch.float32 if arguments.device == "cpu" else torch.bfloat16


def build(arguments: argparse.Namespace, config: Any, dtype: torch.dtype, compressed: bool) -> Any:
    """A model of random weights, with torch's attention or ours."""
    from transformers import LlamaForCausalLM

    from runtime.kv_cache.cache import prepare

    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval().to(arguments.device)
    if compressed:
        prepare(model)
    return model


def llama(layers: int) -> Any:
    """Layers of the 1.1B shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=64, vocab_size=4096, max_position_embeddings=1 << 18,
    )  # fmt: skip


def makers(
    arguments: argparse.Namespace, config: Any, length: int, batch: int, dtype: torch.dtype
) -> dict[str, Callable[[Any], Any]]:
    """{name: makes a cache of `length` tokens for a model}."""
    from transformers import DynamicCache, StaticCache
    from transformers.cache_utils import QuantizedCache

    shape = (batch, config.num_key_value_heads, length, config.head_dim)

    def theirs(make: Callable[[], Any], tokens: int = length) -> Callable[[Any], Any]:
        def filled(model: Any) -> Any:
            cache = make()
            for index in range(config.num_hidden_layers):
                states = [
                    torch.randn(*shape[:2], tokens, shape[3], dtype=dtype, device=arguments.device) for _ in range(2)
                ]
                cache.update(*states, index)
            return cache

        return filled

    found: dict[str, Callable[[Any], Any]] = {
        "transformers dynamic": theirs(DynamicCache),
        "transformers static": theirs(lambda: StaticCache(config, max_cache_len=length + arguments.steps + 8)),
        "transformers quantized": theirs(lambda: QuantizedCache("quanto", config, nbits=4)),
        "transformers dynamic, as short": theirs(DynamicCache, length // EVICTED),
    }
    for name in ("ours plain", "ours int4", "ours int2"):
        found[name] = lambda model, p=STORED[name]: mine(model, p, shape, length, dtype)
    found["ours plain, as short"] = lambda model: mine(model, {}, shape, length // EVICTED, dtype)
    found["ours evicted"] = lambda model: mine(model, {}, shape, length, dtype, length // EVICTED)
    return found


def mine(
    model: Any, policy: dict[str, Any], shape: tuple[int, ...], length: int, dtype: torch.dtype, kept: int | None = None
) -> Any:
    """A compressed cache of random states; with `kept`, all but so many of each head's tokens are evicted again."""
    from runtime.kv_cache.cache import CompressedCache
    from runtime.kv_cache.policy.policy import Policy

    cache = CompressedCache(model, Policy.parse(policy, "policy").plan())
    for layer in cache.layers:
        keys, values = (torch.randn(*shape[:2], length, shape[3], dtype=dtype, device=model.device) for _ in range(2))
        layer.lazy_initialization(keys, values)
        layer.append(keys, values, None, True)
        layer.seen = length
        layer.settle()
        if kept is not None:
            score = torch.rand(*shape[:2], length, device=model.device)
            layer.keep(score, torch.full(shape[:2], kept, device=model.device))
    return cache


def one(make: Callable[[Any], Any], model: Any, batch: int, arguments: argparse.Namespace) -> tuple[float, int]:
    """Seconds of the steps, bytes of the cache at the end."""
    gc.collect()
    token = torch.ones(batch, 1, dtype=torch.int64, device=arguments.device)
    cache = make(model)
    model(token, past_key_values=cache)
    _wait(arguments.device)
    started = time.perf_counter()
    for _ in range(arguments.steps):
        model(token, past_key_values=cache)
    _wait(arguments.device)
    return time.perf_counter() - started, _bytes(cache)


# ---------------------------------------------------------------- memory
def measured_peak(arguments: argparse.Namespace, name: str, length: int, batch: int) -> int:
    """Of a cache in a process of its own: what others freed before does not hide it."""
    command = [sys.executable, __file__, "--peak-of", name, "--lengths", str(length), "--batches", str(batch)]
    command += ["--layers", str(arguments.layers), "--steps", str(arguments.steps), "--device", arguments.device]
    found: int = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["peak_bytes"]
    return found


@torch.inference_mode()
def peak(arguments: argparse.Namespace, name: str, length: int, batch: int) -> dict[str, int]:
    """The most that decoding holds above what there was before the cache, weights and all."""
    config, dtype = llama(arguments.layers), kind(arguments)
    model = build(arguments, config, dtype, name.startswith("ours"))
    maker = makers(arguments, config, length, batch, dtype)
    # What a first step allocates for good (kernels, pools of threads) is not the cache's.
    one(makers(arguments, config, 64, batch, dtype)[name], model, batch, arguments)
    gc.collect()
    _trim(arguments.device)
    before = _resident(arguments.device)
    cache = maker[name](model)
    _trim(arguments.device)
    _reset_peak(arguments.device)
    token = torch.ones(batch, 1, dtype=torch.int64, device=arguments.device)
    for _ in range(arguments.steps + 1):
        model(token, past_key_values=cache)
    return {"peak_bytes": _peak(arguments.device) - before, "cache_bytes": _bytes(cache)}


def _trim(device: str) -> None:
    """Freed memory goes back to the system, where the C library is one that can be asked to."""
    trim = None if device.startswith("cuda") else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _bytes(cache: Any) -> int:
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    found = 0
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                inner = [getattr(value, name, None) for name in ("_data", "_scale", "_shift")]
                tensors = [t for t in inner if isinstance(t, torch.Tensor)] or [value]
                found += sum(t.numel() * t.element_size() for t in tensors)
    return found


def _resident(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated()
    return _status("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else _status("VmHWM")


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
