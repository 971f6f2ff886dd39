"""Tiny models whose later layers say little, so that parts of them draft well, and drafters inside of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from llama_engines import engines, model_of
from safetensors.torch import save_file
from speculation_cases import FINGERPRINT, model_over

from runtime.api.model import Model
from runtime.config.settings import ConfigError
from runtime.drafting.config.build import Target, build
from runtime.drafting.config.request import parse
from runtime.drafting.drafters import kangaroo
from runtime.drafting.drafters.base import Drafter
from runtime.drafting.speculation import Speculation
from runtime.engines.native.engine import NativeEngine

SETTINGS: dict[str, dict[str, Any]] = {
    "skip": {"method": "skip", "skip_attention": [1, 3], "skip_mlp": [2], "confidence": 0.0, "change": 0.0},
    "exit": {"method": "early-exit", "layer": 2},
    "dynamic exit": {"method": "early-exit", "layer": "auto", "every": 1},
    "kangaroo": {"method": "kangaroo", "confidence": 0.0},
}


def gentle(name: str = "grouped", share: float = 0.05, from_layer: int = 1, **changes: Any) -> Any:
    """A random model of 4 layers whose later ones add only a `share` of what they would."""
    found = model_of(name, **{"num_hidden_layers": 4, **changes})
    for layer in found.model.layers[from_layer:]:
        layer.self_attn.o_proj.weight.data *= share
        layer.mlp.down_proj.weight.data *= share
    return found


def loaded(module: Any) -> Model:
    """The model in C, with no tokenizer."""
    return model_over(engines(module)[1])


def lean(model: Model) -> NativeEngine:
    assert isinstance(model.engine, NativeEngine)
    return model.engine


def drafter_of(target: Target, value: Any) -> Drafter:
    """The drafter that `drafter=` asks for."""
    try:
        return build(parse(value), target)
    except ConfigError as error:
        raise error.at("drafter") from None


def with_drafter(model: Model, settings: dict[str, Any], **others: Any) -> Drafter:
    """Let the model decode speculatively from now on."""
    drafter = drafter_of(Target(model.artifact, model.engine), settings)  # type: ignore[arg-type]
    model.speculation = Speculation(drafter, **others)
    return drafter


def adapter(
    folder: Path, module: Any, layer: int = 1, feed_forward: bool = False, noise: float = 0.02, **facts: Any
) -> Path:
    """An untrained Kangaroo adapter: the target's next layer, a little off."""
    block, generator = module.model.layers[layer], torch.Generator().manual_seed(2)
    tensors = {
        name: value.detach().clone()
        for name, value in block.named_parameters()
        if feed_forward or not name.startswith(("mlp.", "post_"))
    }
    for value in tensors.values():
        value += noise * value.std().nan_to_num(0.1) * torch.randn(value.shape, generator=generator).to(value.dtype)
    tensors["norm.weight"] = module.model.norm.weight.detach().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / kangaroo.ADAPTER)
    content = {"schema_version": 1, "method": "kangaroo", "target": FINGERPRINT, "exit_layer": layer, **facts}
    (folder / "draft.json").write_text(json.dumps(content))
    return folder
