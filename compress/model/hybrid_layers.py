"""Models of which only some layers have attention (Qwen3-Next, Jamba): one such layer must stay, as transformers counts the tokens that a
cache holds by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from compress.model.config_sizes import size_of, with_layers
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def attends(config: PretrainedConfig) -> bool:
    """Whether a model's cache can say how many tokens it holds; not where every layer keeps a state and none keys and values."""
    from transformers import DynamicCache

    try:
        DynamicCache(config=config.get_text_config(decoder=True)).get_seq_length()
    except ValueError:
        return False
    return True


def attending(config: PretrainedConfig, kept: Sequence[int], others: Iterable[int], least: int) -> list[int]:
    """The layers that stay, ascending: `kept`, or where none of them has attention, with the first of `others` that has in the place of
    one.

    Args:
        config: of the whole model. others: layers in the order in which they are wanted. least: the one of `kept` that gives place.

    Raises:
        RequestError: none of these layers has attention in its new place.
    """
    if not attends(config) or attends(with_layers(config, list(kept))):
        return list(kept)
    for other in others:
        changed = sorted({*kept, other} - {least})
        if attends(with_layers(config, changed)):
            return changed
    raise RequestError(
        f"with {len(kept)} of its {size_of(config, 'layers').count} layers a {config.model_type} would have none with attention, by which "
        "its cache counts tokens; keep more layers"
    )


def check_attending(config: PretrainedConfig, count: int) -> None:
    """RequestError where no `count` layers would have one with attention among them."""
    attending(config, range(count), range(count, size_of(config, "layers").count), count - 1)
