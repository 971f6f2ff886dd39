"""One pass over the calibration rows that everything read off a forward shares: attention's queries and keys, blocks' activations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from compress.core.progress import Progress
from compress.kv_cache.attention import AttentionCall, watching
from runtime.kv_cache.attend import record_inputs
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 2048  # of one forward


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
    states: torch.Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return states


@torch.no_grad()
def observe(
    model: PreTrainedModel, rows: torch.Tensor, observers: Sequence[Observer], progress: Progress | None = None
) -> None:
    """Run the rows `[n, length]` through the model, a few at a time, and show each observer what it asks to see.

    Rows may be on any device; the model's is where observers are shown them.
    """
    size = max(1, TOKENS // rows.shape[1])
    device = next(model.parameters()).device
    batches = [rows[start : start + size].to(device) for start in range(0, len(rows), size)]
    if progress is not None:
        progress.phase("cache statistics", len(batches))

    def watcher(call: AttentionCall) -> torch.Tensor:
        for observer in observers:
            observer.attention(call)
        return call.full()

    with ExitStack() as stack:
        for handle in [*record_inputs(model), *_observe_activations(model, observers)]:
            stack.callback(handle.remove)
        stack.enter_context(watching(model, watcher))
        for number, ids in enumerate(batches, 1):
            hidden_states(model, ids)
            for observer in observers:
                observer.batch_done(ids)
            if progress is not None:
                progress.step(f"batch {number}")


def _observe_activations(model: PreTrainedModel, observers: Sequence[Observer]) -> list[Any]:
    """Handles of hooks that show observers each block's input and that of its last linear layer (the MLP's down projection)."""
    handles: list[Any] = []
    last: dict[str, torch.Tensor] = {}

    def block_input(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = arguments[0] if arguments else keywords["hidden_states"]
            last.clear()
            for observer in observers:
                observer.activations(f"{name} input", _maxima(states))

        return hook

    def linear_input(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if (
            arguments and arguments[0].dim() == 3
        ):  # experts are given a flat choice of tokens, which says nothing of places
            last["input"] = _maxima(arguments[0])

    def block_output(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if "input" in last:
                for observer in observers:
                    observer.activations(f"{name} last linear", last["input"])

        return hook

    for name, block in enumerate(find_blocks(model)[1]):
        handles.append(block.register_forward_pre_hook(block_input(f"block {name}"), with_kwargs=True))
        handles.append(block.register_forward_hook(block_output(f"block {name}")))
        for module in block.modules():
            if isinstance(module, (nn.Linear, CompressedLinear)) or type(module).__name__ == "Conv1D":
                handles.append(module.register_forward_pre_hook(linear_input))
    return handles


def _maxima(states: torch.Tensor) -> torch.Tensor:
    return states.detach().float().abs().amax(-1)
