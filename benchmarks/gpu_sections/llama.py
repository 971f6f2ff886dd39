"""Whole Llama of random weights made on the device: the fused engine, dense and in 4 bits, beside transformers and the bandwidth bound.

The bound of a decode step is what it must read (packed weights, head, norms, keys and values) at the copy bandwidth measured here. A step
ends when its tokens are on the host; `device_ms` is the same without reading them back.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gpu_sections.bench import Bench, Row
from runtime.engines.base import Chunk, Engine
from runtime.engines.cuda import CudaEngine
from runtime.engines.cuda.engine import PAGE
from runtime.engines.cuda.steps import CudaGraphs
from runtime.engines.llama_structure import Block, FeedForward, read_program
from runtime.engines.torch.engine import TorchEngine
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear

GROUP = 128
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 512,
    },
}  # fmt: skip
#: (sequences, tokens before each decode step); the first are measured with every engine.
DECODE = ((1, 512), (8, 512), (32, 512), (1, 8192), (8, 8192), (64, 2048))
PREFILL = ((1, 512), (1, 4096), (8, 1024))
STEPS = 48
NEEDS = 24e9  # bytes of an 8B model in bfloat16, its cache and what computes it


def check(bench: Bench) -> None:
    """Logits against transformers' own, steps with graphs against steps without, dense and in 4 bits."""
    shape = SHAPES[bench.pick("1b", "tiny")] | bench.pick({"num_hidden_layers": 4}, {})
    model = dense_model(shape, bench.device)
    for weights in ("bf16", "w4"):
        if weights == "w4":
            bench.fact(kernels=pack(model))
        ids = random.Random(1).choices(range(512), k=bench.pick(140, 36))
        ends = (len(ids) // 2, len(ids) - 10)  # of two chunks of a prompt, which is followed by single tokens
        with torch.inference_mode():
            wanted = model(torch.tensor([ids], device=bench.device)).logits[0, ends[1] - 1 :].float()
        found = {graphs: engine_logits(lean(model, bench, graphs), ids, ends) for graphs in (True, False)}
        bench.case(f"logits, {weights}", float((found[True] - wanted).norm() / wanted.norm()), 0.05)
        bench.case(f"graphs, {weights}", float((found[True] - found[False]).abs().max()), 0.0)


def engine_logits(engine: Engine, ids: Sequence[int], ends: tuple[int, int]) -> torch.Tensor:
    """After each token from the end of the prompt on, in logits `[tokens, vocabulary]`."""
    pool, table = engine.new_pages(6), [4, 0, 3] if engine.page_size < len(ids) else [0]
    if ends[0]:
        engine.step(pool, [Chunk(ids[: ends[0]], 0, table)])
    rows = [engine.step(pool, [Chunk(ids[ends[0] : ends[1]], ends[0], table)])[0]]
    rows += [engine.step(pool, [Chunk([token], ends[1] + i, table)])[0] for i, token in enumerate(ids[ends[1] :])]
    return torch.stack(rows).float()


def timing(bench: Bench) -> None:
    """Ours in 4 bits first, then dense, then transformers."""
    bandwidth, operations = bench.limits()
    name = chosen_shape(bench)
    for weights in ("w4", "bf16"):
        model = dense_model(SHAPES[name], bench.device)
        if weights == "w4":
            bench.fact(kernels=pack(model))
        measure_engine(bench, lean(model, bench, True), weights, (bandwidth, operations))
        if weights == "bf16":
            measure_transformers(bench, model)
        del model
        bench.recover()


def measure_transformers(bench: Bench, model: Any) -> None:
    """Decode steps of `generate`, eager and compiled."""
    for batch, depth in decode_cells(bench)[:2]:
        for kind, seconds in (("eager", 15), ("compiled", 60)):
            if bench.enough(f"transformers {kind}, batch {batch}", bench.pick(seconds, 1)):
                row: Row = {"engine": f"transformers bf16, {kind}", "batch": batch, "depth": depth}
                static = kind == "compiled"
                bench.peer(row, "step_ms", lambda b=batch, d=depth, s=static: generate_ms(bench, model, b, d, s))
                bench.add(row)


def chosen_shape(bench: Bench) -> str:
    """The 8B shape, or a smaller one where it does not fit, which the facts then say."""
    free = bench.free_bytes()
    name = bench.pick("8b" if free >= NEEDS else "1b", "tiny")
    why = None if name != "1b" else f"the 8B shape takes {NEEDS / 1e9:.0f} GB and {free / 1e9:.0f} GB are free"
    bench.fact(shape=name, config=SHAPES[name], **({"smaller_because": why} if why else {}))
    return name


def decode_cells(bench: Bench) -> Sequence[tuple[int, int]]:
    """(batch, depth) of the decode steps."""
    return bench.pick(DECODE, ((2, 8),))


def measure_engine(bench: Bench, engine: CudaEngine, weights: str, limits: tuple[float, float]) -> None:
    """Decode steps and prefill of the fused engine."""
    bandwidth, operations = limits
    for batch, depth in decode_cells(bench):
        if not bench.enough(f"{weights}, decode, batch {batch}, depth {depth}"):
            continue
        size, free = batch * (depth + 3 * STEPS) * engine.page_bytes // engine.page_size, bench.free_bytes()
        if size > 0.8 * free:
            reason = f"its cache takes {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            bench.add({"engine": f"fused {weights}", "batch": batch, "depth": depth, "step_ms": None, "reason": reason})
            continue
        row: Row = {
            "engine": f"fused {weights}",
            "batch": batch,
            "depth": depth,
            "bytes": step_bytes(engine, batch, depth),
        }
        bench.ours(row, "step_ms", lambda r=row, b=batch, d=depth: decode_ms(bench, engine, b, d, r))
        if row["step_ms"]:
            row["tokens_per_second"] = batch / row["step_ms"] * 1e3
            row["share_of_bandwidth_bound"] = row["bytes"] / bandwidth * 1e3 / row["step_ms"]
        bench.add(row)
        engine.trim()
    for batch, length in bench.pick(PREFILL, ((2, 7),)):
        if bench.enough(f"{weights}, prefill, batch {batch}, {length} tokens"):
            row = {"engine": f"fused {weights}", "batch": batch, "prompt": length}
            bench.ours(row, "prefill_ms", lambda b=batch, n=length: prefill_ms(bench, engine, b, n))
            if row["prefill_ms"]:
                done = 2 * batch * length * product_weights(engine)
                row["tokens_per_second"] = batch * length / row["prefill_ms"] * 1e3
                row["share_of_bf16_limit"] = done / operations * 1e3 / row["prefill_ms"]
            bench.add(row)
            engine.trim()


# -------------------------------------------------------------------- models
def dense_model(shape: dict[str, int], device: torch.device) -> Any:
    """A random Llama in bfloat16, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def pack(model: Any, device: torch.device | None = None) -> str:
    """Replace the linear layers of all blocks by random 4-bit ones, one at a time; returns what computes them.

    Args:
        device: of the new ones; None: the model's.
    """
    device, used = device or model.device, set()
    entry = ModuleEntry(Scheme(GridScheme(4, "int", True, "group", GROUP)), "pack-quantized")
    for layer in model.model.layers:
        for parent in list(layer.modules()):
            for name, old in list(parent.named_children()):
                if not isinstance(old, nn.Linear):
                    continue
                shape = (old.out_features, old.in_features)
                setattr(parent, name, nn.Identity())  # the dense weight goes before the packed one comes
                del old
                new = random_linear(entry, shape, device)
                used.add(new.kernel_name)
                setattr(parent, name, new)
    return ", ".join(sorted(used))


def random_linear(entry: ModuleEntry, shape: tuple[int, int], device: torch.device) -> CompressedLinear:
    """A layer of random codes, whose outputs have about the size of its inputs."""
    tensors = {}
    for key, spec in CompressedLinear.specs(entry, shape, torch.bfloat16).items():
        if key == "weight_shape":
            tensors[key] = torch.tensor(shape, dtype=spec.dtype, device=device)
        elif spec.dtype.is_floating_point:
            tensors[key] = torch.full(spec.shape, 0.2 / shape[1] ** 0.5, dtype=spec.dtype, device=device)
        else:
            tensors[key] = torch.randint(-(2**31), 2**31, spec.shape, dtype=spec.dtype, device=device)
    new = CompressedLinear.from_tensors(entry, shape, tensors, None, torch.bfloat16)
    new.prepare("auto")
    return new


def lean(model: Any, bench: Bench, graphs: bool) -> CudaEngine:
    """The fused engine over a model."""
    program = read_program(model, fuse=True)
    if isinstance(program, str):
        raise RuntimeError(f"the fused engine does not take this model over: {program}")
    capture = CudaGraphs(bench.device) if graphs and not bench.dry else None
    engine = CudaEngine(TorchEngine(model, bench.device), program, page_size=bench.pick(PAGE, 16), capture=capture)
    bench.fact(engine=engine.description)
    return engine


# -------------------------------------------------------------------- figures
def product_weights(engine: CudaEngine) -> int:
    """Weights that a prompt's token is multiplied with; the head is for the last one alone."""
    layers = [layer for block in engine.parts.blocks for layer in linear_layers(block)]
    return sum(layer.out_features * layer.in_features for layer in layers)


def linear_layers(block: Block) -> list[Any]:
    """Those of a block without experts."""
    assert isinstance(block.mlp, FeedForward)
    return [*block.qkv.layers, block.output, *block.mlp.gate_up.layers, block.mlp.down]


def step_bytes(engine: CudaEngine, batch: int, depth: float) -> int:
    """What one decode step must read: weights as they are held (no embedding table), keys and values of all positions."""
    parts = engine.parts
    modules = [parts.head]
    for block in parts.blocks:
        modules += linear_layers(block)
    tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
    norms = [block.input_norm for block in parts.blocks] + [block.mlp_norm for block in parts.blocks]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, *norms])
    return int(weights + batch * depth * engine.page_bytes / engine.page_size)


