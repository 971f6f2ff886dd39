"""Which models a policy can be for, found before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.kv_cache.calibrated import fingerprint
from runtime.kv_cache.policy_fields import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.kv_cache.policy import Policy


def check_policy(policy: Policy, config: Any) -> None:
    """PolicyError where a model of this config has nothing to compress, or the policy was calibrated for another."""
    from runtime.kv_cache.cache import compressed_layers
    from runtime.kv_cache.estimate import Shape
    from runtime.kv_cache.policy_checks import check_positions
    from runtime.skeleton import model_kind

    name = _name(config)
    kind = model_kind(config)
    if kind != "decoder":
        raise PolicyError(
            (), f"{name} is an {kind}; only causal language models have a cache that a policy can compress"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise PolicyError(
            (), f"{name} caches latents that keys and values are made of, not these (multi-latent attention)"
        )
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise PolicyError((), f"{name} has layers that share the cache of others, which compressed caches do not know")
    layers = compressed_layers(text) if getattr(text, "num_attention_heads", None) else []
    if not layers:
        windowed = ["sliding_attention"] if getattr(text, "sliding_window", None) else []
        kinds = sorted(set(getattr(text, "layer_types", None) or windowed))
        what = f" (its layers: {', '.join(kinds)})" if kinds else ""
        raise PolicyError((), f"{name} has no layer with full attention{what}, so there is no cache to compress")
    positions = getattr(text, "max_position_embeddings", None)
    if positions:
        check_positions(policy, int(positions), name)
    selecting = None if policy.select is None else getattr(policy.select.cls, "selecting", None)
    if policy.select is not None and selecting is not None:
        try:
            selecting(policy.select.build(), len(layers))
        except ValueError as error:
            reason = str(error).removeprefix(f"{policy.select.name}.select_layers ")
            raise PolicyError(("select", "select_layers"), f"{reason} ({name})") from error
    known = policy.calibrated
    if known is None:
        return
    own = fingerprint(config)
    if known.fingerprint != own:
        raise PolicyError(
            ("calibrated", "fingerprint"),
            f"the policy was calibrated for another model: its fingerprint is {known.fingerprint}, that of {name} is {own}",
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for field in ("gates", "channels"):
        table = getattr(known, field)
        if table is not None and (len(table), len(table[0])) != (len(layers), heads):
            found = f"{len(table)} layers of {len(table[0])} key heads"
            raise PolicyError(
                ("calibrated", field),
                f"they are for {found}; {name} has {len(layers)} layers with full attention, of {heads}",
            )
    size = Shape.of(config, torch.float32).sizes[0]
    beyond = [channel for layer in known.channels or () for head in layer for channel in head if channel >= size]
    if beyond:
        raise PolicyError(
            ("calibrated", "channels"),
            f"channel {beyond[0]} is outside the head size {size} of {name} (0 to {size - 1})",
        )
    wrong = [token for token in known.prefix_tokens or () if token >= text.vocab_size]
    if wrong:
        raise PolicyError(
            ("calibrated", "prefix_tokens"), f"token {wrong[0]} is outside the vocabulary of {text.vocab_size}"
        )


def check_module(module: PreTrainedModel) -> None:
    """PolicyError where the model's attention cannot be asked to read compressed caches."""
    name = type(module).__name__
    if not getattr(module, "_supports_attention_backend", False):
        text = "computes attention in a way of its own (not through transformers' attention interface), which reads no compressed cache"
        raise PolicyError((), f"{name} {text}")
    if any(part == "sinks" for full, _ in module.named_parameters() for part in full.rsplit(".", 1)[-1:]):
        raise PolicyError((), f"{name} has learned attention sinks, which compressed caches do not know")


def _name(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return str(named[0]) if named else str(getattr(config, "model_type", "the model"))
