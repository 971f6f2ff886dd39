"""Tiny random mixtures of experts of many families, with their experts in one or one by one."""

from __future__ import annotations

import copy
from typing import Any

import program_families
import torch
from torch import nn

from runtime.layers.native_experts import NativeExperts
from runtime.modeling.experts import Experts, find_fused, unfuse

_ROUTED = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}
_SHARED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

#: As `program_families.FAMILIES`.
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {**_LOCAL, "sliding_window": None},
    "Qwen2Moe": {**_ROUTED, "shared_expert_intermediate_size": 44},
    "Qwen3Moe": {**_ROUTED, "head_dim": 20},
    "Qwen3Moe, weights of one": {**_ROUTED, "head_dim": 20, "norm_topk_prob": True, "num_experts_per_tok": 3},
    "GraniteMoe": {**_LOCAL, "residual_multiplier": 0.22, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "GraniteMoeShared": {**_LOCAL, "shared_intermediate_size": 44},
    "Olmoe": {**_LOCAL, "num_experts": 6},
    "GptOss": {**_LOCAL, "head_dim": 12, "sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "DeepseekV3": {**program_families.FAMILIES["DeepseekV3"], "moe_intermediate_size": 40},
    "Glm4Moe": {**_ROUTED, **_SHARED, "head_dim": 12, "n_group": 4, "topk_group": 2},
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Any:
    """A random model in float32; the vectors that routers add are random too."""
    model = program_families.model_of(name, **{**MIXTURES[name], **changes})
    for key, parameter in model.named_parameters():
        if key.endswith(("_proj_bias", "router.bias", "sinks")):
            parameter.data = torch.randn_like(parameter) / 4
    for key, buffer in model.named_buffers():
        if "correction" in key:
            buffer.normal_(0, 0.2)
    return model


def apart(model: Any) -> Any:
    """A copy with its experts one by one."""
    found = copy.deepcopy(model)
    held = {home: dict(model.get_submodule(home).named_parameters(recurse=False)) for home in find_fused(model)}
    for home in unfuse(found):
        experts: Any = found.get_submodule(home)
        assert isinstance(experts, Experts)
        layout = experts.layout
        for number in range(layout.count):
            for projection in layout.projections:
                layer = experts[number].get_submodule(projection)
                for bias in (False, True) if layout.bias else (False,):
                    value = layout.part(projection, held[home][layout.home(projection, bias)][number].detach(), bias)
                    setattr(layer, "bias" if bias else "weight", nn.Parameter(value.clone(), requires_grad=False))
        experts.compute = NativeExperts()
    return found
