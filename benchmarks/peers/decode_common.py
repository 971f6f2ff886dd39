"""What the engines of `decode_cpu.py` share: the protocol, the clock, the memory, the checkpoint and the 4-bit grid.

An engine is `decode_NAME.py`, started with one JSON request as its argument; it prints one JSON line as its last. Actions:

    prepare   turn the checkpoint `model` into what the engine reads, under `path`
    measure   load it, time prefill and decode; `logits` in the request saves logits to compare engines with
    depths    load it, time prompts of several lengths and decode steps behind several lengths
    matvec    time one int4 product [rows, columns], rotating over copies that do not fit the cache
    quantize  what llama.cpp and its fork make of a GGUF, with an importance matrix
    enlarge   a GGUF of a large shape with the types of a small one (`gguf_blocks.py`)
    quality   KL divergence from a reference, and perplexity, over windows of tokens
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

GROUP = 128


class Engine(Protocol):
    """A loaded model at batch 1. Logits are those of the last position, float32 `[vocabulary]`."""

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Forget everything, read the prompt."""

    def step(self, token: int) -> np.ndarray:
        """Read one more token."""


class DeepEngine(Engine, Protocol):
    """What `measure_depths` needs. It may have `repeat(length)` too: reach a depth by repeating what the cache has."""

    def extend(self, ids: Sequence[int]) -> np.ndarray:
        """Read more of the prompt."""


