"""Ids of tokens that configs name: found, and given their new numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ENDS = ("token_id", "token_ids", "token_index")
_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids")
Change = Callable[[int], int]


def collect_ids(walk: Callable[[Change], Any]) -> set[int]:
    """All ids that a function which changes ids visits."""
    found: set[int] = set()

    def see(number: int) -> int:
        found.add(number)
        return number

    walk(see)
    return found


def named(values: Mapping[str, Any], vocabulary: int) -> set[int]:
    """All ids below `vocabulary` that a config (config.json, generation_config.json, also of configs inside) names."""
    return {number for number in collect_ids(lambda change: renumbered(values, change)) if 0 <= number < vocabulary}


def renumbered(values: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """A copy with other ids."""
    return {key: _value(key, value, change) for key, value in values.items()}


def renumber_config(target: PretrainedConfig, source: PretrainedConfig, change: Change) -> None:
    """Give a config, and those inside it, the ids that another of its kind names (those it has by default too), changed."""
    from transformers import PretrainedConfig

    for key, value in list(vars(source).items()):
        if isinstance(value, PretrainedConfig):
            renumber_config(getattr(target, key), value, change)
        elif names_tokens(key):
            setattr(target, key, _value(key, value, change))


def names_tokens(key: object) -> bool:
    """Whether a field of a config holds ids."""
    if not isinstance(key, str):  # id2label has numbers
        return False
    return key.endswith(_ENDS) or key in _LISTS or key in ("forced_decoder_ids", "sequence_bias")


def _value(key: str, value: Any, change: Change) -> Any:
    if isinstance(value, Mapping):
        return renumbered(value, change)
    if not names_tokens(key):
        return value
    if key == "forced_decoder_ids" and value is not None:  # places, and what stands there
        return [[place, _ids(token, change)] for place, token in value]
    if key == "sequence_bias" and value is not None:
        return [[_ids(tokens, change), bias] for tokens, bias in value]
    return _ids(value, change)


def _ids(value: Any, change: Change) -> Any:
    if isinstance(value, (list, tuple)):
        return [_ids(item, change) for item in value]
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value
