"""What is known of a draft before anything is computed: its target's structure and that of the checkpoint it begins as.

Methods check their settings against it (`DraftMethod.check`), so that what cannot be made is refused before a model is compressed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.distill.draft.cut import chosen_layers, empty_cut
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from compress.distill.draft.config import CutConfig


class RefusedError(RequestError):
    """A draft that cannot be made. `key` is the field of the draft section that says so."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class Prospect:
    """See the module's docstring.

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
        return len(find_blocks(self.model)[1])

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    def draft(self, config: CutConfig) -> PreTrainedModel:
        """The skeleton of what the draft is at first."""
        if self.start is not None:
            if config.layers is not None:
                raise RefusedError("layers", f"the draft is all of {config.model}; leave layers, or model, out")
            return _cut(self.start, range(len(find_blocks(self.start)[1])), "model")
        if config.layers is None:
            raise RefusedError("layers", f"a number of layers, 1 to {self.depth}, or a list of their indices is needed")
        return _cut(self.model, self.chosen(config.layers), "method")

    def chosen(self, layers: int | list[int]) -> list[int]:
        """Indices of the target's layers that a draft is cut of."""
        depth = self.depth
        if isinstance(layers, int):
            if not 1 <= layers <= depth:
                raise RefusedError("layers", f"the model has {depth} layers; the draft cannot have {layers}")
            try:
                return chosen_layers(self.config, depth, layers)
            except RequestError as error:
                raise RefusedError("layers", str(error)) from None
        if any(not 0 <= layer < depth for layer in layers):
            raise RefusedError("layers", f"the model has {depth} layers; the draft cannot have {layers}")
        if not layers or layers != sorted(set(layers)):
            raise RefusedError("layers", f"indices of 0 to {depth - 1} in ascending order, each once, not {layers}")
        return layers


def _cut(model: PreTrainedModel, layers: Sequence[int], key: str) -> PreTrainedModel:
    try:
        return empty_cut(model, layers)
    except RequestError as error:
        raise RefusedError(key, str(error)) from None


def plain_head(model: PreTrainedModel) -> bool | None:
    """Whether a model's logits are what its head gives, neither capped nor scaled; None: that cannot be told without its weights.

    Its class is run with a stand-in for all below the head and a head of a few tokens: no more memory than that.
    """
    try:
        empty: Any = build_skeleton(model.config, torch.float32)
        decoder, head = empty.get_decoder(), empty.get_output_embeddings()
        place = next(name for name, module in empty.named_modules() if module is decoder)
        generator = torch.Generator().manual_seed(0)
        # Logits of hundreds: what caps them shows.
        states = 100 * torch.randn(1, 2, head.in_features, generator=generator)
        small = nn.Linear(head.in_features, 4, bias=False)
        small.weight = nn.Parameter(torch.randn(4, head.in_features, generator=generator) / head.in_features**0.5)
        parent, _, leaf = place.rpartition(".")
        setattr(empty.get_submodule(parent), leaf, _Stand(states))
        empty.set_output_embeddings(small)
        with torch.no_grad():
            found = empty(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
            return torch.allclose(found, small(states), rtol=1e-3)
    except CompressError:
        raise
    except Exception:  # what classes do beside the usual differs; the check on the loaded model remains
        return None


class _Stand(nn.Module):
    """Gives the same hidden states whatever it reads, and nothing else that a decoder may give."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self._states)


class _Output:
    """As transformers' outputs: by name, or by place."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]
