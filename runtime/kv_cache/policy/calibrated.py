"""Calibration of a policy as artifacts hold it: what was found for its methods, and the model it was found on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.config.settings import Calibration, ConfigError, Path, Text, calibrations_of, mapping, read
from runtime.kv_cache.policy.registries import PREFIX_TOKENS, SCORES, SELECTIONS
from runtime.kv_cache.shape import layer_configs

_CONFIG = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rope_parameters", "layer_types", "sliding_window", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "hidden_act",
    "hidden_activation", "attention_bias", "mlp_bias", "attn_logit_softcapping", "query_pre_attn_scalar", "bos_token_id",
)  # fmt: skip
_DIGITS = 16
_NOTES = ("seconds", "facts")


def calibrations() -> dict[str, Calibration]:
    """Everything that a policy may have calibrated, by name."""
    found = {PREFIX_TOKENS.name: PREFIX_TOKENS}
    for registry in (SCORES, SELECTIONS):
        for method in registry:
            found |= calibrations_of(method.load())
    return found


@dataclass(frozen=True)
class Calibrated:
    """Facts about one model.

    Attributes:
        fingerprint: of the model (`fingerprint`).
        values: what was found, by the name of the method's field ("gates", "channels") or "prefix_tokens"; lists are tuples.
        notes: `seconds` that calibration took and `facts` for the report.
    """

    fingerprint: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    notes: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def found(self) -> frozenset[str]:
        """Names of what there is."""
        return frozenset(self.values)

    @classmethod
    def parse(cls, value: Any, path: Path) -> Calibrated:
        """Raises ConfigError where it is not what calibration writes."""
        known = calibrations()
        given = mapping(path, value, ["fingerprint", *known, *_NOTES], "what calibration writes")
        if "fingerprint" not in given:
            raise ConfigError(path, "the key 'fingerprint' is missing; it says which model was calibrated")
        notes: dict[str, Any] = {name: given[name] for name in _NOTES if name in given}
        for name, note in notes.items():
            try:
                json.dumps(note, allow_nan=False)
            except (TypeError, ValueError):
                raise ConfigError((*path, name), "expected plain JSON values") from None
        values = {
            name: read(known[name].kind, given[name], (*path, name)) for name in known if given.get(name) is not None
        }
        for name, table in values.items():
            if known[name].per_head and not _is_regular(table):
                text = "every layer must have as many entries, one a key head, and every head as many values"
                raise ConfigError((*path, name), text)
        return cls(read(Text, given["fingerprint"], (*path, "fingerprint")), values, notes)

    def resolved(self) -> dict[str, Any]:
        """As JSON; `parse` gives it back."""
        return {
            "fingerprint": self.fingerprint,
            **{name: _lists(value) for name, value in self.values.items()},
            **self.notes,
        }

    def joined(self, other: Calibrated) -> Calibrated:
        """With what was found for the same model beside it."""
        notes = {
            name: {**self.notes.get(name, {}), **other.notes.get(name, {})}
            for name in _NOTES
            if name in self.notes or name in other.notes
        }
        return Calibrated(self.fingerprint, {**self.values, **other.values}, notes)


def fingerprint(config: Any) -> str:
    """Of the architecture in a model's config, its vocabulary's size and the token that sequences begin with: 16 hexadecimal digits.

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


def _is_regular(table: Any) -> bool:
    """Whether nested tuples have one shape, without an empty axis."""
    try:
        return torch.tensor(table).numel() > 0
    except ValueError:
        return False


def _lists(value: Any) -> Any:
    return [_lists(part) for part in value] if isinstance(value, tuple) else value
