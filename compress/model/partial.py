"""Partial model: a skeleton, into which one block, or everything outside the blocks, is loaded on demand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compress.core.tensors import bound_kernel_caches
from compress.model.couplings import stored_tensors
from compress.model.source import SourceCheckpoint
from compress.model.tensor_model import TensorModel, outermost_lists
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError
from runtime.modeling.experts import unfuse
from runtime.modeling.skeleton import build_skeleton, find_stacks, model_kind, read_config, set_tensor, tied_names
from runtime.modeling.tensor_names import prediction_tensors
from runtime.modeling.weights import first_name, main_dtype
from runtime.modeling.weights import unplaced as unplaced_tensors
from runtime.system.memory import return_memory

# Stacks of blocks, and recorders that stand in for blocks to see how they are called.


@dataclass(frozen=True)
class Stack:
    """Blocks that run one after the other.

    Attributes:
        name: qualified name of their list.
        blocks: the list.
        first: number of the first one among the blocks of all stacks.
    """

    name: str
    blocks: nn.ModuleList
    first: int


@dataclass
class Handover:
    """Return value of the blocks of a stack: `extras` follow the hidden states in a tuple (or list); None: no tuple.

    T5 computes the bias of relative positions in the first block, and each block hands it on to the next.
    """

    extras: tuple[Any, ...] | None

    def learn(self, output: Any) -> None:
        """Take over what a block has returned: a tuple, a list (OpenAI's first GPT), or the hidden states. Only a run tells: annotations
        of `forward` say tuple where there is none (Gemma 3)."""
        self.extras = tuple(output[1:]) if isinstance(output, (tuple, list)) else None

    @property
    def depends_on_batch(self) -> bool:
        """Whether something is passed on that differs from batch to batch."""
        return any(value is not None for value in self.extras or ())


class StandIn(nn.Module):
    """Module in the place of another, which is not registered in it: it has no parameters of its own, and the attributes of the other."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.__dict__["_held"] = held

    def __getattr__(self, name: str) -> Any:
        # Decoders read facts off their blocks while looping (Gemma: `layer.attention_type`).
        return getattr(self.__dict__["_held"], name)


class Recorder(StandIn):
    """Stand-in for a block: passes its arguments to `sink`, and returns its hidden states (or `instead`) unchanged.

    Args:
        handover: what it returns beside them; shared by the recorders of a stack.
        run: run the block too, to learn what it hands over.
        bare: it returns zeros in the place of hidden states.
    """

    def __init__(
        self,
        block: nn.Module,
        sink: Callable[[torch.Tensor, dict[str, Any]], None],
        handover: Handover,
        instead: torch.Tensor | None = None,
        run: bool = False,
        bare: bool = False,
    ) -> None:
        super().__init__(block)
        self.__dict__.update(_sink=sink, _handover=handover, _instead=instead, _run=run, _bare=bare)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand the block's inputs to the sink; return the replacement, or the hidden states unchanged, in the block's form."""
        names = list(inspect.signature(self._held.forward).parameters)
        if self._run:
            # A copy: a block may write into what it is given.
            self._handover.learn(self._held(hidden_states.clone(), *args, **kwargs))
        self._sink(hidden_states, {**dict(zip(names[1:], args, strict=False)), **kwargs})
        value = hidden_states if self._instead is None else self._instead
        value = torch.zeros_like(value) if self._bare else value
        return value if self._handover.extras is None else (value, *self._handover.extras)


class PartialModel:
    """A checkpoint (or artifact) directory whose weights are read in parts.

    Args:
        checkpoint: where the tensors come from.
        device: where they go.
        install: called with the model right after the skeleton exists; an artifact's reader replaces Linear modules there by
            compressed ones. None for plain checkpoints.
        loaded: a context manager that is entered with (part of the model, test of names to leave alone) once the tensors of
            that part are there, and left before they go.
        dtype: what the model computes in; default config.json's, as `runtime.load` does.
        apart: give the model its routed experts one by one (`runtime.modeling.experts`), as they are compressed.
        model_free: the model is the checkpoint's tensors (`TensorModel`), whatever config.json says of it.

    Attributes:
        runs: whether there is code that computes with the weights; False: `model_free`.
        kind: "decoder", "encoder" or "encoder-decoder".
        stacks: the encoder's blocks, the decoder's, or both in this order; `blocks` are all of them.
        checkpoint: the tensors by the model's names.
        ties: {tied parameter: the one it shares}, without those that are stored and differ.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: str | torch.device = "cpu",
        install: Callable[[nn.Module], None] | None = None,
        loaded: Callable[[nn.Module, Callable[[str], bool] | None], AbstractContextManager[None]] | None = None,
        dtype: torch.dtype | None = None,
        apart: bool = False,
        model_free: bool = False,
    ) -> None:
        bound_kernel_caches()
        self.device = torch.device(device)
        self.runs = not model_free
        self.config: Any = TensorModel.config if model_free else read_config(checkpoint.path)
        self.kind = model_kind(self.config)
        self.dtype = dtype or main_dtype(checkpoint)
        self._loaded = loaded
        self.model = self._build_model(checkpoint)
        if install is not None:
            install(self.model)
        if apart:
            unfuse(self.model)
        self.stacks: list[Stack] = []
        self.blocks = nn.ModuleList()
        for name, blocks in outermost_lists(self.model) if model_free else find_stacks(self.model):
            self.stacks.append(Stack(name, blocks, len(self.blocks)))
            self.blocks += blocks
        self._held = ""  # of what is outside: nothing, what comes "before" the blocks, or "all"
        expected = stored_tensors(self.model)
        self.checkpoint = SourceCheckpoint(checkpoint, self.model, expected)
        checkpoint = self.checkpoint
        stored = set(checkpoint.names())
        tied = tied_names(self.model)
        # A tied parameter need not be stored; where both are and differ, they are not tied (T5 v1.1 has a head of its own).
        self.ties = {
            n: s
            for n, s in tied.items()
            if not (n in stored and s in stored and not torch.equal(checkpoint.get(n), checkpoint.get(s)))
        }
        missing = sorted(n for n in expected if n not in stored and not (n in tied and tied[n] in stored))
        name = type(self.model).__name__
        if missing:
            raise ArtifactError(f"{checkpoint.path}: tensor {first_name(missing)} is missing: {name} needs it")
        self.extra = sorted(stored - set(expected))
        unplaced = [] if install is not None else unplaced_tensors(self.model, checkpoint.names(), expected)
        if unplaced:
            raise ArtifactError(f"{checkpoint.path}: {name} has no place for tensor {first_name(unplaced)}")
        stacks = [(stack.name, stack.blocks) for stack in self.stacks]
        self.behind = set() if model_free else prediction_tensors(stacks, stored)
        for place, value in expected.items():
            if place in stored and tuple(checkpoint.shape(place)) != tuple(value.shape) and value.numel() > 0:
                raise ArtifactError(
                    f"{checkpoint.path}: tensor {place} has shape {list(checkpoint.shape(place))}, config.json asks for {list(value.shape)}"
                )

    def _build_model(self, checkpoint: Checkpoint) -> Any:
        """The model on meta."""
        if not self.runs:
            return TensorModel(checkpoint, self.dtype)
        return build_skeleton(self.config, self.dtype, stored=checkpoint.names())

    # ---------------------------------------------------------------- names and tensors
    @property
    def parameter_count(self) -> int:
        """Numbers of all parameters, tied ones once."""
        named = self.model.named_parameters(remove_duplicate=False)
        return sum(value.numel() for name, value in named if name not in self.ties)

    @property
    def predicting(self) -> list[str]:
        """Stored tensors of layers for multi-token prediction: behind the last block, or known to transformers as none of the model's."""
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return [n for n in self.extra if n in self.behind or any(re.search(pattern, n) for pattern in ignored)]

    def block_prefix(self, index: int) -> str:
        """Prefix of the names of block `index`, with a final dot."""
        number, local = self._place(index)
        stack = self.stacks[number]
        return f"{stack.name}.{list(stack.blocks._modules)[local]}."

    def is_text(self, name: str) -> bool:
        """Whether the module or tensor `name` belongs to the language model: all does, but for towers of other modalities beside it."""
        if self.kind != "decoder" or self.config.get_text_config() is self.config:
            return True
        model: Any = self.model
        parts = [model.get_decoder(), model.get_output_embeddings()]
        homes = [own for own, module in model.named_modules() if any(module is part for part in parts)]
        return any(name == home or name.startswith(f"{home}.") for home in homes)

    def is_inside(self, name: str) -> bool:
        """Whether the module or tensor `name` belongs to a block; a layer for multi-token prediction behind the last is none."""
        return any(name.startswith(f"{stack.name}.") for stack in self.stacks) and name not in self.behind

    def outside_names(self) -> list[str]:
        """Stored tensors that belong to no block, in a fixed order."""
        return sorted(n for n in self._kept() if not self.is_inside(n))

    def block_names(self, index: int) -> list[str]:
        """Names of the stored tensors of block `index`, sorted."""
        prefix = self.block_prefix(index)
        return sorted(n for n in self._kept() if n.startswith(prefix))

    def _kept(self) -> list[str]:
        return [n for n in self.checkpoint.names() if n not in self.checkpoint.dropped]

    def _place(self, index: int) -> tuple[int, int]:
        """The stack of block `index`, and its place there."""
        number = max(n for n, stack in enumerate(self.stacks) if stack.first <= index)
        return number, index - self.stacks[number].first

    def load_outside(self, head: bool = True) -> None:
        """Read everything that is no block: embeddings, final norm, and unless told otherwise a head that is no embedding too."""
        extra = set(self.extra)
        tied = self.ties
        for name in self.outside_names():
            if name not in extra and name not in tied and (head or not self.is_head(name)):
                set_tensor(self.model, name, self._read(self.model, name, name))
        for name, source in tied.items():
            if self.checkpoint.has(source):
                set_tensor(self.model, name, self.model.get_parameter(source).data)
        for name, buffer in self.model.named_buffers():
            if not self.is_inside(name) and buffer.device != self.device and buffer.device.type != "meta":
                set_tensor(self.model, name, buffer.to(self.device))
        self._held = "all" if head else "before"

    def is_head(self, name: str) -> bool:
        """Whether a tensor is the output head's alone, which nothing before the blocks reads."""
        head = self.model.get_output_embeddings()
        if head is None or name in self.ties.values():
            return False
        home = next(own for own, module in self.model.named_modules() if module is head)
        return name.startswith(f"{home}.")

    def release_outside(self) -> None:
        """Drop what `load_outside` read; it is read again for as long as something needs it."""
        for name, module in self.model.named_modules():
            if not self.is_inside(f"{name}."):
                _to_meta(module)
        self._held = ""

    @contextmanager
    def outside(self, head: bool = True) -> Iterator[None]:
        """What is no block (`load_outside`) is in memory inside, and afterwards what of it was before."""
        before = self._held
        if before in ("all", "all" if head else "before"):
            yield
            return
        self.load_outside(head)
        try:
            yield
        finally:
            self.release_outside()
            if before:
                self.load_outside(head=False)

    def _read(self, part: nn.Module, local: str, name: str) -> torch.Tensor:
        """A stored tensor on the device, in the dtype its place in the model has (checkpoints may be stored wider)."""
        value = self.checkpoint.get(name)
        parent_name, _, leaf = local.rpartition(".")
        place = part.get_submodule(parent_name)._parameters.get(leaf)
        if place is not None and place.is_floating_point() and value.is_floating_point():
            value = value.to(place.dtype)
        return value.to(self.device)

    @contextmanager
    def loaded_block(self, index: int) -> Iterator[nn.Module]:
        """Block `index` with its weights in memory; they are released on exit."""
        block = self.blocks[index]
        prefix = self.block_prefix(index)
        extra = set(self.extra)
        for name in self.block_names(index):
            if name not in extra:
                set_tensor(block, name[len(prefix) :], self._read(block, name[len(prefix) :], name))
        for name, buffer in block.named_buffers():
            if buffer.device.type not in ("meta", self.device.type):
                set_tensor(block, name, buffer.to(self.device))
        try:
            with self._loaded(block, None) if self._loaded is not None else nullcontext():
                yield block
        finally:
            release(block)
            return_memory()  # or what the allocator keeps between the blocks' buffers grows with depth


def release(module: nn.Module) -> None:
    """Drop the weights of `module` (back to meta) so that its memory is free; non-persistent buffers stay."""
    for child in module.modules():
        _to_meta(child)


def _to_meta(module: nn.Module) -> None:
    """Drop the module's own weights, not those of the modules in it."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            module._buffers[key] = torch.empty_like(buffer, device="meta")
