"""Hyperparameters as GGUF's keys, rotary scaling among them (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from export.gguf import families
from export.gguf.plan import Planned
from export.source import Source
from export.target import Conversion

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.h, enum llama_ftype: what `general.file_type` calls the type that most bytes have.
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18,
    "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip
ROPE_FREQS = "rope_freqs.weight"
_SCALINGS = ("default", "linear", "llama3", "yarn")


def why_not(source: Source) -> str | None:
    """Why llama.cpp would place the positions elsewhere; None when it would not."""
    rope = _rope(source.config)
    kind = rope.get("rope_type", "default")
    if kind not in _SCALINGS:
        return f"its rotary embedding is scaled by {kind!r}, and this target writes {', '.join(_SCALINGS)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding turns only {rope['partial_rotary_factor']:g} of a head"
    if kind == "llama3" and not families.find(source).rope_factors:
        return f"llama.cpp reads no rotary factors (llama3 scaling) in {families.find(source).architecture}"
    if kind == "yarn" and rope.get("truncate", True) is False:
        return "its yarn scaling does not truncate (truncate: false), and llama.cpp's does"
    if kind == "yarn" and (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1) != (32, 1):
        return "its yarn scaling has beta_fast and beta_slow other than 32 and 1, which llama.cpp does not read for this model"
    if "rope_theta" not in rope:
        return "config.json has no rope_theta for all layers"
    return None


def conversions(source: Source) -> list[Conversion]:
    """A sliding window becomes a shorter context."""
    longest, window = int(source.config.max_position_embeddings), context_length(source)
    if window == longest:
        return []
    what = (
        f"context {longest} becomes {window}: llama.cpp has no sliding window in "
        f"{families.find(source).architecture}, so beyond it the two would differ"
    )
    return [Conversion(what, ("config.json",), bytes=0)]


def context_length(source: Source) -> int:
    """Tokens up to which llama.cpp and transformers compute the same."""
    longest = int(source.config.max_position_embeddings)
    window = _window(source.config)
    return longest if window is None else min(longest, window)


def write(writer: GGUFWriter, source: Source, tensors: list[Planned]) -> None:
    """Everything but the tokenizer."""
    import gguf

    config = source.config
    head = families.head_size(config)
    writer.add_type("model")
    writer.add_name(source.path.name)
    writer.add_size_label(_size_label(sum(math.prod(t.shape) for t in tensors)))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_FILE_TYPES[main_type(tensors)])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(context_length(source))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    _write_rope(writer, source)


def main_type(tensors: list[Planned]) -> str:
    """The number type that most bytes of matrices have."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) == 2:
            sizes[tensor.type] += tensor.bytes
    return sizes.most_common(1)[0][0]


def rope_factors(source: Source) -> torch.Tensor | None:
    """Float32 `[head_dim / 2]`: what llama.cpp divides each frequency by (llama3 scaling); None where there is no such tensor."""
    rope = _rope(source.config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    head = families.head_size(source.config)
    unscaled = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.int64).float() / head))
    return (unscaled / _scaled(source)[0].float()).contiguous()


def _write_rope(writer: GGUFWriter, source: Source) -> None:
    import gguf

    rope = _rope(source.config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        factor = float(rope["factor"])
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0  # llama.cpp multiplies its own by what is written
        writer.add_rope_scaling_attn_factors(_scaled(source)[1] / usual)


def _scaled(source: Source) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` and the factor of cos and sin, as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = _rope(source.config)["rope_type"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](source.config, torch.device("cpu"))
    return frequencies, float(factor)


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _window(config: Any) -> int | None:
    """The sliding window of the narrowest layer; None where all layers see everything."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    return None if kinds and "sliding_attention" not in kinds else int(window)


def _size_label(count: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)
