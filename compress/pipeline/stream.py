"""A model that is in memory one transformer block at a time.

`StreamedModel` serves the pipeline (which changes each block before going on) and evaluation (which only runs them). It knows
no architecture: the embedding part runs once with every block replaced by a recorder, which yields the hidden states that
enter block 0 and the keyword arguments (masks, rotary tables) that each block is called with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.pipeline.arithmetic import products
from compress.pipeline.hidden import HiddenStates
from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError, CompressError
from runtime.skeleton import build_skeleton, find_blocks, read_config, set_tensor, tied_names
from runtime.weights import main_dtype

Batch = tuple[torch.Tensor, torch.Tensor | None]  # ids [b, s] int64, mask [b, s] bool (None: all tokens are valid)


class _PreludeDoneError(Exception):
    """Raised by the last recorder: nothing after the blocks is wanted."""


class _TailDoneError(Exception):
    """Raised at the output head when only its input is wanted."""


class _Recorder(nn.Module):
    """Stands in for a block: tells `sink` how it was called, and hands on its hidden states (or `instead`) unchanged."""

    def __init__(
        self,
        block: nn.Module,
        sink: Callable[[torch.Tensor, dict[str, Any]], None],
        instead: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["_instead"] = instead
        self.__dict__["_block"] = block  # not registered: the recorder must have no parameters of its own
        self.__dict__["_sink"] = sink

    def __getattr__(self, name: str) -> Any:
        # Decoders read facts off their blocks while looping (Gemma: `layer.attention_type`).
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(self._block.forward).parameters)
        self._sink(hidden_states, {**dict(zip(names[1:], args, strict=False)), **kwargs})
        value = hidden_states if self._instead is None else self._instead
        return (value,) if _returns_tuple(self._block) else value


def _returns_tuple(block: nn.Module) -> bool:
    return str(inspect.signature(block.forward).return_annotation).lower().startswith("tuple")


class StreamedModel:
    """A checkpoint (or artifact) directory whose weights are read block by block.

    Args:
        checkpoint: where the tensors come from.
        device: where blocks run.
        install: called with the model right after the skeleton exists; an artifact's reader replaces Linear modules there by
            compressed ones. None for plain checkpoints.
        loaded: a context manager that is entered with (part of the model, name prefix to leave alone) once the tensors of that
            part are there, and left before they go.
        dtype: what the model computes in; default config.json's, as `runtime.load` does.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: str | torch.device = "cpu",
        install: Callable[[nn.Module], None] | None = None,
        loaded: Callable[[nn.Module, str | None], AbstractContextManager[None]] | None = None,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.config = read_config(checkpoint.path, trust_remote_code)
        self.dtype = dtype or main_dtype(checkpoint)
        self._loaded = loaded
        self.model = build_skeleton(self.config, self.dtype, trust_remote_code)
        if install is not None:
            install(self.model)
        self.blocks_name, self.blocks = find_blocks(self.model)
        self._kwargs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._outside_is_loaded = False
        tied = tied_names(self.model)
        stored = set(checkpoint.names())
        expected: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        expected |= {n: b for n, b in self.model.named_buffers(remove_duplicate=False) if _is_persistent(self.model, n)}
        # A tied parameter need not be stored; when it is, it must be the tensor it is tied to.
        missing = sorted(n for n in expected if n not in stored and not (n in tied and tied[n] in stored))
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ArtifactError(
                f"{checkpoint.path}: tensor {missing[0]} is missing{more}: {type(self.model).__name__} needs it"
            )
        self.extra = sorted(stored - set(expected))
        for name, value in expected.items():
            if name in stored and tuple(checkpoint.shape(name)) != tuple(value.shape) and value.numel() > 0:
                raise ArtifactError(
                    f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, config.json asks for {list(value.shape)}"
                )

    # ---------------------------------------------------------------- names and tensors
    def block_prefix(self, index: int) -> str:
        return f"{self.blocks_name}.{index}."

    def outside_names(self) -> list[str]:
        """Stored tensors that belong to no block, in a fixed order."""
        inside = self.blocks_name + "."
        return sorted(n for n in self.checkpoint.names() if not n.startswith(inside))

    def block_names(self, index: int) -> list[str]:
        prefix = self.block_prefix(index)
        return sorted(n for n in self.checkpoint.names() if n.startswith(prefix))

    def load_outside(self) -> None:
        """Read everything that is no block: embeddings, final norm, head."""
        extra = set(self.extra)
        tied = tied_names(self.model)
        for name in self.outside_names():
            if name not in extra and name not in tied:
                set_tensor(self.model, name, self._read(self.model, name, name))
        for name, source in tied.items():
            if self.checkpoint.has(source):
                set_tensor(self.model, name, self.model.get_parameter(source).data)
        for name, buffer in self.model.named_buffers():
            if (
                not name.startswith(self.blocks_name + ".")
                and buffer.device != self.device
                and buffer.device.type != "meta"
            ):
                set_tensor(self.model, name, buffer.to(self.device))
        self._outside_is_loaded = True

    def release_outside(self) -> None:
        """Drop what `load_outside` read; it is read again for as long as something needs it."""
        for name, module in self.model.named_modules():
            if not f"{name}.".startswith(self.blocks_name + "."):
                _to_meta(module)
        self._outside_is_loaded = False

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """What is no block is in memory inside, and afterwards if it was before."""
        if self._outside_is_loaded:
            yield
            return
        self.load_outside()
        try:
            yield
        finally:
            self.release_outside()

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

    # ---------------------------------------------------------------- running
    @torch.inference_mode()
    def prelude(self, batches: list[Batch], states: HiddenStates) -> None:
        """Fill `states` with what enters block 0 for each batch: `[b, s, hidden]` in the model's dtype."""
        for number, (ids, mask) in enumerate(batches):
            hidden, kwargs = self._run_prelude(ids, mask)
            states.put(number, hidden)
            self._kwargs.setdefault(_call_key(ids, mask), kwargs)

    @torch.inference_mode()
    def block_kwargs(self, batch: Batch) -> list[dict[str, Any]]:
        """Keyword arguments of every block for `batch` (computed once for equal shapes and masks)."""
        key = _call_key(*batch)
        if key not in self._kwargs:
            self._kwargs[key] = self._run_prelude(*batch)[1]
        return self._kwargs[key]

    def _run_prelude(self, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        first: list[torch.Tensor] = []
        calls: list[dict[str, Any]] = []

        def sink(hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
            if not first:
                first.append(hidden)
            calls.append({k: v for k, v in kwargs.items() if k not in ("past_key_values", "use_cache")})
            if len(calls) == len(self.blocks):
                raise _PreludeDoneError

        parent_name, _, leaf = self.blocks_name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        recorders = nn.ModuleList(_Recorder(block, sink) for block in self.blocks)
        setattr(parent, leaf, recorders)
        arguments: dict[str, Any] = {"input_ids": ids.to(self.device), "use_cache": False}
        if mask is not None:
            arguments["attention_mask"] = mask.to(self.device).long()
        try:
            with self._outside(), products(self.device):
                self.model(**arguments)
        except _PreludeDoneError:
            pass
        finally:
            setattr(parent, leaf, self.blocks)
        if len(calls) != len(self.blocks):
            raise CompressError(
                f"{type(self.model).__name__} ran {len(calls)} of its {len(self.blocks)} blocks; it cannot be streamed"
            )
        return first[0], calls

    def run_block(self, index: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """One block over one batch: `[b, s, hidden]` in and out."""
        kwargs = self.block_kwargs(batch)[index]
        with products(self.device):
            out = self.blocks[index](hidden.to(self.device), **kwargs)
        return out[0] if isinstance(out, tuple) else out

    @torch.inference_mode()
    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the output head `[b, s, hidden]`, given the last block's output: after the final norm, usually."""
        seen: list[torch.Tensor] = []

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen.append(args[0])
            raise _TailDoneError

        handle = self.model.get_output_embeddings().register_forward_pre_hook(hook)
        try:
            self._run_tail(hidden)
        except _TailDoneError:
            pass
        finally:
            handle.remove()
        return seen[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[b, s, vocab]` (model dtype) given the last block's output."""
        return self._run_tail(hidden)

    def _run_tail(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run all that comes after the blocks, by letting blocks that only hand on `hidden` stand in for them."""
        parent_name, _, leaf = self.blocks_name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        setattr(parent, leaf, nn.ModuleList(_Recorder(block, lambda _h, _k: None, hidden) for block in self.blocks))
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        try:
            loaded = self._loaded(self.model, self.blocks_name + ".") if self._loaded is not None else nullcontext()
            with self._outside(), loaded, products(self.device):
                return self.model(input_ids=ids, use_cache=False).logits
        finally:
            setattr(parent, leaf, self.blocks)


def run_blocks(
    streamed: StreamedModel, batches: list[Batch], spill: Path | None, on_block: Callable[[int], None] | None = None
) -> HiddenStates:
    """Hidden states after the last block for every batch."""
    states = HiddenStates(len(batches), spill)
    streamed.load_outside()
    streamed.prelude(batches, states)
    with torch.inference_mode():
        for index in range(len(streamed.blocks)):
            with streamed.loaded_block(index):
                for number, batch in enumerate(batches):
                    states.put(number, streamed.run_block(index, states.get(number), batch))
            if on_block is not None:
                on_block(index)
    return states


def _call_key(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[Any, ...]:
    full = mask is None or bool(mask.all())
    return (tuple(ids.shape), None if full else mask.cpu().numpy().tobytes())  # type: ignore[union-attr]


def _is_persistent(model: nn.Module, name: str) -> bool:
    parent_name, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(parent_name)._non_persistent_buffers_set


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
