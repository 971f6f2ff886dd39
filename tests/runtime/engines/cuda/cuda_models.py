"""Tiny random models of the families, in their transformers form and taken over."""

from __future__ import annotations

from typing import Any

import torch
from fake_graph import Fake

from runtime.engines.cuda import CudaEngine
from runtime.engines.llama_structure import Program, read_program
from runtime.engines.torch.engine import TorchEngine

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
        "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 4, "mlp_only_layers": [0],
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
    return CudaEngine(TorchEngine(model, model.device), program, **{"page_size": 16, "capture": Fake(), **options})
