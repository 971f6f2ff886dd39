"""Model skeleton: a transformers model without weights, built on the meta device, with the buffers that no checkpoint stores made real.

Both sides use it: the runtime fills it with an artifact's tensors, the offline pipeline fills it one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from runtime.checkpoint.checkpoint import read_json
from runtime.checkpoint.config_fields import check_config, uneven_heads
from runtime.errors import ArtifactError, CompressError, first_line
from runtime.modeling import layer_sizes
from runtime.modeling.linear_modules import sides
from runtime.modeling.unstored_buffers import compute_unstored, materialise_buffers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Kind = Literal["decoder", "encoder", "encoder-decoder"]
FEATURES = "input_features"
"""What transformers calls the features of sounds that an encoder reads."""


def read_config(path: str | Path, trust_remote_code: bool | None = None) -> PretrainedConfig:
    """The checkpoint's config, or ArtifactError when transformers does not know or cannot read it.

    Args:
        trust_remote_code: run Python code that the checkpoint brings; None: nothing here may, as where models are compressed.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=bool(trust_remote_code))
    except Exception as error:  # transformers' classes of configs compute what they like with what the file says
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ArtifactError(needs_code(str(path), "config.json", trust_remote_code)) from error
        # A validation error says which check failed; what was wrong is in its cause.
        detail = error.__cause__ if type(error).__name__.startswith("StrictDataclass") and error.__cause__ else error
        reason = uneven_heads(read_json(Path(path) / "config.json")) or first_line(detail)
        raise ArtifactError(f"{path}/config.json cannot be used: {reason}") from error


def needs_code(what: str, file: str, trust_remote_code: bool | None) -> str:
    """Why something that only code of the checkpoint can read is not read, and what to do; `trust_remote_code` as of `read_config`."""
    how = "read it, then allow it with --trust-remote-code (trust_remote_code=True of runtime.load)"
    if trust_remote_code is None:
        how = "compressing runs no code of a checkpoint; only what transformers itself has can be compressed"
    return f"{what} needs Python code of its own (auto_map in {file}): {how}"


def model_kind(config: PretrainedConfig) -> Kind:
    """What a checkpoint is: "decoder" (a causal language model), "encoder" or "encoder-decoder".

    The class that `architectures` names decides; one that says nothing (a bare `XModel`, or none) leaves it to the config:
    `is_encoder_decoder`, `is_decoder`, and whether its family is trained to fill masks or to go on.
    """
    from transformers.models.auto import modeling_auto as auto

    named, family, two_stacks = _named_class(config), config.model_type, getattr(config, "is_encoder_decoder", False)
    fills, continues = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if named in _classes(continues) - _classes(fills):
        # BART and its like list one class as both; what it is then, its config says.
        return "encoder-decoder" if two_stacks and named in _seq2seq_classes() else "decoder"
    if not two_stacks and named in _classes(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        return "decoder"  # a vision-language model: its vision tower stands beside the blocks
    if two_stacks and named in _classes(auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES):
        return "encoder"  # T5EncoderModel: the first stack of a family of two
    if two_stacks:
        return "encoder-decoder"
    if getattr(config, "is_decoder", False) or (family in continues and family not in fills):
        return "decoder"
    return "encoder" if family in fills or family in auto.MODEL_MAPPING_NAMES else "decoder"


def build_skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    stored: Collection[str] | None = None,
) -> PreTrainedModel:
    """The model of `config`, in eval mode: parameters on meta, non-persistent buffers computed on the CPU.

    A causal language model for decoders; for the other kinds (`model_kind`) the class that `architectures` names.

    A `quantization_config` in `config` is ignored here (a copy of the config is used): installing compressed modules is the
    caller's next step.

    Args:
        stored: names of the checkpoint's tensors, if known: an encoder without a stored pooler is then built without one, and what
            the model computes where it is not stored is computed.

    Raises:
        ArtifactError: transformers cannot build it.
    """
    import copy

    try:
        check_config(config.to_dict())
        config = copy.deepcopy(config)
    except RecursionError as error:
        raise ArtifactError("config.json is nested deeper than any config is") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    layers = layer_sizes.overrides(config)

    def construct(config: PretrainedConfig) -> PreTrainedModel:
        with torch.device("meta"):
            model = _construct(config, model_kind(config), dtype, trust_remote_code, stored)
        materialise_buffers(model)
        if stored is not None:
            compute_unstored(model, stored)
        return model

    try:
        model = layer_sizes.native(config, construct) if layers else construct(config)
        if model is None:
            model = _layered(config, layers, construct)
    except CompressError:
        raise
    except Exception as error:  # models compute what they like with what config.json says
        kind = model_kind(config)
        what = {"decoder": "causal language model"}.get(kind, kind)
        reason = uneven_heads(config.to_dict()) or first_line(error)
        raise ArtifactError(f"config.json describes no {what} that can be built: {reason}") from error
    model.eval()
    model.requires_grad_(False)
    return model


