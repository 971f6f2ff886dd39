"""Any transformers model with streamed blocks: around its forward pass a block's parameters and buffers are views of a ring buffer."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from runtime.engines.torch import TorchEngine
from runtime.streaming.file import Group, PreparedFile
from runtime.streaming.ring import Ring

_Values = list[tuple[dict[str, Any], str, torch.Tensor]]


class StreamedTorch(TorchEngine):
    """`TorchEngine` whose blocks `order` come out of a ring; between passes they are views of the mapped file, which nobody reads.

    Threads that call at once wait for one another.
    """

    def __init__(self, module: Any, device: torch.device, blocks: BlockViews, ring: Ring, held: int) -> None:
        super().__init__(module, device)
        self.weight_bytes = held
        self.ring = ring
        self._lock = threading.RLock()
        for number, name in blocks.names.items():
            swap = _Swap(blocks, ring, number)
            block = module.get_submodule(name)
            block.register_forward_pre_hook(swap.enter)
            block.register_forward_hook(swap.leave, always_call=True)

    @torch.inference_mode()
    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self._lock:
            self.ring.restart()
            return super().forward(*arguments, **named)

    def close(self) -> None:
        """Stop reading and free the buffers; the model cannot compute any more."""
        with self._lock:
            self.ring.close()


class BlockViews:
    """For each streamed block and ring buffer, what the block's modules hold while it is there. `names`: {block: module}."""

    def __init__(
        self, model: nn.Module, file: PreparedFile, groups: dict[int, Group], buffers: list[torch.Tensor]
    ) -> None:
        self.names = {number: group.name for number, group in groups.items()}
        self._model, self._file, self._groups, self._buffers = model, file, groups, buffers
        self._idle = {number: self._places(file.tensors(group)) for number, group in groups.items()}
        self._made: dict[tuple[int, int], _Values] = {}

    def show(self, number: int, slot: int | None) -> None:
        """Let the block's modules see a buffer, or (None) the file."""
        if slot is None:
            values = self._idle[number]
        else:
            values = self._made.get((number, slot)) or self._make(number, slot)
        for owner, leaf, value in values:
            owner[leaf] = value

    def _make(self, number: int, slot: int) -> _Values:
        with torch.inference_mode(False):
            made = self._places(self._file.tensors(self._groups[number], self._buffers[slot]))
        self._made[number, slot] = made
        return made

    def _places(self, tensors: dict[str, torch.Tensor]) -> _Values:
        result: _Values = []
        for name, value in tensors.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = self._model.get_submodule(owner_name)
            if leaf in owner._parameters:
                result.append((owner._parameters, leaf, nn.Parameter(value, requires_grad=False)))
            else:
                result.append((owner._buffers, leaf, value))
        return result


class _Swap:
    """The hooks of one block."""

    def __init__(self, blocks: BlockViews, ring: Ring, number: int) -> None:
        self._blocks, self._ring, self._number = blocks, ring, number
        self._slot: int | None = None

    def enter(self, module: nn.Module, arguments: Any) -> None:
        self._slot = self._ring.take(self._number)
        self._blocks.show(self._number, self._slot)

    def leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:  # None: `enter` failed
            self._blocks.show(self._number, None)
            self._ring.give(slot)
