"""The sizes of a model that its config decides: read, and set to something smaller.

Names are those that transformers' configs share; what they really decide is not looked up but seen (`couplings`): a model is built from the
smaller config, and the tensors whose shapes differ are those that have to be cut.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

What = Literal["ffn", "heads", "hidden", "layers"]
_FFN = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads")
_GROUPS = ("num_key_value_heads",)
_WIDTHS = ("head_dim", "d_kv")  # of a head, where a config can say it
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_layers")
_UNITS = {"ffn": "channels", "heads": "heads", "hidden": "dimensions", "layers": "layers"}


@dataclass(frozen=True)
class Size:
    """One size of a model.

    Attributes:
        what: which.
        count: units there are: channels of a feed-forward network, key and value heads with the query heads that read them, dimensions of
            the hidden state, layers of a stack.
        unit: what they are called, for sentences.
        members: query heads of a unit (heads only).
    """

    what: What
    count: int
    unit: str
    members: int = 1


def size_of(config: PretrainedConfig, what: What) -> Size:
    """What a config says.

    Raises:
        RequestError: it has no such size, or several that differ.
    """
    text = _text(config)
    if what == "ffn":
        return Size(what, _one(text, _FFN, what), _UNITS[what])
    if what == "hidden":
        return Size(what, _one(text, _HIDDEN, what), _UNITS[what])
    if what == "layers":
        return Size(what, _one(text, _LAYERS, what), _UNITS[what])
    heads = _one(text, _HEADS, what)
    groups = next((value for name in _GROUPS if isinstance(value := getattr(text, name, None), int)), heads)
    if groups < 1 or heads % groups:
        raise RequestError(f"a {config.model_type} has {heads} heads and {groups} for keys and values: no whole groups")
    unit = "heads" if groups == heads else f"groups of {heads // groups} heads"
    return Size(what, groups, unit, heads // groups)


def resized(config: PretrainedConfig, what: What, count: int) -> PretrainedConfig:
    """A copy of the config with `count` units, 1 to as many as there are. Layers: the first so many (see `with_layers`)."""
    size = size_of(config, what)
    if not 1 <= count <= size.count:
        raise RequestError(f"{size.unit} that are kept: 1 to {size.count}, not {count}")
    if what == "layers":
        return with_layers(config, list(range(count)))
    smaller: Any = copy.deepcopy(config)
    text = _text(smaller)
    if what == "heads":
        width = _head_width(text)
        _set(text, _HEADS, count * size.members)
        _set(text, _GROUPS, count)
        _set_width(text, width)
    elif what == "hidden":
        width = _head_width(text)
        _set(text, _HIDDEN, count)
        _set_width(text, width)
    else:
        _set(text, _FFN, count)
        if getattr(text, "n_inner", 0) is None:  # GPT-2 takes four times its hidden size where it says nothing
            text.n_inner = count
    return smaller  # type: ignore[no-any-return]


def with_layers(config: PretrainedConfig, kept: list[int]) -> PretrainedConfig:
    """A copy of the config with these layers of every stack; lists with an entry for each layer keep theirs."""
    smaller: Any = copy.deepcopy(config)
    text = _text(smaller)
    depth = size_of(config, "layers").count
    for key, value in text.to_dict().items():
        if "layer" in key and isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(text, key, [value[index] for index in kept])
    _set(text, _LAYERS, len(kept))
    return smaller  # type: ignore[no-any-return]


def _one(text: Any, names: tuple[str, ...], what: What) -> int:
    """The one value that these names have."""
    found = {name: value for name in names if isinstance(value := getattr(text, name, None), int)}
    if not found and what == "ffn" and hasattr(text, "n_inner"):
        return 4 * int(text.hidden_size)
    if not found:
        raise RequestError(f"the config of a {text.model_type} does not say how many {_UNITS[what]} it has")
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
    given = next((value for name in _WIDTHS if isinstance(value := getattr(text, name, None), int)), None)
    return given or _one(text, _HIDDEN, "hidden") // _one(text, _HEADS, "heads")


def _set_width(text: Any, width: int) -> None:
    """Say it, even where the config did not: most models then build heads of that width, and of others the shapes will tell."""
    named = [name for name in _WIDTHS if hasattr(text, name)]
    for name in named or _WIDTHS[:1]:
        setattr(text, name, width)


def _text(config: Any) -> Any:
    """The part of a config that describes the language model, to be changed in place."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)
