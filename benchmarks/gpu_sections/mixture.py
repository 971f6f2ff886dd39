"""Mixture of experts in the shape of Qwen3-30B-A3B: 4-bit experts beside transformers' dense ones.

A quarter of its layers, or fewer where they do not fit: all 18,432 experts' matrices would take minutes to make. Layers are alike, so
ratios are those of the whole model but for its head.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch

from gpu_sections.bench import Bench, Row
from gpu_sections.llama import decode_ms, engine_logits, generate_ms, pack
from runtime.engines.base import Engine
from runtime.engines.choose import fused_engine
from runtime.engines.torch.engine import TorchEngine
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.native_experts import NativeExperts
from runtime.modeling.experts import Experts, unfuse

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 48,
    "max_position_embeddings": 32768,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
CELLS = ((1, 512), (8, 512), (32, 512))
MOST_LAYERS = 12


def check(bench: Bench) -> None:
    """Logits of packed experts, a token at a time after a prompt, against the same weights dequantized."""
    model = dense(bench, SHAPE | {"num_hidden_layers": 2} if not bench.dry else TINY)
    pack_experts(bench, model)
    ids = random.Random(1).choices(range(512), k=bench.pick(140, 40))
    reference = dequantized(model)
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids], device=bench.device)).logits[0, len(ids) - 11 :].float()
    del reference
    found = engine_logits(engine_over(bench, model), ids, (0, len(ids) - 10))
    bench.case("logits, packed experts", float((found - wanted).norm() / wanted.norm()), 0.05)


def timing(bench: Bench) -> None:
    """Decode steps of transformers' dense mixture, then of the packed one."""
    layers = fitting(bench)
    model = dense(bench, bench.pick(SHAPE, TINY) | {"num_hidden_layers": layers})
    rows: list[Row] = [{"batch": b, "depth": d, "layers": layers} for b, d in bench.pick(CELLS, ((1, 20), (2, 8)))]
    for row in rows[:2]:
        if bench.enough(f"transformers, batch {row['batch']}", bench.pick(20, 1)):
            bench.peer(
                row, "transformers_bf16_ms", lambda r=row: generate_ms(bench, model, r["batch"], r["depth"], False)
            )
    pack_experts(bench, model)
    engine = engine_over(bench, model)
    for row in rows:
        if bench.enough(f"packed, batch {row['batch']}", bench.pick(15, 1)):
            bench.ours(row, "packed_w4_ms", lambda r=row: decode_ms(bench, engine, r["batch"], r["depth"], r))
        bench.add(row)


def fitting(bench: Bench) -> int:
    """Layers whose dense experts take at most 0.7 of the free memory; the facts say how many the model has."""
    shape = bench.pick(SHAPE, TINY)
    each = 2 * shape["num_experts"] * 3 * shape["hidden_size"] * shape["moe_intermediate_size"]
    layers = min(shape["num_hidden_layers"], MOST_LAYERS, int(0.7 * bench.free_bytes() / each))
    if layers < 1:
        raise RuntimeError(f"not one layer of {each / 1e9:.1f} GB fits")
    bench.fact(config=shape | {"num_hidden_layers": layers}, layers_of_the_model=shape["num_hidden_layers"])
    return layers


def dense(bench: Bench, shape: dict[str, int]) -> Any:
    """A random Qwen3-MoE in bfloat16, made on the device."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **shape, tie_word_embeddings=False, norm_topk_prob=True, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(bench.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def pack_experts(bench: Bench, model: Any) -> None:
    """Every linear layer of the blocks becomes one of random 4-bit codes, experts one by one as an artifact has them."""
    for name in unfuse(model):
        experts = model.get_submodule(name)
        assert isinstance(experts, Experts)
        experts.compute = NativeExperts()
    bench.recover()
    bench.fact(kernels=pack(model, bench.device))


def dequantized(model: Any) -> Any:
    """A copy whose packed layers are plain ones with the same weights, multiplied by torch."""
    found = copy.deepcopy(model)
    for parent in list(found.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, CompressedLinear):
                setattr(parent, name, child.dense())
        if isinstance(parent, Experts):
            parent.compute = None
    return found


def engine_over(bench: Bench, model: Any) -> Engine:
    """What `runtime.load` would pick for the model."""
    engine = fused_engine(TorchEngine(model, bench.device))
    bench.fact(engine=engine.description)
    return engine