class CachedEngine:
    """Base class of an engine whose `run` reads tokens behind what is in its cache; logits of the last one, `[vocabulary]`."""

    def run(self, ids: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def step(self, token: int) -> np.ndarray:
        return self.run([token])

    def extend(self, ids: Sequence[int]) -> np.ndarray:
        return self.run(ids)


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama configuration that an engine is built from."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    eps: float
    theta: float
    experts: int
    chosen: int

    @classmethod
    def read(cls, checkpoint: str | Path) -> Shape:
        """From a checkpoint's config.json."""
        c = json.loads((Path(checkpoint) / "config.json").read_text())
        return cls(
            c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"], c["num_attention_heads"],
            c["num_key_value_heads"], c["head_dim"], c["vocab_size"], c["rms_norm_eps"],
            c["rope_parameters"]["rope_theta"], c.get("num_local_experts", 0), c.get("num_experts_per_tok", 0),
        )  # fmt: skip


class Checkpoint:
    """Tensors of a sharded checkpoint, one at a time, as torch tensors."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.positions: int = json.loads((self.directory / "config.json").read_text())["max_position_embeddings"]
        self.map = json.loads((self.directory / "model.safetensors.index.json").read_text())["weight_map"]

    def __getitem__(self, name: str) -> Any:
        from safetensors import safe_open

        with safe_open(self.directory / self.map[name], framework="pt") as file:
            return file.get_tensor(name)

    def array(self, *names: str) -> np.ndarray:
        """float32; several matrices are stacked by rows."""
        return np.concatenate([self[name].float().numpy() for name in names])


def layer_matrices(layer: int) -> dict[str, list[str]]:
    """{fused matrix: names of its parts in the checkpoint} of a block."""
    p = f"model.layers.{layer}"
    return {
        "qkv": [f"{p}.self_attn.{x}_proj.weight" for x in "qkv"],
        "o": [f"{p}.self_attn.o_proj.weight"],
        "gate": [f"{p}.mlp.gate_proj.weight"],
        "up": [f"{p}.mlp.up_proj.weight"],
        "down": [f"{p}.mlp.down_proj.weight"],
    }


def layer_norms(layer: int) -> tuple[str, str]:
    """Names of the two norms of a block."""
    return f"model.layers.{layer}.input_layernorm.weight", f"model.layers.{layer}.post_attention_layernorm.weight"


def rtn(weight: np.ndarray, group: int = GROUP) -> tuple[np.ndarray, np.ndarray]:
    """Round to nearest: codes 0..15 uint8 `[n, k]`, value (code - 8) * scale, scale float32 `[n, k / group]`.

    A scale has the mantissa of bfloat16, so that every engine, whatever it stores scales in, has the same matrix.
    """
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    scale = np.maximum(np.abs(grouped).max(-1) / 7, 1e-8).astype(np.float32)
    scale = ((scale.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    codes = np.clip(np.rint(grouped / scale[..., None]) + 8, 0, 15).astype(np.uint8)
    return codes.reshape(rows, columns), scale


def dequantize(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Inverse of `rtn`, float32."""
    rows, columns = codes.shape
    grouped = codes.reshape(rows, scale.shape[1], -1).astype(np.float32) - 8
    return (grouped * scale[..., None]).reshape(rows, columns)


def rotary(shape: Shape, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin float32 `[positions, head / 2]`."""
    frequency = 1.0 / shape.theta ** (np.arange(0, shape.head, 2, dtype=np.float64) / shape.head)
    angle = np.arange(positions)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def matvec_data(request: dict[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Codes and scales of every copy. Copies differ, so that no engine can fold them into one."""
    generator = np.random.default_rng(0)
    rows, columns = request["rows"], request["columns"]
    weight = (generator.standard_normal((rows, columns), dtype=np.float32)) * 0.02
    codes, scale = rtn(weight, request["group"])
    for copy in range(request["copies"]):
        yield np.roll(codes, copy, 0), np.roll(scale, copy, 0)


def time_matvec(request: dict[str, Any], run: Callable[[], Any], products: int, packed_bytes: int) -> dict[str, Any]:
    """Seconds of one product, where `run()` does `products` of them: the median over the rounds that fit `seconds`."""
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.perf_counter() + request["seconds"]
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / products)
    return matvec_result(times, packed_bytes)


def matvec_result(times: list[float], packed_bytes: int) -> dict[str, Any]:
    """What `matvec` answers."""
    seconds = statistics.median(times)
    return {
        "seconds": seconds,
        "best_seconds": min(times),
        "packed_bytes": packed_bytes,
        "gb_per_second": packed_bytes / seconds / 1e9,
    }


def error_of(product: np.ndarray, codes: np.ndarray, scale: np.ndarray, x: np.ndarray) -> float:
    """Relative error of a product against float32."""
    exact = dequantize(codes, scale) @ x.astype(np.float32).reshape(-1)
    return float(np.linalg.norm(product.astype(np.float32).reshape(-1) - exact) / np.linalg.norm(exact))


def memory() -> dict[str, int]:
    """Resident bytes of this process: all, and those not backed by a file (a memory-mapped model counts as file)."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "RssAnon", "RssFile"):
            fields[key] = int(value.split()[0]) * 1024
    return {"resident": fields["VmRSS"], "anonymous": fields["RssAnon"]}


def measure(request: dict[str, Any], load: Callable[[dict[str, Any]], Engine]) -> dict[str, Any]:
    """Load an engine and time it; everything it imports should be imported already."""
    base = memory()
    start = time.perf_counter()
    engine = load(request)
    load_seconds = time.perf_counter() - start
    if request.get("logits"):
        return save_logits(engine, request)
    loaded = memory()
    long, prompt, new = request["long_prompt"], request["prompt"], request["new_tokens"]
    # Once without the clock: threads start, buffers are allocated, compilers compile.
    start = time.perf_counter()
    engine.prefill(long)
    token = int(np.argmax(engine.prefill(prompt)))
    for _ in range(3):
        token = int(np.argmax(engine.step(token)))
    warm_seconds = time.perf_counter() - start
    prefills, steps = [], []
    for turn in range(1, request["repeat"] + 1):
        start = time.perf_counter()
        engine.prefill(turned(long, turn))
        prefills.append(time.perf_counter() - start)
        token = int(np.argmax(engine.prefill(turned(prompt, turn))))
        for _ in range(new):
            start = time.perf_counter()
            token = int(np.argmax(engine.step(token)))
            steps.append(time.perf_counter() - start)
    return {
        "load_seconds": load_seconds,
        "warm_seconds": warm_seconds,
        "prefill_tokens_per_second": len(long) / statistics.median(prefills),
        "decode_tokens_per_second": len(steps) / sum(steps),
        "step_seconds_median": statistics.median(steps),
        **memory_result(base, loaded),
    }


SHORT, FIRST = 512, 16  # prompts up to this length are timed three times; tokens in the cache at "depth 0"


class Cells:
    """What `depths` answers: tokens/s by length, and why some are missing."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.prefills, self.depths, self.new = request["prefills"], request["depths"], request["new_tokens"]
        self.end = time.perf_counter() + request["seconds"]
        self.prefill: dict[str, float] = {}
        self.decode: dict[str, float] = {}
        self.left_out: dict[str, str] = {}
        self.rate = 0.0  # of the last prompt, tokens/s

    def marks(self) -> list[int]:
        """Every length, ascending."""
        return sorted({*self.prefills, *self.depths})

    def short(self, mark: int) -> bool:
        """Cheap enough to be repeated."""
        return mark <= SHORT

    def affords(self, mark: int, tokens: int, slower: float) -> bool:
        """Whether `tokens` of a prompt still fit the time, at the last rate and `slower` times its seconds a token; notes if not."""
        needed = tokens / self.rate * slower if self.rate else 0.0
        if time.perf_counter() + needed <= self.end:
            return True
        reason = f"about {needed:.0f} s of prompt, more than this process may take"
        self.left_out |= {f"prefill {mark}": reason} if mark in self.prefills else {}
        self.left_out |= {f"decode {mark}": reason} if mark in self.depths else {}
        return False

    def read(self, mark: int, tokens: int, seconds: float) -> None:
        """A prompt was read; the best of several counts."""
        self.rate = tokens / seconds
        if mark in self.prefills:
            self.prefill[str(mark)] = max(self.prefill.get(str(mark), 0.0), self.rate)

    def wrote(self, mark: int, seconds: float) -> None:
        """`new` tokens were decoded."""
        self.decode[str(mark)] = max(self.decode.get(str(mark), 0.0), self.new / seconds)

    def result(self) -> dict[str, Any]:
        return {"prefill": self.prefill, "decode": self.decode, "left_out": self.left_out}


def some_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    """Random tokens, none of the first ten (they may mean something)."""
    found: list[int] = np.random.default_rng(seed).integers(10, vocabulary, count).tolist()
    return found


def measure_depths(request: dict[str, Any], load: Callable[[dict[str, Any]], DeepEngine]) -> dict[str, Any]:
    """An engine that goes on from where it is: one prompt grows through all lengths, decoding at each."""
    vocabulary = Shape.read(request["model"]).vocabulary
    start = time.perf_counter()
    engine = load(request)
    load_seconds = time.perf_counter() - start
    steps(engine, int(np.argmax(engine.prefill(some_ids(64, vocabulary, 0)))), 3)
    cells = Cells(request)
    for mark in [mark for mark in cells.marks() if cells.short(mark)]:
        for turn in range(3):
            ids = some_ids(max(mark, FIRST), vocabulary, turn + 1)
            start = time.perf_counter()
            token = int(np.argmax(engine.prefill(ids)))
            cells.read(mark, len(ids), time.perf_counter() - start)
            if mark in cells.depths:
                cells.wrote(mark, steps(engine, token, cells.new))
    position, spent, repeated = 0, 0.0, []
    can_repeat = hasattr(engine, "repeat")
    for mark in [mark for mark in cells.marks() if not cells.short(mark)]:
        needless = can_repeat and mark > max(cells.prefills, default=0)
        if needless or not cells.affords(mark, mark - position, 1.5):
            if not can_repeat or mark not in cells.depths:
                continue
            cells.left_out.pop(f"decode {mark}", None)
            engine.repeat(mark)
            repeated.append(mark)
            token = int(np.argmax(engine.step(FIRST)))
            cells.wrote(mark, steps(engine, token, cells.new))
            continue
        ids = some_ids(mark - position, vocabulary, mark)
        start = time.perf_counter()
        token = int(np.argmax(engine.extend(ids) if position else engine.prefill(ids)))
        spent += time.perf_counter() - start
        cells.read(mark, mark, spent)
        position = mark
        if mark in cells.depths:
            cells.wrote(mark, steps(engine, token, cells.new))
    return {**cells.result(), "repeated": repeated, "load_seconds": load_seconds, "peak_bytes": peak()}


def steps(engine: Engine, token: int, count: int) -> float:
    """Seconds of `count` greedy steps."""
    start = time.perf_counter()
    for _ in range(count):
        token = int(np.argmax(engine.step(token)))
    return time.perf_counter() - start


Generate = Callable[[list[int], int], tuple[float, float]]


def measure_prompts(request: dict[str, Any], load: Callable[[dict[str, Any]], Generate]) -> dict[str, Any]:
    """An engine that only answers whole prompts: `generate(ids, new)` returns seconds of the prompt and of `new` steps behind it."""
    vocabulary = Shape.read(request["model"]).vocabulary
    start = time.perf_counter()
    generate = load(request)
    load_seconds = time.perf_counter() - start
    generate(some_ids(64, vocabulary, 0), 3)
    cells, slower = Cells(request), 1.0
    for mark in cells.marks():
        for turn in range(3 if cells.short(mark) else 1):
            if not cells.affords(mark, mark, slower):
                continue
            ids = some_ids(max(mark, FIRST), vocabulary, mark + turn)
            prompt, rest = generate(ids, cells.new if mark in cells.depths else 0)
            cells.read(mark, len(ids), prompt)
            if mark in cells.depths:
                cells.wrote(mark, rest)
        slower = 1.0 if mark < SHORT else 1.3
    return {**cells.result(), "repeated": [], "load_seconds": load_seconds, "peak_bytes": peak()}


def peak() -> int:
    """Resident bytes of this process at most, libraries included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def turned(ids: Sequence[int], turn: int) -> list[int]:
    """The same tokens from another start: a prompt that no cache of prefixes has seen."""
    return [*ids[turn:], *ids[:turn]]


def memory_result(base: dict[str, int], loaded: dict[str, int]) -> dict[str, int]:
    """Growth by loading, and after the work; peak of the whole process, libraries included."""
    now = memory()
    return {
        "resident_bytes": loaded["resident"] - base["resident"],
        "resident_used_bytes": now["resident"] - base["resident"],
        "anonymous_used_bytes": now["anonymous"] - base["anonymous"],
        "peak_bytes": peak(),
    }


def save_logits(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Logits after a prompt and after each of some given tokens: both paths and the cache between them."""
    ids = request["prompt"]
    rows = [engine.prefill(ids[:-4]), *(engine.step(token) for token in ids[-4:])]
    np.save(request["logits"], np.stack([np.asarray(row, np.float32).reshape(-1) for row in rows]))
    return {"logits": request["logits"]}


def versions(*packages: str) -> dict[str, str]:
    """Installed versions."""
    return {name: importlib.metadata.version(name) for name in packages}


def main(actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]], *packages: str) -> None:
    """Read the request, answer it. A failure is an answer too."""
    request = json.loads(sys.argv[1])
    try:
        if request["action"] not in actions:
            answer = {"error": f"this engine has no {request['action']}"}
        else:
            answer = {**actions[request["action"]](request), "versions": versions(*packages)}
    except Exception as failure:  # the reason goes into the JSON
        traceback.print_exc()
        answer = {"error": f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"}
    print("\n" + json.dumps(answer), flush=True)
