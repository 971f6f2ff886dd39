"""Which models a policy can be for, found before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from runtime.kv_cache.calibrated import fingerprint
from runtime.kv_cache.layer_configs import layer_configs
from runtime.kv_cache.policy_fields import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.kv_cache.cache import CompressedCache
    from runtime.kv_cache.policy import Policy


def check_policy(policy: Policy, config: Any) -> None:
    """PolicyError where a model of this config has nothing to compress, or the policy was calibrated for another."""
    from runtime.kv_cache.cache import compressed_layers
    from runtime.kv_cache.policy_checks import check_positions
    from runtime.kv_cache.shape import Shape
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
    parts = layer_configs(text)
    layers = compressed_layers(text) if any(getattr(part, "num_attention_heads", None) for part in parts) else []
    if not layers:
        windowed = ["sliding_attention"] if any(getattr(part, "sliding_window", None) for part in parts) else []
        kinds = sorted(set(getattr(text, "layer_types", None) or windowed))
        if "hybrid" in kinds:
            raise PolicyError(
                (),
                f"{name} has layers of attention and a recurrent state side by side (hybrid), which compressed caches do not know",
            )
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
    shapes = Shape.of(config, torch.float32).layers
    for field in ("gates", "channels"):
        table = getattr(known, field)
        if table is not None and [len(row) for row in table] != [shape.heads for shape in shapes]:
            found = f"{len(table)} layers of {_several(len(row) for row in table)} key heads"
            heads = _several(shape.heads for shape in shapes)
            raise PolicyError(
                ("calibrated", field),
                f"they are for {found}; {name} has {len(layers)} layers with full attention, of {heads}",
            )
    for layer, shape in zip(known.channels or (), shapes, strict=False):  # as many, if there are any
        size = shape.sizes[0]
        beyond = [channel for head in layer for channel in head if channel >= size]
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
    """PolicyError where the code of the model's attention cannot be asked to read compressed caches; weights may be on meta."""
    name = type(module).__name__
    # Not `_supports_attention_backend`: many families call the interface without saying so.
    if not module._can_set_attn_implementation():
        text = "computes attention in a way of its own (not through transformers' attention interface), which reads no compressed cache"
        raise PolicyError((), f"{name} {text}")
    if any(part == "sinks" for full, _ in module.named_parameters() for part in full.rsplit(".", 1)[-1:]):
        raise PolicyError((), f"{name} has learned attention sinks, which compressed caches do not know")


@torch.inference_mode()
def probe(module: PreTrainedModel) -> None:
    """Run two tokens over a compressed cache where transformers itself does not vouch for the model's attention.

    Those that it vouches for are asked by `check_asked` after each forward pass; a model that is read from a disk layer by layer
    need not be read once more for it.

    Args:
        module: prepared, its weights in place.

    Raises:
        PolicyError: a layer's attention did not ask its cache, or has an argument that compressed caches do not know.
    """
    from runtime.kv_cache.cache import CompressedCache

    if getattr(module, "_supports_attention_backend", False):
        return
    try:
        cache = CompressedCache(module)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
        module(input_ids=ids, past_key_values=cache, use_cache=True)
    except ValueError as error:
        raise PolicyError((), str(error)) from error
    check_asked(module, cache, 2)


def check_asked(module: PreTrainedModel, cache: CompressedCache, tokens: int) -> None:
    """PolicyError where a layer's attention did not ask the cache for what it holds: its output would be wrong, not slow.

    Args:
        module: the model.
        cache: what it has filled.
        tokens: how many have come, padding included.
    """
    from runtime.kv_cache.layer import CompressedLayer

    for layer in cache.layers:
        if isinstance(layer, CompressedLayer) and layer.seen != tokens:
            text = "computes attention in a way that does not read compressed caches; load it with kv_cache=False"
            raise PolicyError((), f"{type(module).__name__} {text}")


def _several(numbers: Iterable[int]) -> str:
    """One number, or the different ones: "2", "1, 4"."""
    return ", ".join(str(number) for number in sorted(set(numbers)))


def _name(config: Any) -> str:
    named = getattr(config, "architectures", None)
    return str(named[0]) if named else str(getattr(config, "model_type", "the model"))
