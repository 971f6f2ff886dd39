"""Checks of a draft's settings against its target's structure, before anything is computed (`DraftMethod.check`).

What cannot be made is refused before a model is compressed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.distill.draft.config import CutConfig, DraftConfig
from compress.distill.draft.cut import chosen_layers, empty_cut
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class RefusedError(RequestError):
    """A draft that cannot be made. `key` is the field of the draft section that says so."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class Prospect:
    """A draft before anything is computed: its target's structure and that of the checkpoint it begins as.

    Attributes:
        model: the target's skeleton, its parameters on meta.
        ends: ids that end its texts.
        compressed: whether any of its layers is, or will be.
        start: skeleton of the checkpoint that becomes the draft; None: the draft is cut out of the target.
    """

    model: PreTrainedModel
    ends: frozenset[int]
    compressed: bool
    start: PreTrainedModel | None = None

    @property
    def config(self) -> PretrainedConfig:
        """Of its text model."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def depth(self) -> int:
        """Number of transformer blocks."""
        return len(find_blocks(self.model)[1])

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    def draft(self, config: CutConfig) -> PreTrainedModel:
        """The skeleton of what the draft is at first."""
        if self.start is not None:
            if config.layers is not None:
                raise RefusedError("layers", f"the draft is all of {config.model}; leave layers, or model, out")
            with refused("model"):
                return empty_cut(self.start, range(len(find_blocks(self.start)[1])))
        if config.layers is None:
            raise RefusedError("layers", f"a number of layers, 1 to {self.depth}, or a list of their indices is needed")
        with refused("layers"):
            layers = chosen_layers(self.config, self.depth, config.layers)
        with refused("method"):
            return empty_cut(self.model, layers)


@contextmanager
def refused(key: str) -> Iterator[None]:
    """Requests that are refused, as those of a field of the draft section."""
    try:
        yield
    except RequestError as error:
        raise RefusedError(key, str(error)) from None


def plain_head(model: PreTrainedModel) -> bool | None:
    """Whether a model's logits are what its head gives, neither capped nor scaled; None: that cannot be told without its weights.

    Its class is run with a head of a few tokens and nothing below it: no more memory than that.
    """
    try:
        empty: Any = build_skeleton(model.config, torch.float32)
        head, generator = empty.get_output_embeddings(), torch.Generator().manual_seed(0)
        # Logits of hundreds: what caps them shows.
        states = 100 * torch.randn(1, 2, head.in_features, generator=generator)
        small = nn.Linear(head.in_features, 4, bias=False)
        small.weight = nn.Parameter(torch.randn(4, head.in_features, generator=generator) / head.in_features**0.5)
        # Whatever the decoder reads, it gives these states, and nothing else that it may give.
        empty.get_decoder().forward = lambda *_, **__: _Output(states)
        empty.set_output_embeddings(small)
        with torch.no_grad():
            found = empty(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
            return torch.allclose(found, small(states), rtol=1e-3)
    except CompressError:
        raise
    except Exception:  # what classes do beside the usual differs; the check on the loaded model remains
        return None


class _Output:
    """As transformers' outputs: by name, or by place."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


def check_trained(config: DraftConfig, target: Prospect) -> None:
    """Raise `RefusedError` where the fields that all trained drafts have do not go together, or do not fit the target."""
    check_lengths(config, target)
    with refused("temperature"):
        config.objective()
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

    reason = llama_structure.why_not(target.model, mixtures=False)
    if reason is not None:
        text = f"only the decoder in C computes with parts of a model (a Llama, Mistral, Qwen2 or Qwen3): {reason}"
        raise RefusedError("method", text)
    if len(find_blocks(target.model)[1]) < layers:
        raise RefusedError("method", f"the model has {target.depth} layers, and this draft needs at least {layers}")