def _layered(
    config: PretrainedConfig,
    layers: dict[int, dict[str, Any]],
    construct: Callable[[PretrainedConfig], PreTrainedModel],
) -> PreTrainedModel:
    """A model whose layers differ: each is taken out of one that has all layers of its sizes."""
    model = construct(layer_sizes.uniform(config))
    if len(stacks := find_stacks(model)) > 1:
        raise ValueError(f"{layer_sizes.KEY} does not say of which of two stacks")
    _, blocks = stacks[0]
    for values in {repr(sorted(own.items())): own for own in layers.values()}.values():
        _, others = find_blocks(construct(layer_sizes.uniform(config, **values)))
        for index in (index for index, own in layers.items() if own == values):
            blocks[index] = others[index]
    layer_sizes.share(model, config)
    return model


def _construct(
    config: PretrainedConfig, kind: Kind, dtype: torch.dtype, trust: bool, stored: Collection[str] | None
) -> PreTrainedModel:
    import inspect

    import transformers

    named = _named_class(config)
    known = None if named is None else getattr(transformers, named, None)
    options: dict[str, Any] = {}
    general: Any
    if kind == "decoder":
        general, usable = transformers.AutoModelForCausalLM, config.get_text_config() is not config
    elif kind == "encoder-decoder":
        speech = is_speech(config)
        general = transformers.AutoModelForSpeechSeq2Seq if speech else transformers.AutoModelForSeq2SeqLM
        usable = named in _seq2seq_classes()  # and no bare T5Model, whose head is tied, or missing
    else:
        general, usable = transformers.AutoModel, True
        takes_pooler = known is not None and "add_pooling_layer" in inspect.signature(known.__init__).parameters
        if stored is not None and takes_pooler and not any("pooler." in name for name in stored):
            options["add_pooling_layer"] = False
    if known is not None and usable:
        model = known._from_config(config, dtype=dtype, **options)
    else:
        model = general.from_config(config, dtype=dtype, trust_remote_code=trust)
    if kind == "encoder-decoder" and model.main_input_name not in ("input_ids", FEATURES):
        raise ValueError(
            f"the encoder of {type(model).__name__} reads {model.main_input_name}, neither token ids nor {FEATURES}"
        )
    return model


def _named_class(config: PretrainedConfig) -> str | None:
    named = getattr(config, "architectures", None)
    return named[0] if isinstance(named, (list, tuple)) and named and isinstance(named[0], str) else None


def _seq2seq_classes() -> set[str]:
    from transformers.models.auto import modeling_auto as auto

    return _classes(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) | _classes(
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    )


def is_speech(config: PretrainedConfig) -> bool:
    """Whether transformers knows the family of an encoder-decoder as one that turns speech into text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

    return model_kind(config) == "encoder-decoder" and config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES


def reads_features(model: PreTrainedModel) -> bool:
    """Whether the encoder of an encoder-decoder reads features of sounds (`input_features`) where others read token ids."""
    return model_kind(model.config) == "encoder-decoder" and model.main_input_name == FEATURES


def reads_images(model: PreTrainedModel) -> bool:
    """Whether a decoder reads images beside token ids (a vision-language model)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    named = type(model).__name__ in _classes(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return named and model_kind(model.config) == "decoder" and model.config.get_text_config() is not model.config


def _classes(mapping: Any) -> set[str]:
    """Class names of one of transformers' tables, whose values are names or tuples of names."""
    return {name for value in mapping.values() for name in ((value,) if isinstance(value, str) else value)}


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put `value` where parameter or buffer `name` is (shapes must match: the caller checked them)."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    elif leaf in parent._buffers:
        parent._buffers[leaf] = value
    else:
        raise ArtifactError(f"the model has no parameter or buffer {name}")


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """{tied parameter: the parameter it shares}, empty when the config does not tie."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The repeated transformer blocks: the ModuleList with the most parameters, and its qualified name."""
    return _blocks_in(model, model.get_decoder() if hasattr(model, "get_decoder") else model)


def find_stacks(model: PreTrainedModel) -> list[tuple[str, nn.ModuleList]]:
    """The blocks in the order they run: one list, or for encoder-decoders the encoder's and then the decoder's."""
    if model_kind(model.config) != "encoder-decoder":
        return [find_blocks(model)]
    return [_blocks_in(model, model.get_encoder()), _blocks_in(model, model.get_decoder())]


def _blocks_in(model: PreTrainedModel, part: nn.Module) -> tuple[str, nn.ModuleList]:
    # A list of single layers (the convolutions in front of a speech encoder) is none of blocks, however large.
    lists = {
        name: module
        for name, module in part.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0 and any(True for _ in module[0].children())
    }
    if not lists:
        there = ", ".join(f"{name} ({type(child).__name__})" for name, child in part.named_children()) or "no modules"
        raise CompressError(
            f"{type(model).__name__} has no list of repeated blocks (nn.ModuleList), so it cannot be compressed block by block; "
            f"it has {there}"
        )
    name = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    prefix = next((n for n, m in model.named_modules() if m is part), "")
    return f"{prefix}.{name}" if prefix else name, lists[name]


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{name: (outputs, inputs)} of every module that multiplies by a matrix."""
    return {n: shape for n, m in model.named_modules() if (shape := sides(m)) is not None}
