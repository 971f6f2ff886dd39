"""Streamed model: in memory one transformer block at a time.

`StreamedModel` serves the pipeline (which changes each block before going on) and evaluation (which only runs them). It knows
no architecture: the embedding part runs once with every block replaced by a recorder, which yields the hidden states that
enter block 0 and the keyword arguments (masks, rotary tables) that each block is called with.

From block to block goes a state `[b, n, hidden]`: the hidden states, followed in the decoder of an encoder-decoder by the encoder's
output. What a row of integers means to a model, `compress.data.layout` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.data.layout import HalvedRows, ImageRows, SpeechRows, TextRows
from compress.model.hidden_states import HiddenStates
from compress.model.partial import Handover, PartialModel, Recorder
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.decoding.seq2seq import decoder_start
from runtime.engines.torch.seq2seq import encoder_output
from runtime.errors import CompressError, RequestError
from runtime.layers.dense_products import products
from runtime.layers.unrounded import behind, unrounded
from runtime.modeling.cache_argument import CACHE_ARGUMENTS
from runtime.modeling.skeleton import reads_features, reads_images

Batch = tuple[torch.Tensor, torch.Tensor | None]  # rows [b, s] int64, mask [b, s] bool (None: all tokens are valid)


def with_prefix(rows: torch.Tensor, prefix: Sequence[int]) -> torch.Tensor:
    """Rows `[n, s]` of text behind prefix tokens, of the same length: their last tokens are cut off; see `check_room`."""
    check_room(rows.shape[1], len(prefix))
    return behind(prefix, rows)[:, : rows.shape[1]]


def check_room(length: int, tokens: int) -> None:
    """RequestError where so many prefix tokens leave no text in rows of a length; text is two tokens, of which one is predicted."""
    if length - tokens < 2:
        text = f"{tokens} tokens leave no text in rows of {length}; raise calibration.sequence_length"
        raise RequestError(f"kv_cache.calibrated.prefix_tokens: {text}")


class _PreludeDoneError(Exception):
    """Raised by the last recorder: nothing after the blocks is wanted."""


class _TailDoneError(Exception):
    """Raised at the output head when only its input is wanted."""


class StreamedModel(PartialModel):
    """A checkpoint (or artifact) that runs block by block. Arguments as `PartialModel`'s.

    Attributes:
        prefix: token ids. Of rows that begin with them, layers read the inputs of these tokens without rounding, and statistics leave
            them out: static grids are for the tokens behind.
    """

    prefix: tuple[int, ...] = ()

    def __init__(self, checkpoint: Checkpoint, *arguments: Any, **options: Any) -> None:
        super().__init__(checkpoint, *arguments, **options)
        self.rows = ImageRows(self.config) if reads_images(self.model) else TextRows()
        if self.kind == "encoder-decoder":
            start = decoder_start(Artifact(checkpoint.path))[0]
            window = getattr(self.config, "max_source_positions", None)
            self.rows = SpeechRows(start, window) if reads_features(self.model) else HalvedRows(start)
        self._handovers: dict[int, Handover] = {}
        self._positions: dict[tuple[Any, ...], int] = {}  # that the encoder gives, for rows of a shape
        self._memory_names: list[str] = []  # what the decoder's blocks call the encoder's output
        self._kwargs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        # What is added to hidden states in front of blocks, by batch: features of images (DeepStack). {block: (positions, values)}
        self._added: dict[tuple[Any, ...], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def vocabulary(self) -> int:
        """Rows of the input embeddings."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- rows
    def _entering(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the (first) stack reads of rows, as the model takes it."""
        inputs = {name: value.to(self.device) for name, value in self.rows.inputs(ids).items()}
        return {n: value.to(self.dtype) if value.is_floating_point() else value for n, value in inputs.items()}

    def call(self, module: Any, batch: Batch, **more: Any) -> Any:
        """Run `module`, a whole model of this kind, over a batch without a cache; an encoder without its heads."""
        ids, mask = batch
        arguments: dict[str, Any] = self._entering(ids)
        if mask is not None:
            arguments["attention_mask"] = mask.to(self.device).long()
        with products(self.device, self.dtype):
            if self.kind == "encoder":
                return module.base_model(**arguments, **more)
            if self.kind == "encoder-decoder":
                arguments["decoder_input_ids"] = self.rows.target(ids).to(self.device)
            return module(**arguments, use_cache=False, **more)

    def _leading(self, ids: torch.Tensor) -> int:
        """Tokens of the prefix that rows begin with: all or none."""
        count = len(self.prefix)
        whole = 0 < count <= ids.shape[1]
        return count if whole and bool((ids[:, :count] == ids.new_tensor(self.prefix)).all()) else 0

    def counted(self, batch: Batch) -> torch.Tensor | None:
        """Bool `[b, s]`, the tokens of a batch that statistics count; None: all."""
        ids, mask = batch
        if count := self._leading(ids):
            mask = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.clone()
            mask[:, :count] = False
        return mask

    # ---------------------------------------------------------------- running
    @torch.inference_mode()
    def prelude(self, batches: list[Batch], states: HiddenStates, own: Collection[int] | None = None) -> None:
        """Fill `states` with what enters block 0 for each batch: `[b, s, hidden]` in the model's dtype; of some (`own`) or all."""
        for number in range(len(batches)) if own is None else own:
            batch = batches[number]
            hidden, kwargs = self._record(0, batch, partial(self.call, self.model, batch))
            states.put(number, hidden)
            self._remember((0, *self._call_key(*batch)), kwargs)

    @torch.inference_mode()
    def block_kwargs(self, batch: Batch, index: int = 0) -> dict[str, Any]:
        """Keyword arguments of block `index` for `batch` (computed once for equal shapes and masks)."""
        number, local = self._place(index)
        key = (number, *self._call_key(*batch))
        if key not in self._kwargs:
            if number == 0:
                self._remember(key, self._record(0, batch, lambda: self.call(self.model, batch))[1])
            else:
                size = self.config.get_text_config().hidden_size
                shape = len(batch[0]), self.own_length(0, batch), size
                self._enter_decoder(torch.zeros(shape, dtype=self.dtype, device=self.device), batch)
        return self._kwargs[key][local]

    def _remember(self, key: tuple[Any, ...], calls: list[dict[str, Any]]) -> None:
        """Keep how blocks are called for a batch. What is equal for another batch (the usual case with images of one size) is kept once."""
        if key not in self._kwargs:
            self._kwargs[key] = next((known for known in self._kwargs.values() if _equal(known, calls)), calls)

    def _record(self, number: int, batch: Batch, call: Callable[[], Any]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Run `call` with recorders for the blocks of a stack: what enters the first, and what each is called with."""
        stack = self.stacks[number]
        first: list[torch.Tensor] = []
        calls: list[dict[str, Any]] = []

        def sink(hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
            if not first:
                first.append(hidden)
            elif bare and bool(hidden.any()):
                positions = hidden.any(dim=2)
                self._added.setdefault(self._call_key(*batch), {})[len(calls)] = (
                    positions.cpu(),
                    hidden[positions].cpu(),
                )
            calls.append({k: v for k, v in kwargs.items() if k not in (*CACHE_ARGUMENTS, "use_cache")})
            if len(calls) == len(stack.blocks):
                raise _PreludeDoneError

        known = self._handovers.get(number)
        learn = known is None or known.depends_on_batch
        bare = isinstance(self.rows, ImageRows)  # then what arrives at later blocks is what was added on the way
        handover = Handover(None) if known is None or learn else known
        recorders = [Recorder(b, sink, handover, run=learn and i == 0, bare=bare) for i, b in enumerate(stack.blocks)]
        with (
            suppress(_PreludeDoneError),
            self._replaced(number, recorders),
            self.outside(head=False),
            self._first_block(number, learn),
            products(self.device, self.dtype),
        ):
            call()
        if len(calls) != len(stack.blocks):
            raise CompressError(
                f"{type(self.model).__name__} ran {len(calls)} of its {len(stack.blocks)} blocks; it cannot be streamed"
            )
        self._handovers[number] = handover
        if number == 0:
            self._positions[self.rows.shape(batch[0])] = int(first[0].shape[1])
        return first[0], calls

    @contextmanager
    def _replaced(self, number: int, blocks: list[Recorder]) -> Iterator[None]:
        stack = self.stacks[number]
        self.model.set_submodule(stack.name, nn.ModuleList(blocks))
        try:
            yield
        finally:
            self.model.set_submodule(stack.name, stack.blocks)

    def _first_block(self, number: int, wanted: bool) -> AbstractContextManager[Any]:
        stack = self.stacks[number]
        # Buffers count too: the layers of an artifact hold nothing else, and norms may be without weights (OLMo).
        held = [*stack.blocks[0].parameters(), *stack.blocks[0].buffers()]
        there = all(tensor.device.type != "meta" for tensor in held)
        return self.loaded_block(stack.first) if wanted and not there else nullcontext()

    def run_block(
        self,
        index: int,
        state: torch.Tensor,
        batch: Batch,
        dtype: torch.dtype | None = None,
        block: nn.Module | None = None,
    ) -> torch.Tensor:
        """One block over one batch, a state in and out.

        Args:
            dtype: what it is to compute in, where its weights were cast.
            block: computes in its place.
        """
        number, _ = self._place(index)
        kwargs = self.block_kwargs(batch, index)
        if torch.is_grad_enabled():  # what was recorded in inference mode cannot be kept for a pass back
            kwargs = _mapped(kwargs, lambda value: value.clone() if value.is_inference() else value)
        state = state.to(self.device)
        hidden, memory = state, None
        if number > 0:
            length = self.rows.target(batch[0]).shape[1]
            hidden, memory = state[:, :length], state[:, length:]
            kwargs = {**kwargs, **dict.fromkeys(self._memory_names, memory)}
        if dtype is not None:
            hidden, kwargs = hidden.to(dtype), _cast(kwargs, dtype)
        module, leading = self.blocks[index] if block is None else block, self._leading(batch[0])
        with products(self.device, dtype or self.dtype), unrounded(module, leading) if leading else nullcontext():
            out = module(hidden, **kwargs)
        out = out[0] if isinstance(out, (tuple, list)) else out
        return out if memory is None else torch.cat([out, memory.to(out.dtype)], dim=1)

    def own_length(self, index: int, batch: Batch) -> int:
        """Positions of block `index`'s state that are its own: behind those of a decoder the encoder's follow."""
        if self._place(index)[0] > 0:
            return int(self.rows.target(batch[0]).shape[1])
        known = self.rows.encoded(batch[0])
        if known is not None:
            return known
        self.block_kwargs(batch, 0)  # which learns it
        return self._positions[self.rows.shape(batch[0])]

    def _call_key(self, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[Any, ...]:
        full = mask is None or bool(mask.all())
        return (self.rows.shape(ids), None if full else mask.cpu().numpy().tobytes())  # type: ignore[union-attr]

    def advance(self, index: int, state: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`run_block`, and after the encoder's last block what enters the decoder: the state for block `index + 1`."""
        return self.hand_over(index, self.run_block(index, state, batch), batch)

    def hand_over(self, index: int, state: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The state for block `index + 1`, given what block `index` gave (or was given, where it is passed by)."""
        if len(self.stacks) == 2 and index + 1 == self.stacks[1].first:
            with torch.inference_mode():
                encoder: Any = self.model.get_encoder()
                with self._handing_on(0, state, batch):
                    memory = encoder(**self._entering(batch[0])).last_hidden_state
                return self._enter_decoder(memory, batch)
        if isinstance(self.rows, ImageRows) and index + 1 < len(self.blocks):
            self.block_kwargs(batch, index)  # which learns what is added
            added = self._added.get(self._call_key(*batch), {}).get(index + 1)
            if added is not None:
                positions, values = (value.to(self.device) for value in added)
                state = state.to(self.device).index_put((positions,), values, accumulate=True)
        return state

    def _enter_decoder(self, memory: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The state that enters the decoder's first block, given the encoder's output `[b, s, hidden]`."""
        if batch[1] is not None:
            raise CompressError("encoder-decoders are compressed on rows without padding")
        target = self.rows.target(batch[0]).to(self.device)
        hidden, calls = self._record(1, batch, lambda: self._decode(target, memory))
        self._memory_names = [name for name, value in calls[0].items() if value is memory]
        if not self._memory_names or hidden.shape[2] != memory.shape[2]:
            raise CompressError(f"{type(self.model).__name__} has a decoder that this pipeline cannot follow")
        kept = [{k: v for k, v in call.items() if k not in self._memory_names} for call in calls]
        self._kwargs.setdefault((1, *self._call_key(*batch)), kept)
        return torch.cat([hidden, memory], dim=1)

    def _decode(self, target: torch.Tensor, memory: torch.Tensor) -> Any:
        model: Any = self.model
        return model(encoder_outputs=encoder_output(memory), decoder_input_ids=target, use_cache=False)

    @contextmanager
    def _handing_on(self, number: int, hidden: torch.Tensor, batch: Batch) -> Iterator[None]:
        """The blocks of a stack give place to ones that hand on `hidden`, of a batch, with all that is in no block loaded."""
        stack = self.stacks[number]
        if number not in self._handovers:
            self.block_kwargs(batch, stack.first)
        handover = self._handovers[number]
        loaded = self._loaded(self.model, self.is_inside) if self._loaded is not None else nullcontext()
        recorders = [Recorder(block, lambda _h, _k: None, handover, hidden) for block in stack.blocks]
        with self._replaced(number, recorders), self.outside(), loaded, products(self.device, self.dtype):
            yield

    @torch.inference_mode()
    def head_input(self, state: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What enters the output head `[b, s, hidden]`, given the state after the last block: after the final norm, usually."""
        seen: list[torch.Tensor] = []

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen.append(args[0])
            raise _TailDoneError

        with self.model.get_output_embeddings().register_forward_pre_hook(hook), suppress(_TailDoneError):
            self.outputs(state, ids)
        return seen[0]

    @torch.inference_mode()
    def outputs(self, state: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """What users get, in the model's dtype, given the state after the last block: logits `[b, s, vocab]`, or of an encoder
        hidden states `[b, s, hidden]`. `rows` `[b, s]` are those it belongs to; encoder-decoders need them.

        All that comes after the blocks runs, with blocks that only hand on hidden states in their place.
        """
        return self.tail(state, rows)

    def tail(self, state: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """`outputs`, which gradients may go back through."""
        if self.kind == "encoder-decoder":
            assert rows is not None
            length = self.rows.target(rows).shape[1]
            target = torch.zeros(len(state), length, dtype=torch.int64, device=self.device)
            with self._handing_on(1, state[:, :length], (rows, None)):
                return self._decode(target, state[:, length:]).logits
        ids = torch.zeros(state.shape[:2], dtype=torch.int64, device=self.device)
        with self._handing_on(0, state, (torch.zeros(1, 2, dtype=torch.int64), None)):
            out = self.call(self.model, (ids, None))
        return out.last_hidden_state if self.kind == "encoder" else out.logits


def run_blocks(
    streamed: StreamedModel,
    batches: list[Batch],
    spill: Path | None,
    on_block: Callable[[int], None] | None = None,
    skipped: Collection[int] = (),
    on_state: Callable[[int, int, torch.Tensor], None] | None = None,
) -> HiddenStates:
    """Hidden states after the last block for every batch, with some blocks passed by. What is in no block is not in memory afterwards.

    Args:
        spill: directory for the states; None: they are in memory.
        on_block: is told each block that is done. on_state: is given each block that ran, the number of a batch, and the block's output.
    """
    states = HiddenStates(len(batches), spill)
    # The output of an encoder goes through what is in no block on its way to the decoder, batch by batch.
    around = streamed.outside() if len(streamed.stacks) > 1 else nullcontext()
    with around, torch.inference_mode():
        with streamed.outside(head=False):
            streamed.prelude(batches, states)
        for index in range(len(streamed.blocks)):
            passed = index in skipped
            with nullcontext() if passed else streamed.loaded_block(index):
                for number, batch in enumerate(batches):
                    state = states.get(number)
                    if not passed:
                        state = streamed.run_block(index, state, batch)
                    if on_state is not None and not passed:
                        on_state(index, number, state)
                    states.put(number, streamed.hand_over(index, state, batch))
            if on_block is not None:
                on_block(index)
    return states


def _equal(one: Any, other: Any) -> bool:
    """Whether nested arguments of blocks are equal, tensors by value."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return _mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested arguments of blocks with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(v, change) for v in value)
    return value
