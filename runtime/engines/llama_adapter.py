"""A block that was trained to go on from some layers of a decoder in C, with keys and values of its own, before the decoder's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from runtime.engines.base import Piece
from runtime.engines.llama import LlamaEngine
from runtime.engines.llama_view import block_bytes, decoder_of, head_bytes, with_skip
from runtime.errors import ArtifactError
from runtime.kernels.cpu.decoder import PAGE, SKIP_MLP, Block, Decoder
from runtime.kernels.cpu.library import KINDS, TYPES, Linear

_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_HEAD_NORMS = {"query_norm": "q_norm", "key_norm": "k_norm"}


class AdapterPool:
    """Pages of an adapter's keys and values: `[pages, kv_heads, head_dim, PAGE]` and `[pages, kv_heads, PAGE, head_dim]`."""

    def __init__(self, adapter: Adapter, count: int) -> None:
        parts = adapter.engine.parts
        shape = (count, parts.kv_heads, parts.head_dim * PAGE)
        self.count = count
        self.tensors = [torch.empty(shape, dtype=parts.cache_dtype) for _ in range(2)]
        block = with_skip(adapter.block, adapter.block.skip)
        block.keys, block.values = (tensor.data_ptr() for tensor in self.tensors)
        self.decoder: Decoder = decoder_of(adapter.engine, [block])
        self.decoder.final_norm = adapter.norm.data_ptr()


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

    def __init__(self, engine: LlamaEngine, tensors: Mapping[str, torch.Tensor], layer: int, where: str) -> None:
        parts = engine.parts
        self.engine = engine
        self.most_rows, self.logits_width = engine.most_rows, engine.logits_width
        self.page_bytes = 2 * parts.kv_heads * parts.head_dim * PAGE * parts.cache_dtype.itemsize
        like = parts.blocks[layer]
        left = dict(tensors)
        self._keep: list[torch.Tensor] = []
        self._where = where
        hidden = (parts.decoder.hidden,)
        self.block = Block()
        self.block.window = like.window
        for field, name in _PROJECTIONS.items():
            setattr(self.block, field, self._linear(left, f"self_attn.{name}", getattr(like, field)))
        self.block.input_norm = self._vector(left, "input_layernorm.weight", hidden).data_ptr()
        for field, name in _HEAD_NORMS.items():
            if getattr(like, field):
                setattr(self.block, field, self._vector(left, f"self_attn.{name}.weight", (parts.head_dim,)).data_ptr())
        if any(name.startswith("mlp.") for name in left):
            for field, name in _MLP.items():
                setattr(self.block, field, self._linear(left, f"mlp.{name}", getattr(like, field)))
            self.block.mlp_norm = self._vector(left, "post_attention_layernorm.weight", hidden).data_ptr()
        else:
            self.block.skip = SKIP_MLP
        self.norm = self._vector(left, "norm.weight", hidden)
        if left:
            raise ArtifactError(f"{where} holds {sorted(left)[0]}, which is no part of an adapter")
        self.weight_bytes = sum(tensor.nbytes for tensor in self._keep)
        self.read_bytes = block_bytes(self.block, self.block.skip) + head_bytes(engine)

    def make_memory(self, count: int) -> AdapterPool:
        return AdapterPool(self, count)

    @torch.inference_mode()
    def read(self, memory: AdapterPool, pieces: Sequence[Piece], states: torch.Tensor) -> torch.Tensor:
        """Logits after the last token of each piece, float32 `[pieces, vocab]`.

        Args:
            states: float32 `[tokens of all pieces, hidden]`, what the layers before it leave in the residual stream; overwritten.
        """
        ends = accumulate(len(piece.tokens) for piece in pieces)
        ready = self.engine.prepare(memory.decoder, pieces, [end - 1 for end in ends], states)
        self.engine.compute(ready.step)
        return ready.logits

    # ---------------------------------------------------------------- tensors
    def _linear(self, left: dict[str, torch.Tensor], name: str, like: Linear) -> Linear:
        weight = self._take(left, f"{name}.weight", (like.rows, like.columns))
        if weight.dtype not in TYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
            raise ArtifactError(
                f"{self._where}: {name} is {str(weight.dtype).removeprefix('torch.')}; allowed are {kinds}"
            )
        weight = weight.contiguous()
        self._keep.append(weight)
        linear = Linear()
        linear.kind, linear.scale_type = KINDS["dense"], TYPES[weight.dtype]
        linear.rows, linear.columns, linear.weight = like.rows, like.columns, weight.data_ptr()
        if f"{name}.bias" in left:
            linear.bias = self._vector(left, f"{name}.bias", (like.rows,)).data_ptr()
        return linear

    def _vector(self, left: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
        vector = self._take(left, name, shape).float().contiguous()
        self._keep.append(vector)
        return vector

    def _take(self, left: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = left.pop(name, None)
        if tensor is None:
            raise ArtifactError(f"{self._where} has no {name}")
        if tuple(tensor.shape) != shape:
            raise ArtifactError(f"{self._where}: {name} is {list(tensor.shape)}, and this model needs {list(shape)}")
        return tensor


__all__ = ["Adapter", "AdapterPool"]
