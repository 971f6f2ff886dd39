"""Models whose layers differ in size, as transformers' configs say it: `per_layer_config`, {layer: {what differs: its value}}.

transformers (5.23) has configs that say so; most of its models cannot be built from them yet. Where one cannot, it is built with the sizes
that the config has for all, and each layer that differs is taken from a model that is built with that layer's sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEY = "per_layer_config"
Model = TypeVar("Model")
_OURS = "_layers_differ"


def overrides(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """{layer: {attribute: value}} of the layers that differ from the rest.

    Raises:
        ArtifactError: it is no such mapping, or of layers that there are not.
    """
    found = _text(config).to_dict().get(KEY) or {}
    depth = getattr(_text(config), "num_hidden_layers", 0)
    try:
        result = {int(layer): dict(values) for layer, values in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"config.json: {KEY} is {{layer: {{what differs: its value}}}}, not {str(found)[:80]}"
        ) from error
    odd = next((layer for layer in result if not 0 <= layer < depth), None)
    if odd is not None:
        raise ArtifactError(f"config.json: {KEY} is of layers 0 to {depth - 1}, and has {odd}")
    return result


def differing(config: PretrainedConfig) -> set[str]:
    """Names of the sizes in which layers differ."""
    return {name for values in overrides(config).values() for name in values}


def uniform(config: PretrainedConfig, **values: Any) -> PretrainedConfig:
    """A copy that says of all layers what it says of those that do not differ, or these values."""
    result: Any = copy.deepcopy(config)
    text = _text(result)
    if hasattr(type(text), KEY):
        setattr(text, KEY, None)
    else:
        text.__dict__.pop(KEY, None)  # to a transformers that does not know the key it is one as any other
    for name, value in values.items():
        setattr(text, name, value)
    return result  # type: ignore[no-any-return]


def with_overrides(config: PretrainedConfig, layers: dict[int, dict[str, Any]], **values: Any) -> PretrainedConfig:
    """A copy whose layers differ as `layers` says; `values` are those of all others."""
    result: Any = uniform(config, **values)
    if layers:
        setattr(_text(result), KEY, {str(layer): dict(own) for layer, own in sorted(layers.items())})
    return result  # type: ignore[no-any-return]


def native(config: PretrainedConfig, construct: Callable[[PretrainedConfig], Model]) -> Model | None:
    """What `construct` makes of a config whose layers differ; None: transformers cannot make it yet."""
    if "skip" in differing(config):
        raise ValueError(f"{KEY} leaves parts of layers out (skip), which transformers does not do yet")
    if hasattr(type(_text(config)), KEY):
        try:
            return construct(config)
        except RuntimeError as error:  # nobody may read for all layers what they differ in
            if "PerLayerAttribute" not in type(error).__name__:
                raise
    return None


def share(model: Any, config: PretrainedConfig) -> None:
    """One config for all parts of a model that was put together: what is set in it later (how attention is computed) holds for all of them.
    It is remembered that transformers cannot build this model by itself."""
    text = _text(config)
    for module in model.modules():
        if type(getattr(module, "config", None)) is type(text):
            module.config = text
    model.config = config
    setattr(model, _OURS, True)


def is_ours(model: Any) -> bool:
    """Whether transformers cannot build this model by itself, its layers being of different sizes."""
    return bool(getattr(model, _OURS, False))


def _text(config: Any) -> Any:
    """The part of a config that describes the layers, to be changed in place."""
    return config if getattr(config, "is_encoder_decoder", False) else config.get_text_config(decoder=True)
