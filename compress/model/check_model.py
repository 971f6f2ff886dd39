"""Checks of a recipe against its kind of model: blocks that can be streamed, rows that fit, layers that can be compressed."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from compress.data.vision import has_images
from compress.model.streamed import StreamedModel
from compress.model.tensor_model import routers_by_name
from compress.recipe import Recipe
from compress.recipe.targets import ModuleInfo
from runtime.engines.torch.encoder import position_limit
from runtime.errors import RequestError
from runtime.modeling.experts import routers
from runtime.modeling.linear_modules import sides
from runtime.modeling.skeleton import reads_features, reads_images

# Settings of configs by which layers read inputs beside the hidden states that differ between sequences: a vector of each token for each
# layer, keys and values of earlier layers (Gemma 4's small ones).
_BESIDE = ("hidden_size_per_layer_input", "num_kv_shared_layers")


def reads_beside(streamed: StreamedModel) -> str:
    """Settings of the config, with values, by which layers read inputs of a sequence beside the hidden states; empty: none."""
    config = streamed.config.get_text_config()
    return ", ".join(f"{name} {value}" for name in _BESIDE if (value := getattr(config, name, None)))


def check_streams(streamed: StreamedModel) -> None:
    """Raise `RequestError` where blocks cannot run one at a time over all sequences, because they hand on more than hidden states: values
    of one sequence would be used for another."""
    if beside := reads_beside(streamed):
        raise RequestError(
            f"the layers of a {type(streamed.model).__name__} read more of a sequence than the hidden states "
            f"({beside} in config.json), so it cannot be calibrated, evaluated, cut or trained block by block; use method rtn in every "
            "stage, without evaluate"
        )


def check_fits_model(recipe: Recipe, streamed: StreamedModel) -> None:
    """Raise `RequestError` where the recipe's rows do not fit the model, or its blocks cannot be streamed."""
    name = type(streamed.model).__name__
    if reads_features(streamed.model):
        _check_layers_only(recipe, f"{name} hears", "models")
        return
    sources = [source for source in (recipe.calibration, recipe.evaluate) if source is not None]
    if reads_images(streamed.model) and any(has_images(source) for source in sources):
        _check_layers_only(recipe, "the recipe names images", "data")
    for source in sources:
        if source.language is not None:
            text = f"{name} is not a speech model, and this key is for speech models: leave it out"
            raise RequestError(source.at("language", text))
    if streamed.kind == "decoder":
        states = getattr(streamed.config.get_text_config(), "altup_num_inputs", None) or 1
        if states > 1:
            raise RequestError(
                f"the layers of a {name} hand on {states} hidden states at once (altup_num_inputs in "
                "config.json); only models that hand on one can be compressed block by block"
            )
        return
    config = streamed.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    if streamed.kind == "encoder" and isinstance(count, int) and count != len(streamed.blocks):
        raise RequestError(
            f"{name} runs {count} layers and has the weights of {len(streamed.blocks)}: layers that share their weights cannot be "
            "compressed block by block"
        )
    limit = position_limit(streamed.model)
    for section, rows in (("calibration", recipe.calibration), ("evaluate", recipe.evaluate)):
        if rows is not None and limit is not None and rows.sequence_length > limit:
            text = f"rows of {rows.sequence_length} tokens are more than the {limit} that {name} reads; set {section}.sequence_length"
            raise RequestError(rows.at("sequence_length", text))
    if streamed.kind == "encoder-decoder" and not recipe.calibration.packing:
        text = f"{name} is an encoder-decoder, which is calibrated on full rows only; set packing: true"
        raise RequestError(recipe.calibration.at("packing", text))


def _check_layers_only(recipe: Recipe, why: str, what: str) -> None:
    """Refuse stages other than prune and quantize: only these calibrate on audio or images."""
    for stage in recipe.stages:
        if stage.phase != "layers":
            text = f"{why}, and only prune and quantize stages support such {what}; leave this one out"
            raise RequestError(recipe.origin.at(stage.path, text))


def is_head(streamed: StreamedModel, name: str, module: nn.Module) -> bool:
    """Whether a layer comes after an encoder's blocks (a pooler, a classifier). Those stay as they are: they are small, and what
    they give is no embedding that could be measured."""
    return streamed.kind == "encoder" and isinstance(module, nn.Linear) and not streamed.is_inside(name)


def check_shared(streamed: StreamedModel, work: Collection[str]) -> None:
    """Raise `RequestError` when the recipe names an embedding that both halves of an encoder-decoder share."""
    if streamed.kind != "encoder-decoder":
        return
    shared = {name.rpartition(".")[0] for pair in streamed.ties.items() for name in pair}
    for name in work:
        if name in shared:
            raise RequestError(
                f"{name} shares its weight with other parts of the encoder-decoder and cannot be compressed; ignore it in the recipe"
            )


# What a recipe's targets choose among: every module of a model that holds a weight matrix.


def module_infos(streamed: StreamedModel) -> list[ModuleInfo]:
    """In model order. Linear layers count as `Linear` whatever class of a model computes them, GPT-2's Conv1D among them."""
    choosing = routers(streamed.model) if streamed.runs else routers_by_name(streamed.model)
    head = streamed.model.get_output_embeddings() if streamed.kind != "encoder" else None
    found = []
    for name, module in streamed.model.named_modules():
        shape = sides(module)
        if shape is not None and not is_head(streamed, name, module) and streamed.is_text(name):
            found.append(ModuleInfo(name, "Linear", shape, router=name in choosing, head=module is head))
        elif isinstance(module, nn.Embedding) and streamed.is_text(name):
            found.append(ModuleInfo(name, type(module).__name__, (module.num_embeddings, module.embedding_dim)))
    return found
