"""Sublayers of a native decoder that compute by themselves: views of some of its layers, and trained adapters before its head."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from runtime.engines.base import Chunk, output_rows
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.parts import Structures, linears
from runtime.engines.native.pool import Pool, decoder_of
from runtime.engines.program.operations import Norm
from runtime.errors import ArtifactError
from runtime.kernels.cpu.decoder import OPS, PAGE, SKIP_ATTENTION, SKIP_MLP, Block, Decoder, Op
from runtime.kernels.cpu.library import DF11, FLOAT8, KINDS, MX8, TERNARY, TYPES, Linear, group_bytes
from runtime.kernels.cpu.zero_groups import stored_groups


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
        engine: NativeEngine,
        layers: Sequence[int],
        skip_attention: Collection[int] = (),
        skip_mlp: Collection[int] = (),
    ) -> None:
        self.engine = engine
        skips = {layer: SKIP_ATTENTION * (layer in skip_attention) | SKIP_MLP * (layer in skip_mlp) for layer in layers}
        self._skips = {layer: skip for layer, skip in skips.items() if skip != SKIP_ATTENTION | SKIP_MLP}
        self._bound: weakref.WeakKeyDictionary[Pool, Decoder] = weakref.WeakKeyDictionary()
        self._unbound = self._decoder(engine.parts.blocks)

    def read(self, pool: Pool, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits after the last token of each chunk, float32 `[chunks, vocab]`."""
        return self._run(pool, chunks, output_rows(chunks))[0]

    def states(self, pool: Pool, chunks: Sequence[Chunk]) -> torch.Tensor:
        """The residual stream after the last layer, float32 `[tokens of all chunks, hidden]`."""
        return self._run(pool, chunks, ())[1]

    @torch.inference_mode()
    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of what layers leave in the residual stream, float32 `[rows, hidden]`, after the final norm: `[rows, vocab]`."""
        found = []
        for part in states.split(self.engine.most_rows):
            count = len(part)
            ready = self.engine.prepare(
                self._unbound, [Chunk(range(count), 0, (0,))], range(count), part.contiguous().clone()
            )
            ready.step.last = 0
            self.engine.compute(ready.step)
            found.append(ready.logits)
        return torch.cat(found) if len(found) != 1 else found[0]

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that a token reads."""
        blocks = self.engine.parts.blocks
        return linear_bytes(self.engine.parts.head) + sum(
            block_bytes(blocks[layer], skip) for layer, skip in self._skips.items()
        )

    @torch.inference_mode()
    def _run(self, pool: Pool, chunks: Sequence[Chunk], outputs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = self._bound.get(pool)
        if decoder is None:
            decoder = self._bound[pool] = self._decoder(pool.blocks)
            decoder.cache_type, decoder.storage = pool.decoder.cache_type, pool.decoder.storage
        ready = self.engine.prepare(decoder, chunks, outputs)
        stored = pool.begin(ready.step, chunks, drafts=True)  # what the step points to
        self.engine.compute(ready.step)
        if stored is not None:
            pool.check()
        return ready.logits, ready.x

    def _decoder(self, blocks: Any) -> Decoder:
        """Of these layers' weights and keys and values."""
        return decoder_of(self.engine.parts, [with_skip(blocks[layer], skip) for layer, skip in self._skips.items()])


def with_skip(block: Block, skip: int) -> Block:
    """A copy of a block without some of it."""
    found = Block.from_buffer_copy(block)
    found.skip = skip
    return found


def block_bytes(block: Block, skip: int = 0) -> float:
    """Bytes of weights that a token reads of a block."""
    return sum(
        share * linear_bytes(linear) for op, linear, share in linears(block.ops, block.count) if not op.half & skip
    )


def linear_bytes(linear: Linear) -> float:
    """Bytes of a layer's weights, without scales and the like."""
    if linear.kind == KINDS["dense"] and linear.weight_type == TERNARY:
        words = ctypes.c_int32.from_address(linear.row_offsets + 4 * linear.rows).value  # of all rows
        return 2.0 * words
    if linear.kind == KINDS["dense"]:
        sizes = {kind: dtype.itemsize for dtype, kind in TYPES.items()} | {FLOAT8: 1, MX8: 1}
        size: float = 1 + linear.code_bits / 8 if linear.weight_type == DF11 else sizes[linear.weight_type]
    else:
        stored = stored_groups(linear) / max(1, -(-linear.rows // 32) * linear.groups)
        size = group_bytes(linear.kind, 32) / 32 * stored
    return size * linear.rows * linear.columns


def parts_of(engine: Any) -> NativeEngine | str:
    """The engine, where parts of it can compute by themselves, or the reason why not."""
    if isinstance(engine, NativeEngine) and engine.policy is not None and engine.policy.evict is not None:
        return "its cache's policy evicts tokens, which parts of the model would still look for"
    if type(engine) is NativeEngine:
        return engine
    wanted = "only the decoder in C, on a CPU, computes with parts of a model"
    if isinstance(engine, NativeEngine):
        return f"{wanted}, all of it in memory; this one's layers are read from disk while others compute"
    return f"{wanted}; this one runs on {getattr(engine, 'description', type(engine).__name__)}"


class Adapter:
    """An attention block, maybe with a feed-forward half, then a norm of its own and the engine's head.

    Args:
        engine: whose head it goes on to; its heads are of the engine's shape.
        tensors: as in transformers: "self_attn.q_proj.weight", ..., "input_layernorm.weight", "norm.weight", and with a feed-forward half
            "post_attention_layernorm.weight", "mlp.gate_proj.weight", ...; all of one float dtype.
        layer: of the engine, whose window its attention has.
        where: what messages call the tensors.

    Attributes:
        page_size, page_bytes, most_rows, logits_width: as of a paged engine.
        weight_bytes: of its own weights. read_bytes: that a token reads, the head's too.

    Raises:
        ArtifactError: a tensor is missing, there is one too many, or it has another shape.
    """

    page_size = PAGE

    def __init__(self, engine: NativeEngine, tensors: Mapping[str, torch.Tensor], layer: int, where: str) -> None:
        parts = engine.parts
        self.engine = engine
        self.most_rows, self.logits_width = engine.most_rows, engine.logits_width
        self.page_bytes = parts.page_numbers * parts.cache_dtype.itemsize
        program = parts.program
        final = next(each.weights for each in program.tail if isinstance(each, Norm))
        block, norm = (engine.module.get_submodule(name) for name in (program.layers[layer].name, final.module))
        with torch.device("meta"):
            own: Any = type(block)(engine.module.config, layer)  # type: ignore[call-arg, arg-type]
            own.norm = type(norm)(parts.decoder.hidden)  # type: ignore[call-arg]
        whole = any(name.startswith("mlp.") for name in tensors)
        wanted = {
            name: like
            for name, like in own.state_dict().items()
            if whole or not name.startswith(("mlp.", "post_attention_"))
        }
        for name, like in wanted.items():
            _check(tensors.get(name), like, name, where)
        if tensors.keys() != wanted.keys():
            raise ArtifactError(f"{where} holds {min(tensors.keys() - wanted)}, which is no part of an adapter")
        own.load_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, strict=False, assign=True)
        structures = Structures(parts.buffers, own, f"{program.layers[layer].name}.")
        self.block = structures.block(program.layers[layer])
        self.block.skip = 0 if whole else SKIP_MLP
        # The engine's tail with the adapter's norm.
        self._tail = (Op * len(parts.tail))(*parts.tail)
        weight, bias, _ = structures.norm(replace(final, module="norm"))
        last = next(op.norm for op in self._tail if OPS[op.kind] == "norm")
        last.weight, last.bias = weight, bias
        self._keep = [tensor for tensor in structures.keep if tensor.device.type != "meta"]
        self._arrays = structures.arrays
        self.weight_bytes = sum(tensor.nbytes for tensor in self._keep)
        self.read_bytes = block_bytes(self.block, self.block.skip) + linear_bytes(parts.head)

    def make_memory(self, count: int) -> Pool:
        """Pages of the adapter's own keys and values."""
        pool = Pool(self.engine.parts, count, [self.block])
        pool.decoder.tail = self._tail
        return pool

    @torch.inference_mode()
    def read(self, memory: Pool, chunks: Sequence[Chunk], states: torch.Tensor) -> torch.Tensor:
        """Logits after the last token of each chunk, float32 `[chunks, vocab]`.

        Args:
            states: float32 `[tokens of all chunks, hidden]`, what the layers before it leave in the residual stream; overwritten.
        """
        ready = self.engine.prepare(memory.decoder, chunks, output_rows(chunks), states)
        self.engine.compute(ready.step)
        return ready.logits


def _check(tensor: torch.Tensor | None, like: torch.Tensor, name: str, where: str) -> None:
    """ArtifactError for a tensor of an adapter that is missing, of another shape, or of a dtype that C does not read."""
    if tensor is None:
        raise ArtifactError(f"{where} has no {name}")
    if tensor.shape != like.shape:
        raise ArtifactError(f"{where}: {name} is {list(tensor.shape)}, and this model needs {list(like.shape)}")
    if tensor.dtype not in TYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise ArtifactError(f"{where}: {name} is {str(tensor.dtype).removeprefix('torch.')}; allowed are {kinds}")
