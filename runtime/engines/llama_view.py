"""Parts of a decoder in C that compute by themselves, with its weights and in its pages: some of its layers, or not all of each layer."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch

from runtime.engines.base import Piece
from runtime.engines.llama import LlamaEngine, Pool
from runtime.kernels.cpu.decoder import SKIP_ATTENTION, SKIP_MLP, Block, Decoder
from runtime.kernels.cpu.library import KINDS, TYPES, Linear

_ATTENTION = ("query", "key", "value", "output")
_MLP = ("gate", "up", "down")
#: Bytes of a weight by kind; a kept one of 2:4 has four bits and its position two.
_BYTES = {KINDS["w4"]: 0.5, KINDS["w8"]: 1.0, KINDS["s24"]: 0.375}


class View:
    """Some layers of an engine, then its final norm and head.

    It reads what the engine has written to a pool, and writes keys and values of its own layers there, at the positions that it is
    given: who uses it sees to it that the engine computes these again before they count.

    Args:
        engine: whose weights are all in memory.
        layers: indices, in the order in which they run.
        skip_attention, skip_mlp: those of them whose attention or feed-forward half is left out.
    """

    def __init__(
        self,
        engine: LlamaEngine,
        layers: Sequence[int],
        skip_attention: Collection[int] = (),
        skip_mlp: Collection[int] = (),
    ) -> None:
        self.engine = engine
        skips = {layer: SKIP_ATTENTION * (layer in skip_attention) | SKIP_MLP * (layer in skip_mlp) for layer in layers}
        self._skips = {layer: skip for layer, skip in skips.items() if skip != SKIP_ATTENTION | SKIP_MLP}
        self._bound: weakref.WeakKeyDictionary[Pool, Decoder] = weakref.WeakKeyDictionary()
        self._unbound = self._decoder(engine.parts.blocks)

    def read(self, pool: Pool, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits after the last token of each piece, float32 `[pieces, vocab]`."""
        ends = accumulate(len(piece.tokens) for piece in pieces)
        return self._run(pool, pieces, [end - 1 for end in ends])[0]

    def states(self, pool: Pool, pieces: Sequence[Piece]) -> torch.Tensor:
        """The residual stream after the last layer, float32 `[tokens of all pieces, hidden]`."""
        return self._run(pool, pieces, ())[1]

    @torch.inference_mode()
    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of what layers leave in the residual stream, float32 `[rows, hidden]`, after the final norm: `[rows, vocab]`."""
        found = []
        for part in states.split(self.engine.most_rows):
            count = len(part)
            ready = self.engine.prepare(
                self._unbound, [Piece(range(count), 0, (0,))], range(count), part.contiguous().clone()
            )
            ready.step.last = 0
            self.engine.compute(ready.step)
            found.append(ready.logits)
        return torch.cat(found) if len(found) != 1 else found[0]

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that a token reads."""
        blocks = self.engine.parts.blocks
        return head_bytes(self.engine) + sum(block_bytes(blocks[layer], skip) for layer, skip in self._skips.items())

    @torch.inference_mode()
    def _run(self, pool: Pool, pieces: Sequence[Piece], outputs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = self._bound.get(pool)
        if decoder is None:
            decoder = self._bound[pool] = self._decoder(pool.blocks)
        ready = self.engine.prepare(decoder, pieces, outputs)
        self.engine.compute(ready.step)
        return ready.logits, ready.x

    def _decoder(self, blocks: Any) -> Decoder:
        """Of these layers' weights and keys and values."""
        return decoder_of(self.engine, [with_skip(blocks[layer], skip) for layer, skip in self._skips.items()])


def decoder_of(engine: LlamaEngine, blocks: Sequence[Block]) -> Decoder:
    """The engine's decoder with other blocks; it keeps the copies of these that it points to."""
    decoder = Decoder()
    ctypes.pointer(decoder)[0] = engine.parts.decoder
    decoder.layers = len(blocks)
    decoder.blocks = (Block * len(blocks))(*blocks)
    return decoder


def with_skip(block: Block, skip: int) -> Block:
    """A copy of a block without some of it."""
    found = Block.from_buffer_copy(block)
    found.skip = skip
    return found


def block_bytes(block: Block, skip: int = 0) -> float:
    """Bytes of weights that a token reads of a block."""
    fields = (() if skip & SKIP_ATTENTION else _ATTENTION) + (() if skip & SKIP_MLP else _MLP)
    return sum(linear_bytes(getattr(block, field)) for field in fields)


def head_bytes(engine: LlamaEngine) -> float:
    """Bytes of the head's weights."""
    return linear_bytes(engine.parts.decoder.head)


def linear_bytes(linear: Linear) -> float:
    """Bytes of a layer's weights, without scales and the like."""
    size = _BYTES.get(linear.kind) or next(dtype.itemsize for dtype, kind in TYPES.items() if kind == linear.scale_type)
    return float(size * linear.rows * linear.columns)


def parts_of(engine: Any) -> LlamaEngine | str:
    """The engine, where parts of it can compute by themselves, or the reason why not."""
    if type(engine) is LlamaEngine:
        return engine
    wanted = (
        "only the decoder in C computes with parts of a model: a compressed Llama, Mistral, Qwen2 or Qwen3 on a CPU"
    )
    if isinstance(engine, LlamaEngine):
        return f"{wanted}, all of it in memory; this one's layers are read from disk while others compute"
    return f"{wanted}; this one runs on {getattr(engine, 'description', type(engine).__name__)}"
