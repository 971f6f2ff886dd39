"""One pass over the calibration rows that everything read off a forward shares: attention's queries and keys, blocks' activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from compress.kv_cache.attention import AttentionCall
from compress.model.module_hooks import hooks
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Observer:
    """What is gathered in a pass; one overrides what it asks to see."""

    def attention(self, call: AttentionCall) -> None:
        """One layer's queries and keys of the batch at hand, layers in order."""

    def activations(self, site: str, maxima: torch.Tensor) -> None:
        """The largest magnitude of each token at one place of the model, float32 `[batch, n]`."""

    def batch_done(self, ids: torch.Tensor) -> None:
        """The batch `[batch, n]` is through."""


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Final hidden states (after the last norm) of rows without padding, `[batch, n]` -> `[batch, n, hidden]`.

    Logits are not computed: with a large vocabulary they would take more memory than all else.
    """
    decoder: nn.Module = cast(Any, model).get_decoder()
    return decoder(input_ids=ids, use_cache=False).last_hidden_state


@contextmanager
def activations_shown(model: PreTrainedModel, observers: Sequence[Observer]) -> Iterator[None]:
    """Within, observers are shown each block's input and that of its last linear layer (the MLP's down projection)."""
    last: dict[str, torch.Tensor] = {}

    def show(site: str, maxima: torch.Tensor) -> None:
        for observer in observers:
            observer.activations(site, maxima)

    def block_input(name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        last.clear()
        show(f"{name} input", _maxima(arguments[0] if arguments else keywords["hidden_states"]))

    def linear_input(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        # Experts are given a flat choice of tokens, which says nothing of places.
        if arguments and arguments[0].dim() == 3:
            last["input"] = _maxima(arguments[0])

    def block_output(name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if "input" in last:
            show(f"{name} last linear", last["input"])

    blocks = {block: f"block {number}" for number, block in enumerate(find_blocks(model)[1])}
    inner = [module for block in blocks for module in block.modules()]
    layers = [module for module in inner if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"]
    entering = {block: partial(block_input, name) for block, name in blocks.items()}
    leaving = {block: partial(block_output, name) for block, name in blocks.items()}
    with hooks(entering, before=True, keywords=True), hooks(leaving), hooks(dict.fromkeys(layers, linear_input), True):
        yield


def _maxima(states: torch.Tensor) -> torch.Tensor:
    return states.detach().float().abs().amax(-1)
