"""Sizes of a model in its config, and configs with smaller ones.

Names are those that transformers' configs share. Which tensors a size decides is observed (`couplings`): a model is built from the smaller
config, and the tensors whose shapes differ are those that have to be cut.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from runtime.errors import RequestError
from runtime.modeling.layer_sizes import differing, overrides, uniform, with_overrides

if TYPE_CHECKING:
    from transformers import PretrainedConfig

What = Literal["ffn", "heads", "hidden", "layers", "experts", "vocabulary"]
UNITS: dict[What, str] = {
    "ffn": "channels", "heads": "heads", "hidden": "dimensions", "layers": "layers", "experts": "experts", "vocabulary": "tokens",
}  # fmt: skip
_NAMES: dict[What, tuple[str, ...]] = {
    "ffn": ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_layers"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "vocabulary": ("vocab_size",),
}
_GROUPS = ("num_key_value_heads",)
_WIDTHS = ("head_dim", "d_kv")  # of a head, where a config can say it
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
_EXPERT_GROUPS = ("n_group", "num_expert_group")  # of which a router picks some before it picks experts in them


@dataclass(frozen=True)
class Size:
    """One size of a model.

    Attributes:
        what: which.
        count: units there are: channels of a feed-forward network, key and value heads with the query heads that read them, dimensions of
            the hidden state, layers of a stack, routed experts of a layer.
        unit: name of the units, for messages.
        members: query heads of a unit (heads only).
        least: units that must stay.
        groups: in each of which equally many units must stay (experts only).
    """

    what: What
    count: int
    unit: str
    members: int = 1
    least: int = 1
    groups: int = 1


def size_of(config: PretrainedConfig, what: What) -> Size:
    """What a config says.

    Raises:
        RequestError: it has no such size, or several that differ.
    """
    text = _text(config)
    count = _one(text, what)
    if what == "experts":
        return _experts(text, count)
    if what != "heads":
        return Size(what, count, UNITS[what])
    groups = _first(text, _GROUPS)
    groups = count if groups is None else groups
    if groups < 1 or count % groups:
        raise RequestError(f"a {config.model_type} has {count} heads and {groups} for keys and values: no whole groups")
    unit = "heads" if groups == count else f"groups of {count // groups} heads"
    return Size(what, groups, unit, count // groups)


def resized(config: PretrainedConfig, what: What, count: int) -> PretrainedConfig:
    """A copy of the config with `count` units, 1 to as many as there are. Layers: the first so many (see `with_layers`)."""
    size = size_of(config, what)
    if not size.least <= count <= size.count:
        raise RequestError(f"{size.unit} that stay: {size.least} to {size.count}, not {count}")
    if what == "layers":
        return with_layers(config, list(range(count)))
    smaller: Any = copy.deepcopy(config)
    text = _text(smaller)
    width = _head_width(text) if what in ("heads", "hidden") else None
    _set(text, _NAMES[what], count * size.members)
    if what == "heads":
        _set(text, _GROUPS, count)
    if width is not None:
        _set_width(text, width)
    # New ids are not known here (see `compress.prune.structure.vocabulary`); a model is not built with padding that is no token.
    if what == "vocabulary" and isinstance(pad := getattr(text, "pad_token_id", None), int) and pad >= count:
        text.pad_token_id = 0
    if (
        what == "ffn" and getattr(text, "n_inner", 0) is None
    ):  # GPT-2 takes four times its hidden size where it says nothing
        text.n_inner = count
    return smaller  # type: ignore[no-any-return]


def with_wider_heads(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of the config with heads of twice the width; a model whose config cannot say that is built as before."""
    wider: Any = copy.deepcopy(config)
    text = _text(wider)
    _set_width(text, 2 * _head_width(text))
    return wider  # type: ignore[no-any-return]


def layer_lists(config: PretrainedConfig) -> dict[str, Any]:
    """What a config says of each layer in a list."""
    depth = size_of(config, "layers").count
    found = _text(config).to_dict().items()
    return {
        key: value
        for key, value in found
        if "layer" in key and isinstance(value, (list, tuple)) and len(value) == depth
    }


def with_layers(config: PretrainedConfig, kept: list[int]) -> PretrainedConfig:
    """A copy of the config with these layers of every stack; what it says of each layer goes with it."""
    layers = overrides(config)
    smaller: Any = uniform(config) if layers else copy.deepcopy(config)
    text = _text(smaller)
    for key, value in layer_lists(smaller).items():
        setattr(text, key, [value[index] for index in kept])
    _set(text, _NAMES["layers"], len(kept))
    if not layers:
        return smaller  # type: ignore[no-any-return]
    return with_overrides(smaller, {new: layers[old] for new, old in enumerate(kept) if old in layers})


