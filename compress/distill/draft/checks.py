"""What every trained draft's settings must be, held against its target before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import nn

from compress.distill.draft.config import CutConfig, DraftConfig
from compress.distill.draft.prospect import Prospect, RefusedError
from runtime.modeling.skeleton import find_blocks


def check_trained(config: DraftConfig, target: Prospect) -> None:
    """Raise `RefusedError` where the fields that all trained drafts have do not go together, or do not fit the target."""
    check_lengths(config, target)
    if config.divergence == "cross_entropy" and config.temperature != 1:
        text = f"cross_entropy is that of the model as it is: its temperature is 1, not {config.temperature:g}"
        raise RefusedError("temperature", text)
    if config.continuations != 1 and config.data == "given":
        text = "nothing is written with data given; leave continuations out, or set data: teacher, on_policy or mixed"
        raise RefusedError("continuations", text)
    if config.teacher_top is not None and config.divergence == "cross_entropy":
        text = "cross_entropy asks no teacher, of whom likeliest tokens could be kept; leave teacher_top out, or set another divergence"
        raise RefusedError("teacher_top", text)
    if config.teacher_top is not None and config.data not in ("given", "teacher"):
        text = (
            f"what the teacher says is kept of fixed rows, and those of data {config.data} are written anew in every update; set data: "
            "given or teacher, or leave teacher_top out"
        )
        raise RefusedError("teacher_top", text)
    vocabulary = getattr(config, "vocabulary", None)
    if vocabulary is None:
        return
    if vocabulary > target.vocabulary:
        text = f"the model has {target.vocabulary} tokens; the draft cannot keep {vocabulary}"
        raise RefusedError("vocabulary", text)
    if vocabulary < len(target.ends):
        text = (
            f"{len(target.ends)} tokens end the model's texts, and the draft keeps them all; {vocabulary} are too few"
        )
        raise RefusedError("vocabulary", text)


def check_lengths(config: Any, target: Prospect) -> None:
    """Raise `RefusedError` where rows or drafts do not fit the positions of the target, or of the checkpoint that becomes the draft."""
    for what, model in (("model", target.model), ("draft's model", target.start)):
        if model is None:
            continue
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None:
            continue
        if config.sequence_length > limit:
            text = f"rows of {config.sequence_length} tokens are more than the {limit} positions of the {what}"
            raise RefusedError("sequence_length", text)
        if config.tokens >= limit:
            raise RefusedError("tokens", f"{config.tokens} drafted tokens do not fit the {what}'s context of {limit}")


def check_cut(config: CutConfig, target: Prospect) -> Any:
    """Raise `RefusedError` where the model that the draft is at first cannot be had; returns its skeleton."""
    draft = target.draft(config)
    size = int(draft.config.get_text_config(decoder=True).vocab_size)
    if size != target.vocabulary:
        text = f"the draft's model has {size} tokens and its target {target.vocabulary}; both must have the same vocabulary"
        raise RefusedError("model", text)
    if config.vocabulary is not None and not isinstance(draft.get_output_embeddings(), nn.Linear):
        raise RefusedError(
            "vocabulary", f"the head of a {type(draft).__name__} is no linear layer and cannot be trimmed"
        )
    return draft


def check_ahead(config: DraftConfig) -> None:
    """Raise `RefusedError` where rows are too short for what is foretold of each of their tokens."""
    ahead = max(2, config.tokens)
    if config.sequence_length <= ahead + 1:
        text = (
            f"rows of {config.sequence_length} tokens are too short for {ahead} at once; they need at least {ahead + 2}"
        )
        raise RefusedError("sequence_length", text)


def check_in_c(target: Prospect, layers: int) -> None:
    """Raise `RefusedError` where the decoder in C, which alone computes with parts of a model, will not run the target.

    Args:
        layers: the least that it must have.
    """
    from runtime.engines import llama_structure

    reason = llama_structure.why_not(target.model) if target.compressed else "none of its layers is compressed"
    if reason is not None:
        text = f"only the decoder in C computes with parts of a model (a compressed Llama, Mistral, Qwen2 or Qwen3): {reason}"
        raise RefusedError("method", text)
    if len(find_blocks(target.model)[1]) < layers:
        raise RefusedError("method", f"the model has {target.depth} layers, and this draft needs at least {layers}")
