"""vLLM on the shape of section `llama`: random weights that vLLM makes itself from a config, in our W4A16 layout and in bfloat16.

vLLM keeps its own clock out of this: a step is the difference of a long and a short run of `LLM.generate`, whole scheduler included.
"""

from __future__ import annotations

import gc
import random
import statistics
from pathlib import Path
from typing import Any

from gpu_sections.bench import Bench, Row, require
from gpu_sections.llama import GROUP, PREFILL, SHAPES, STEPS, chosen_shape, decode_cells
from runtime.formats.quantization_config import ModuleEntry, build
from runtime.formats.scheme import GridScheme, Scheme

#: Of the free memory. The first leaves room for the second, in case that vLLM does not free all of it.
SHARES = {"w4": 0.45, "bf16": 0.9}


def timing(bench: Bench) -> None:
    """Decode steps and prefill at the batches and depths of ours."""
    require("vllm", "vLLM")
    name = chosen_shape(bench)
    for weights, share in SHARES.items():
        if not bench.enough(f"vLLM {weights}", bench.pick(45, 1)):
            continue
        path = checkpoint(bench.work / f"vllm-{name}-{weights}", SHAPES[name], weights == "w4")
        row: Row = {"engine": f"vllm {weights}"}
        model = bench.of_peer(row, "model", lambda p=path, s=share: load(p, s * bench.free_share()))
        if model is None:
            bench.add(row)
            continue
        for batch, depth in decode_cells(bench):
            if bench.enough(f"vLLM {weights}, batch {batch}, depth {depth}"):
                row = {"engine": f"vllm {weights}", "batch": batch, "depth": depth}
                bench.peer(row, "step_ms", lambda b=batch, d=depth, m=model: step_ms(bench, m, b, d))
                bench.add(row)
        for batch, length in bench.pick(PREFILL, ((1, 20),)):
            if bench.enough(f"vLLM {weights}, prefill of {length}"):
                row = {"engine": f"vllm {weights}", "batch": batch, "prompt": length}
                bench.peer(row, "prefill_ms", lambda b=batch, n=length, m=model: median_ms(bench, m, b, n, 1))
                bench.add(row)
        del model
        gc.collect()
        bench.recover()


def checkpoint(path: Path, shape: dict[str, int], packed: bool) -> Path:
    """A directory with a config alone."""
    from transformers import LlamaConfig

    config: Any = LlamaConfig(**shape, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    if packed:
        parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                 "mlp.down_proj")  # fmt: skip
        entry = ModuleEntry(Scheme(GridScheme(4, "int", True, "group", GROUP)), "pack-quantized")
        names = [f"model.layers.{layer}.{part}" for layer in range(shape["num_hidden_layers"]) for part in parts]
        config.quantization_config = build(dict.fromkeys(names, entry), [*names, "lm_head"])
    config.save_pretrained(path)
    return path


def load(path: Path, share: float) -> Any:
    """vLLM's engine over random weights, with this share of the device's memory."""
    from vllm import LLM

    return LLM(
        str(path), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384,
        gpu_memory_utilization=share, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip


def step_ms(bench: Bench, model: Any, batch: int, depth: int) -> float:
    """Milliseconds of a decode step."""
    long, short = bench.pick((2 * STEPS, 8), (4, 2))
    return (median_ms(bench, model, batch, depth, long) - median_ms(bench, model, batch, depth, short)) / (long - short)


def median_ms(bench: Bench, model: Any, batch: int, length: int, new: int) -> float:
    """Milliseconds of `generate`, prompts of random tokens included."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
    source = random.Random(0)

    def run() -> None:
        prompts = [{"prompt_token_ids": [source.randrange(500) for _ in range(length)]} for _ in range(batch)]
        found = model.generate(prompts, params, use_tqdm=False)
        if [len(one.outputs[0].token_ids) for one in found] != [new] * batch:
            raise RuntimeError(f"not {new} tokens for each of {batch} prompts")

    run()
    return statistics.median(bench.wall(run) for _ in range(bench.pick(3, 1))) * 1e3