def with_widths(config: PretrainedConfig, widths: Sequence[int]) -> PretrainedConfig:
    """A copy of the config whose layers have so many channels in their feed-forward networks, each its own number.

    Raises:
        RequestError: not one for each layer, more than there are, or the model has two stacks of layers.
    """
    size, depth = size_of(config, "ffn"), size_of(config, "layers").count
    if config.is_encoder_decoder:
        raise RequestError(
            f"a {config.model_type} has two stacks, and its config cannot say of which a layer's width is"
        )
    if len(widths) != depth:
        raise RequestError(f"the model has {depth} layers, and {len(widths)} widths are given")
    if not all(1 <= width <= size.count for width in widths):
        raise RequestError(f"{size.unit} that stay: 1 to {size.count}, not {list(widths)}")
    widest = resized(config, "ffn", max(widths))
    text = _text(widest)
    names = [name for name in _NAMES["ffn"] if isinstance(getattr(text, name, None), int)]
    layers = overrides(config)
    for layer, width in enumerate(widths):
        if width != max(widths):
            layers.setdefault(layer, {}).update(dict.fromkeys(names, width))
    return with_overrides(widest, layers)


def active_experts(config: PretrainedConfig) -> int | None:
    """Routed experts that a token is sent to; None where the config names none."""
    text = _text(config)
    for name in _ACTIVE:
        value = getattr(text, name, None)
        if isinstance(value, (list, tuple)) and value:  # an entry for each layer
            value = max(value)
        if isinstance(value, int):
            return value
    return None


def number_of_experts(config: PretrainedConfig) -> int | None:
    """Routed experts of a layer; None where the config names none."""
    return _first(_text(config), _NAMES["experts"])


def _experts(text: Any, count: int) -> Size:
    """Where a router picks groups first, equally many experts must stay in each, and enough for a token in the groups that it picks."""
    active, groups = active_experts(text), _first(text, _EXPERT_GROUPS)
    if count < 2:
        raise RequestError(f"a {text.model_type} has no experts of which some could go (its config says {count})")
    if active is None:
        raise RequestError(f"the config of a {text.model_type} does not say how many experts a token is sent to")
    if groups is None:
        return Size("experts", count, UNITS["experts"], least=active)
    chosen = getattr(text, "topk_group", None)
    if groups < 1 or count % groups or not isinstance(chosen, int) or chosen < 1:
        raise RequestError(
            f"a {text.model_type} routes {count} experts in {groups} groups of which it picks {chosen}: no whole groups"
        )
    each = max(2, -(-active // chosen))  # groups are compared by their two best
    return Size("experts", count, UNITS["experts"], least=groups * each, groups=groups)


def _one(text: Any, what: What) -> int:
    """The one value that the names of a size have."""
    names = _NAMES[what]
    different = sorted(differing(text) & set(names))
    if different:
        raise RequestError(
            f"the layers of this {text.model_type} differ in {different[0]}, so that they cannot be cut alike"
        )
    found = {name: value for name in names if isinstance(value := getattr(text, name, None), int)}
    if not found and what == "ffn" and hasattr(text, "n_inner"):
        return 4 * int(text.hidden_size)
    if not found:
        raise RequestError(f"the config of a {text.model_type} does not say how many {UNITS[what]} it has")
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} {value}" for name, value in found.items())
        raise RequestError(f"a {text.model_type} has several sizes ({told}), which cannot be cut together")
    return next(iter(found.values()))


def _set(text: Any, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if hasattr(text, name):
            setattr(text, name, value)


def _head_width(text: Any) -> int:
    """Numbers of a head: what the config says, or as many as its share of the hidden size is."""
    return _first(text, _WIDTHS) or _one(text, "hidden") // _one(text, "heads")


def _first(text: Any, names: tuple[str, ...]) -> int | None:
    """The number that the config has under the first of these names; None: it has none."""
    return next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)


def _set_width(text: Any, width: int) -> None:
    """Set the width of a head, even where the config did not name it: most models then build such heads, and shapes show which do not."""
    named = [name for name in _WIDTHS if hasattr(text, name)]
    for name in named or _WIDTHS[:1]:
        if not isinstance(getattr(type(text), name, None), property):  # Falcon's is computed
            setattr(text, name, width)


def _text(config: Any) -> Any:
    """The part of a config that describes the language model, to be changed in place."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)
