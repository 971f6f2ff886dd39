"""Sizes and counts of a config.json: impossible values are refused by field, before a model is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runtime.config.messages import show
from runtime.errors import ArtifactError

# Fields that count parts of a model or give their width, with the largest plausible value.
_MOST = {
    re.compile(r"(layers?|blocks|experts|depths?|heads?)$"): 2**14,
    re.compile(r"(size|dim|rank|width|channels|n_embd|n_inner|d_model|d_ff|d_kv|window)$"): 2**24,
}
# Fields that must be positive, by their names in the families of transformers.
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim", "hidden_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HEAD_SIZE = ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "qk_nope_head_dim")
_NEEDED = {
    *_WIDTH, *_HEADS, "num_key_value_heads", "vocab_size",
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size", "ffn_hidden_size",
    "n_inner", "d_ff",
}  # fmt: skip


def check_config(config: Any, where: str = "config.json") -> None:
    """Check the sizes and counts of a config and of the configs nested in it.

    Raises:
        ArtifactError: a required size or count is zero, negative or not an integer; one is so large that building the model would
            exhaust memory or time; or key-value heads do not divide the attention heads.
    """
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        most = next((most for pattern, most in _MOST.items() if pattern.search(str(key))), None)
        if most is not None and key in _NEEDED and value is not None and not isinstance(value, dict):
            each = value if isinstance(value, list) else [value]  # some families have a number for each layer
            least = 0 if isinstance(value, list) else 1
            if not each or any(type(one) is not int or not least <= one <= most for one in each):
                raise ArtifactError(f"{where}: {key} is {_short(value)}; expected an integer from 1 to {most:,}")
        elif most is not None and isinstance(value, int) and abs(value) > most:
            raise ArtifactError(f"{where}: {key} is {_short(value)}; at most {most:,} are allowed")
        if not str(key).startswith("quantization"):
            check_config(value, f"{where}: {key}")
    if reason := _uneven(config, _HEADS, ("num_key_value_heads",)):
        raise ArtifactError(f"{where}: {reason}")


def uneven_heads(config: Mapping[str, Any]) -> str | None:
    """Reason if heads do not divide the width; checked only after a config could not be used, because not all families require it."""
    if any(config.get(name) is not None for name in _HEAD_SIZE):
        return None
    return _uneven(config, _WIDTH, _HEADS)


def _uneven(config: Mapping[str, Any], wholes: tuple[str, ...], parts: tuple[str, ...]) -> str | None:
    for whole in wholes:
        for part in parts:
            one, other = config.get(whole), config.get(part)
            if type(one) is int and type(other) is int and other > 0 and one % other:
                return f"{whole} is {one}, which must be a multiple of {part}, {other}"
    return None


def _short(value: Any) -> str:
    return str(value)[:40] if type(value) is int else show(value)
