"""Tiny random models of the families, in their transformers form and taken over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fake_graph import Fake
from torch import nn
from weight_cases import random_weight

from runtime import formats
from runtime.engines.cuda import CudaEngine
from runtime.engines.llama_structure import Program, read_program
from runtime.engines.torch.engine import TorchEngine
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.representation import Tensors
from runtime.formats.scheme import GridScheme, Scheme
from runtime.kernels import Choice
from runtime.kernels.base import Layer
from runtime.kernels.triton.jit import MissingKernelError
from runtime.kernels.triton.linear import W4A16Triton, W8A16Triton, WeightOnlyTriton
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts, find_fused, unfuse

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, a head each": {"num_key_value_heads": 4},
    "Llama, one head for all": {"num_key_value_heads": 1, "attention_bias": True},
    "Llama 3 rotation": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Qwen2": {},
    "Qwen2, windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": None},
    "Mistral, window": {"sliding_window": 11},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "head_dim": 32, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
    },
    "Qwen3Moe, one dense layer": {
        "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "mlp_only_layers": [0],
    },
}  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    """A random model of the family, float32; biases and norms are random too."""
    import transformers

    family = name.split(",")[0].split()[0]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES.get(name, {}), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if key.endswith("bias") else 1.0, 0.2)
    return model


def engine(model: Any, fuse: bool = True, **options: Any) -> CudaEngine:
    """The engine over it, where it is; decode steps are captured by `fake_graph.Fake` unless `capture` says otherwise."""
    program = read_program(model, fuse)
    assert isinstance(program, Program), program
    return CudaEngine(
        TorchEngine(model, model.device), program, **{"page_size": 16, "capture": Fake(every=16), **options}
    )


W4 = Scheme(GridScheme(4, "int", False, "group", 16))
W8 = Scheme(GridScheme(8, "int", True, "channel"))


class InTorch(WeightOnlyTriton):
    """The layout of a kernel, multiplied in torch."""

    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        raise MissingKernelError


class FourBits(InTorch, W4A16Triton):
    pass


class EightBits(InTorch, W8A16Triton):
    pass


def apart(model: Any) -> Any:
    """The model with its experts one by one, dense."""
    held = {name: dict(model.get_submodule(name).named_parameters(recurse=False)) for name in find_fused(model)}
    for name in unfuse(model):
        experts: Any = model.get_submodule(name)
        for number, expert in enumerate(experts.one_by_one()):
            for projection in experts.layout.projections:
                weight = held[name][experts.layout.home(projection)][number].detach()
                part = experts.layout.part(projection, weight).clone()
                expert.get_submodule(projection).weight = nn.Parameter(part, requires_grad=False)
    return model


def packed(model: Any, scheme: Scheme = W4, dtype: torch.dtype = torch.float16) -> Any:
    """The model with experts of random codes, as kernels on GPUs read them."""
    model, bits = apart(model.to(dtype)), scheme.grid
    assert bits is not None
    kernel = (FourBits if bits.bits <= 4 else EightBits)("cpu")
    for experts in [each for each in model.modules() if isinstance(each, Experts)]:
        for number, expert in enumerate(experts.one_by_one()):
            for name in experts.layout.projections:
                old: Any = expert.get_submodule(name)
                shape = (old.out_features, old.in_features)
                weight = random_weight(scheme, shape, dtype, seed=3 * number + len(name))
                small = replace(weight, scale=weight.scale / 2 ** (bits.bits - 4))  # type: ignore[operator]
                tensors = formats.get("packed").pack(small)
                layer = CompressedLinear.from_tensors(ModuleEntry(scheme, "packed"), shape, tensors, None, dtype)
                layer.prepare(choice=Choice(kernel, kernel, kernel))
                setattr(expert, name, layer)
    return model
