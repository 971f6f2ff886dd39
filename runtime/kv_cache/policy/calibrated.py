"""What `compress apply` has found for a policy, and the model it was found on."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from runtime.config.fields import Path, PolicyError, mapping, text
from runtime.kv_cache.shape import layer_configs
from runtime.system.describe import is_integer

_CONFIG = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rope_parameters", "layer_types", "sliding_window", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "hidden_act",
    "hidden_activation", "attention_bias", "mlp_bias", "attn_logit_softcapping", "query_pre_attn_scalar", "bos_token_id",
)  # fmt: skip
_DIGITS = 16


@dataclass(frozen=True)
class Calibrated:
    """Facts about one model.

    Attributes:
        fingerprint: of the model (`fingerprint`).
        gates: `[layers][kv_heads]` in [0, 1]: which heads retrieve (DuoAttention).
        channels: `[layers][kv_heads][count]`: channels of the keys that tell scores (Double Sparsity).
        prefix_tokens: ids that are put before every prompt (PrefixQuant).
        notes: what else is known: `seconds` that calibration took and `facts` about what was found.
    """

    fingerprint: str
    gates: tuple[tuple[float, ...], ...] | None = None
    channels: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    prefix_tokens: tuple[int, ...] | None = None
    notes: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def found(self) -> frozenset[str]:
        """What there is of gates, channels and prefix_tokens."""
        return frozenset(name for name in ("gates", "channels", "prefix_tokens") if getattr(self, name) is not None)

    @classmethod
    def parse(cls, value: Any, path: Path) -> Calibrated:
        """Raises PolicyError where it is not what calibration writes."""
        given = mapping(
            path, value, ["fingerprint", "gates", "channels", "prefix_tokens", "seconds", "facts"],
            "what calibration writes",
        )  # fmt: skip
        if "fingerprint" not in given:
            raise PolicyError(path, "the key 'fingerprint' is missing; it says which model was calibrated")
        notes: dict[str, Any] = {name: given[name] for name in ("seconds", "facts") if name in given}
        for name, note in notes.items():
            try:
                json.dumps(note, allow_nan=False)
            except (TypeError, ValueError):
                raise PolicyError((*path, name), "expected plain JSON values") from None

        def table(name: str, depth: int, check: Any, what: str) -> Any:
            found = given.get(name)
            return None if found is None else _nested((*path, name), found, depth, check, what)

        return cls(
            text((*path, "fingerprint"), given["fingerprint"]),
            table("gates", 2, _is_gate, "lists of numbers from 0 to 1, one list a layer and one number a key head"),
            table("channels", 3, _is_index, "lists of channels (integers), one list a layer and key head"),
            table("prefix_tokens", 1, _is_index, "a list of token ids"),
            notes,
        )

    def resolved(self) -> dict[str, Any]:
        """As JSON; `parse` gives it back."""
        result: dict[str, Any] = {"fingerprint": self.fingerprint}
        for name in ("gates", "channels", "prefix_tokens"):
            value = getattr(self, name)
            if value is not None:
                result[name] = _lists(value)
        return result | self.notes


def fingerprint(config: Any) -> str:
    """Of the architecture in a model's config, its vocabulary's size and the token that texts begin with: 16 hexadecimal digits.

    The fields are those that decide the shapes of all weights, and so how many there are, how attention computes, and which ids can
    stand in a prefix. Values of weights are left out: none of them survives all that may be done to a model whose policy should still
    hold. Matrices and embeddings are quantized or pruned, norms are scaled by methods that fold channels into them, and finetuning
    changes everything a little. So two models trained apart on one architecture are not told from each other. Left out too is what
    compression or a reader of the config changes: dtypes, the length of the context, whether embeddings are tied.
    """
    inner = config.get_text_config(decoder=True)
    facts = {name: _fact(inner, name) for name in _CONFIG}
    written = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(written.encode()).hexdigest()[:_DIGITS]


def _fact(config: Any, name: str) -> Any:
    """A field of a config: one value, or one a layer where layers differ (Gemma 4's head sizes), which the config as a whole refuses."""
    values = [getattr(layer, name, None) for layer in layer_configs(config)]
    return values[0] if all(value == values[0] for value in values) else values


def _nested(path: Path, value: Any, depth: int, check: Any, what: str) -> Any:
    if depth == 0:
        if not check(value):
            raise PolicyError(path[:-1], f"expected {what}, got {value!r:.40}")
        return value
    if not isinstance(value, (list, tuple)):
        raise PolicyError(path, f"expected {what}")
    return tuple(_nested((*path, place), part, depth - 1, check, what) for place, part in enumerate(value))


def _is_gate(value: Any) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value) and 0 <= value <= 1


def _is_index(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**31


def _lists(value: Any) -> Any:
    return [_lists(part) for part in value] if isinstance(value, tuple) else value
