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
from gpu_sections.llama import decode_ms, engine_logits, generate_ms, lean, pack, prefill_ms
from runtime.engines.cuda import CudaEngine
from runtime.kernels import Choice
from runtime.kernels.triton.linear import W4A16Triton
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
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 1,
    "max_position_embeddings": 512,
}  # fmt: skip
CELLS = ((1, 512), (8, 512), (32, 512))
PREFILL = ((1, 2048),)
LAYER = (16, 8)  # of a layer's check: experts, and choices of a token
TOKENS = (1, 2, 3, 16, 33, 65, 200, 2100)  # every size of blocks
MOST_LAYERS = 12


def check(bench: Bench) -> None:
    """Layers of experts against float64; then logits, a token at a time after a prompt, against the same weights dequantized."""
    from runtime.kernels.triton import experts
    from runtime.kernels.triton.layout import DENSE

    (count, choices), dtype = LAYER, torch.bfloat16
    assert {experts.block_rows(tokens * choices, count, dtype) for tokens in TOKENS} == set(experts.ROWS)
    cases = [(field, 32, tokens) for field in (4, DENSE) for tokens in bench.pick(TOKENS, (1, 9))]
    for field, group, tokens in [*cases, *((8, 128, tokens) for tokens in bench.pick((2, 33, 2100), ()))]:
        kind = "dense" if field == DENSE else f"{field}-bit"
        name = f"{kind} experts, {tokens} tokens"
        if bench.enough(name):
            bench.case(name, layer_error(bench, tokens, field, group), 1e-2)
    model = dense(bench, SHAPE | {"num_hidden_layers": 2} if not bench.dry else TINY)
    pack_experts(bench, model)
    steps = bench.pick(10, 4)
    ids = random.Random(1).choices(range(512), k=bench.pick(140, 24))
    reference = dequantized(model)
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids], device=bench.device)).logits[0, len(ids) - steps - 1 :].float()
    del reference
    found = engine_logits(engine_over(bench, model), ids, (0, len(ids) - steps))
    bench.case("logits, packed experts", float((found - wanted).norm() / wanted.norm()), 0.05)


def layer_error(bench: Bench, tokens: int, field: int, group: int) -> float:
    """Relative error of a layer's experts for rows of random numbers; NaN if a second call differs."""
    from triton_references import dequantize

    from gpu_sections.kernel_cases import int_weight
    from runtime.kernels.triton import experts, routing
    from runtime.kernels.triton.layout import DENSE, Stack

    count, choices, hidden, inner = bench.pick((*LAYER, 2048, 768), (4, 2, 64, 32))
    device = bench.device
    torch.manual_seed(tokens)

    def weights(n: int, k: int) -> tuple[Stack, torch.Tensor]:
        """Of all experts, and as they are multiplied."""
        if field == DENSE:
            every = (torch.randn(count, n, k, device=device) / k**0.5).bfloat16()
            return Stack.dense(every), every.double()
        some = [int_weight(n, k, group, field, device.type, True, seed) for seed in range(count)]
        words, scale, zero = (torch.stack(each) for each in zip(*(w.operands for w in some), strict=True))
        matrices = torch.stack([dequantize(w, torch.bfloat16).double() for w in some])
        return Stack(words, scale, zero, (n, k), group, field), matrices

    (gate_up, wide), (down, narrow) = weights(2 * inner, hidden), weights(hidden, inner)
    x, logits = (torch.randn(tokens, size, device=device).bfloat16() for size in (hidden, count))
    chosen, shares = routing.route(logits, choices, True)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    for expert in range(count):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ wide[expert].t()).bfloat16().chunk(2, -1)
        given = (torch.nn.functional.silu(gate) * up).double() @ narrow[expert].t()
        wanted.index_add_(0, token, given * shares[token, choice, None].double())
    y, again = (experts.experts(x, chosen, shares, gate_up, down) for _ in range(2))
    return float((y.double() - wanted).norm() / wanted.norm()) if torch.equal(y, again) else float("nan")


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
        engine.trim()
    for batch, length in bench.pick(PREFILL, ((1, 7),)):
        if bench.enough(f"packed, prefill, {length} tokens", bench.pick(15, 1)):
            row = {"batch": batch, "prompt": length, "layers": layers}
            bench.ours(row, "prefill_ms", lambda b=batch, n=length: prefill_ms(bench, engine, b, n))
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
    if bench.dry:  # as a GPU has them, interpreted
        kernel = W4A16Triton("cpu")
        for experts in [each for each in model.modules() if isinstance(each, Experts)]:
            for layer in experts.modules():
                if isinstance(layer, CompressedLinear):
                    layer.prepare(choice=Choice(kernel, kernel, kernel))


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


def engine_over(bench: Bench, model: Any) -> CudaEngine:
    """The fused engine, which computes all experts of a layer together; RuntimeError where it does not take the model."""
    engine = lean(model, bench, graphs=True)
    if any(each.stacks is None for each in engine.parts.mixtures) or engine.decoder.ops.name == "torch":
        raise RuntimeError(f"experts would be computed one by one: {engine.description}")
    return engine
