"""Model families that llama.cpp computes as transformers does, and the names of their tensors there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from export.source import Source
from runtime.modeling.layer_sizes import differing

_Q_K = frozenset({"attn_q", "attn_k"})
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
# Buffers that old checkpoints store and every engine computes for itself.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Family:
    """What llama.cpp knows of one model type (its `src/models/*.cpp`).

    Attributes:
        architecture: `general.architecture`.
        causal: transformers' class.
        permuted: q and k rows lie in pairs (rope of neighbours) instead of halves.
        biases: kinds of tensors whose bias it adds; another bias would be left out of the computation.
        square: heads * head_dim must be the hidden size.
        rope_factors: it reads a factor for each rotary frequency (`rope_freqs.weight`).
    """

    architecture: str
    causal: str
    permuted: bool
    biases: frozenset[str]
    square: bool = False
    rope_factors: bool = False


_LLAMA_BIASES = _QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", True, _LLAMA_BIASES, rope_factors=True),
    "mistral": Family("llama", "MistralForCausalLM", True, _LLAMA_BIASES, rope_factors=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", False, _QKV, square=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", False, _QKV),
}


def find(source: Source) -> Family:
    """The family of an artifact that `why_not` has passed."""
    return FAMILIES[source.config.model_type]


def why_not(source: Source) -> str | None:
    """Why llama.cpp would not compute what this model computes, from its config and the names of its tensors; None when it would."""
    config = source.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"model type {config.model_type!r} is none that this target knows ({', '.join(FAMILIES)})"
    if type(source.skeleton).__name__ != family.causal:
        return f"the model is a {type(source.skeleton).__name__}, and only {family.causal} is written"
    different = ", ".join(sorted(differing(config)))
    if different:
        return f"its layers differ in {different}, and llama.cpp builds those of {family.architecture} alike"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, and llama.cpp computes {family.architecture} with silu"
    if family.square and config.num_attention_heads * head_size(config) != config.hidden_size:
        return (
            f"{config.num_attention_heads} heads of {head_size(config)} are not the hidden size {config.hidden_size}, "
            f"which llama.cpp takes for granted in {family.architecture}"
        )
    if getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    return _why_not_tensors(source, family)


def head_size(config: Any) -> int:
    """Columns of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def heads_of(source: Source, name: str) -> int | None:
    """How many heads the rows of this tensor (its name in GGUF) are permuted for; None where they keep their order."""
    if not find(source).permuted or kind(name) not in _Q_K:
        return None
    config = source.config
    return int(config.num_attention_heads if kind(name) == "attn_q" else config.num_key_value_heads)


def permuted_rows(count: int, heads: int) -> torch.Tensor:
    """int64 `[count]`: row i of the GGUF tensor is this row of transformers' q_proj or k_proj.

    llama.cpp rotates neighbours, transformers the two halves of a head.
    """
    return torch.arange(count).view(heads, 2, count // heads // 2).transpose(1, 2).reshape(-1)


def kind(name: str) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`, `output_norm.weight` -> `output_norm`."""
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" else parts[0]


def names(source: Source) -> dict[str, str | None]:
    """{parameter of the model: its name in GGUF, None where GGUF has no tensor for it}, in the model's order."""
    import gguf

    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[find(source).architecture]
    table = gguf.get_tensor_name_map(architecture, source.config.num_hidden_layers)
    return {
        parameter: table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        for parameter, _ in source.skeleton.named_parameters(remove_duplicate=False)
    }


def computed(source: Source) -> list[str]:
    """Stored tensors that llama.cpp computes for itself (inverse frequencies of the rotary embedding)."""
    return [name for name in source.dense_names() if _COMPUTED.match(name)]


def _why_not_tensors(source: Source, family: Family) -> str | None:
    """Every parameter must be stored (or tied) and have a name in GGUF, and nothing else may be stored."""
    from export.target import missing_packages

    if missing_packages(("gguf",)):  # then the export is refused for that, by the package's name
        return None
    mapped, stored = names(source), source.artifact.checkpoint
    for parameter, name in mapped.items():
        if name is None:
            return f"tensor {parameter} has no place in GGUF's {family.architecture}"
        if name.endswith(".bias") and kind(name) not in family.biases:
            return f"tensor {parameter} is a bias that llama.cpp does not add in {family.architecture}"
        module = parameter.rpartition(".")[0]
        compressed = module in source.entries and parameter.endswith(".weight")
        if not compressed and not stored.has(parameter) and parameter not in source.tied:
            return f"tensor {parameter} is missing in the artifact"
    known = set(mapped) | set(computed(source))
    for tensor in source.dense_names():
        if tensor not in known:
            return f"tensor {tensor} belongs to no parameter of {family.causal}, so it has no place in GGUF"
    return None