def tables(engine: Engine, batch: int, positions: int) -> list[list[int]]:
    """Pages of each sequence, out of order as after some serving."""
    each = -(-positions // engine.page_size)
    order = list(range(batch * each))
    random.Random(0).shuffle(order)
    return [order[row * each : (row + 1) * each] for row in range(batch)]


def decode_ms(bench: Bench, engine: Engine, batch: int, depth: int, row: Row, tokens: int = 1) -> float:
    """Milliseconds of a step with its tokens read back: the median; `row` gets the mean without reading them.

    Args:
        depth: positions in the cache, whose content does not matter where it has pages; else prompts are read first.
        tokens: of each sequence in a step; more than one are verified, as drafts are.
    """
    steps, warm = bench.pick(STEPS, 2), bench.pick(8, 1)
    total = depth + (warm + 2 * steps) * tokens
    own = tables(engine, batch, total)
    pool = engine.new_pages(batch * len(own[0]))

    def chunks() -> Iterator[list[Chunk]]:
        for place in range(depth, total, tokens):
            ids = [(place + i) % 97 for i in range(tokens)]
            yield [Chunk(ids, place, table, outputs=tokens) for table in own]

    if engine.lockstep:
        engine.step(pool, [Chunk([(i + row) % 97 for i in range(depth)], 0, table) for row, table in enumerate(own)])
    each = chunks()

    def step() -> torch.Tensor:
        return engine.verify(pool, next(each))[0].argmax(-1)

    for _ in range(warm):
        step().tolist()
    times = [bench.wall(lambda: step().tolist()) for _ in range(steps)]
    row["device_ms"] = bench.wall(lambda: [step() for _ in range(steps)]) / steps * 1e3
    return statistics.median(times) * 1e3


def prefill_ms(bench: Bench, engine: Engine, batch: int, length: int) -> float:
    """Milliseconds until prompts are in the cache and their last logits on the host: the median."""
    own = tables(engine, batch, length)
    pool = engine.new_pages(batch * len(own[0]))
    chunks = [Chunk([(i + row) % 97 for i in range(length)], 0, table) for row, table in enumerate(own)]

    def read() -> None:  # as the scheduler does: at most so many rows at once
        most = max(1, engine.most_rows // length)
        for first in range(0, batch, most):
            for start in range(0, length, engine.most_rows):
                part = [
                    Chunk(chunk.tokens[start : start + engine.most_rows], start, chunk.pages)
                    for chunk in chunks[first : first + most]
                ]
                engine.step(pool, part).argmax(-1).tolist()

    read()
    return statistics.median(bench.wall(read) for _ in range(bench.pick(5, 1))) * 1e3


@torch.inference_mode()
def generate_ms(bench: Bench, model: Any, batch: int, depth: int, static: bool) -> float:
    """Milliseconds a step of transformers' `generate`, from the difference of a long and a short run. With a static cache transformers
    compiles the decode step (`mode="reduce-overhead"`) where the device is a GPU.
    """
    ids = torch.randint(0, model.config.vocab_size, (batch, depth), device=model.device)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"

    def run(count: int) -> float:
        return bench.wall(lambda: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options))

    long, short = bench.pick((2 * STEPS, 8), (4, 2))
    for _ in range(bench.pick(2, 1)):  # one size of static cache for both: the longest first
        run(long)
    rounds = range(bench.pick(3, 1))
    each = statistics.median(run(long) for _ in rounds) - statistics.median(run(short) for _ in rounds)
    return each / (long - short) * 1e3
