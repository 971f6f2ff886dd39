"""Engines of decoders and encoders exported to ONNX; keys and values lie in torch tensors that ONNX Runtime reads and writes in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines.base import EngineOptions
from runtime.engines.onnx.session import DTYPES, OnnxGraphs, cache_names
from runtime.engines.rows import RowEngine
from runtime.errors import ArtifactError, RequestError


@dataclass
class OnnxSeq2SeqCache:
    """Keys and values of the output so far and of the source, two tensors `[batch, heads, length, size]` a layer."""

    own: list[torch.Tensor] = field(default_factory=list)
    cross: list[torch.Tensor] = field(default_factory=list)


class OnnxSeq2SeqEngine(OnnxGraphs):
    """Runs `encoder.onnx` and `cross.onnx` once for a source and `decoder.onnx` for every token."""

    graphs = ("encoder", "cross", "decoder")

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        super().__init__(export, device, kernels, threads)
        facts = export.facts
        self.features = False
        self.decoder_context_length = self.context_length
        self._width = int(facts["hidden_size"])
        self._own, self._cross = facts["cache"], facts["cross"]
        self._encoder, self._keys, self._decoder = self.sessions

    @torch.inference_mode()
    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encoder states `[batch, length, hidden]`; without a mask every token counts."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.int64)
        states = self.empty(*input_ids.shape, self._width)
        self._encoder.run({"input_ids": input_ids, "attention_mask": mask}, {"last_hidden_state": states})
        return states

    def new_cache(self) -> OnnxSeq2SeqCache:
        """An empty decoder cache."""
        return OnnxSeq2SeqCache()

    @torch.inference_mode()
    def decode(
        self,
        decoder_input_ids: torch.Tensor,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: OnnxSeq2SeqCache | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Decoder logits for the new tokens, or after the last of them only; the cache is extended."""
        cache = OnnxSeq2SeqCache() if cache is None else cache
        batch, count = decoder_input_ids.shape
        if not cache.cross:
            cache.cross = self.empty_cache(self._cross, batch, states.shape[1])
            self._keys.run({"encoder_hidden_states": states}, _named("cross", cache.cross))
            cache.own = self.empty_cache(self._own, batch, 0)
        if attention_mask is None:
            attention_mask = torch.ones(states.shape[:2], dtype=torch.int64, device=self.device)
        grown = self.empty_cache(self._own, batch, cache.own[0].shape[2] + count)
        logits = self.empty(batch, count, self.vocab_size)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "encoder_hidden_states": states,
            "encoder_attention_mask": attention_mask.to(torch.int64),
            **_named("past_key_values", cache.own),
            **_named("cross", cache.cross),
        }
        self._decoder.run(inputs, {"logits": logits, **_named("present", grown)})
        cache.own = grown
        return (logits[:, -1:] if last_only else logits).float()

    @torch.inference_mode()
    def keep_rows(self, cache: OnnxSeq2SeqCache, rows: torch.Tensor) -> None:
        """Keep only `rows` of the cache, in this order."""
        cache.own = [tensor[rows] for tensor in cache.own]
        cache.cross = [tensor[rows] for tensor in cache.cross]

    def cache_bytes(self, cache: OnnxSeq2SeqCache) -> int:
        """Memory of the cache, bytes."""
        return sum(tensor.nbytes for tensor in [*cache.own, *cache.cross])


def _named(prefix: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(cache_names(prefix, len(tensors) // 2), tensors, strict=True))


class OnnxEncoderEngine(OnnxGraphs):
    """Runs `model.onnx` of an encoder; see `runtime.engines.base.EncoderEngine`."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        super().__init__(export, device, kernels, threads)
        self.hidden_size = int(export.facts["hidden_size"])

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Last hidden states, float32 `[batch, length, hidden]`; without a mask every token counts."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = self.empty(*input_ids.shape, self.hidden_size)
        inputs = {"input_ids": input_ids, "attention_mask": mask.to(torch.int64)}
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
        self.sessions[0].run(inputs, {"last_hidden_state": states})
        return states.float()


LOGITS_BYTES = 256 << 20  # of one call; longer prompts and larger batches go through in parts
_ROOM = 128  # tokens that a cache in place grows by


@dataclass
class OnnxCache:
    """Keys and values of a batch: for each layer two tensors `[batch, heads, length or capacity, size]`."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    length: int = 0


class _Step(NamedTuple):
    """Inputs of a step for some rows; `before` and `after` are the tensors of the cache, `past` the tokens in it."""

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    past: int

    def rows(self, start: int, end: int) -> _Step:
        ids, mask, positions = (tensor[start:end] for tensor in self[:3])
        before, after = ([tensor[start:end] for tensor in tensors] for tensors in (self.before, self.after))
        return _Step(ids, mask, positions, before, after, self.past)


class OnnxEngine(OnnxGraphs, RowEngine):
    """Runs `model.onnx` of a decoder; see `runtime.engines.rows.RowEngine`."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        super().__init__(export, device, kernels, threads)
        facts = export.facts
        self._cache_shapes: list[list[int]] = facts["cache"]
        self._in_place = bool(facts["shared_cache"])
        self.padding_is_exact = "position_ids" in facts["inputs"]
        layers = len(self._cache_shapes)
        self._names = list(zip(cache_names("past_key_values", layers), cache_names("present", layers), strict=True))

    # ---------------------------------------------------------------- cache
    def new_cache(self) -> OnnxCache:
        return OnnxCache()

    def cache_bytes(self, cache: OnnxCache) -> int:
        return sum(tensor.nbytes for tensor in cache.tensors)

    @torch.inference_mode()
    def keep_rows(self, cache: OnnxCache, rows: torch.Tensor) -> None:
        cache.tensors = [tensor[rows] for tensor in cache.tensors]

    # ---------------------------------------------------------------- computing
    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: OnnxCache | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        cache = OnnxCache() if cache is None else cache
        batch, count = input_ids.shape
        past = cache.length
        if attention_mask is None:
            attention_mask = torch.ones(batch, past + count, dtype=torch.int64, device=self.device)
        if position_ids is None:
            position_ids = torch.arange(past, past + count, device=self.device).expand(batch, count)
        if not cache.tensors:
            cache.tensors = self._empty(batch, past)
        if self._in_place:
            self._reserve(cache, past + count)
        after = cache.tensors if self._in_place else self._empty(batch, past + count)
        step = _Step(input_ids, attention_mask, position_ids, cache.tensors, after, past)
        parts = self._parts(batch, count, past)
        if len(parts) == 1:  # slices of every layer's cache cost more than a small model's step
            result = self._rows(step, last_only)
        else:
            result = torch.cat([self._rows(step.rows(start, end), last_only) for start, end in parts])
        cache.tensors, cache.length = after, past + count
        return result

    def _parts(self, batch: int, count: int, past: int) -> list[tuple[int, int]]:
        """Rows that go through together. ONNX Runtime's attention in place takes several tokens after a past for one row only."""
        if self._in_place and count > 1 and past > 0:
            size = 1
        else:
            size = max(1, min(batch, LOGITS_BYTES // (4 * self.vocab_size * count)))
        return [(start, min(start + size, batch)) for start in range(0, batch, size)]

    def _rows(self, step: _Step, last_only: bool) -> torch.Tensor:
        """Some rows of a step, in as many calls as their logits need; a single row's long prompt goes through in chunks."""
        (batch, count), past, before = step.ids.shape, step.past, step.before
        size = max(1, LOGITS_BYTES // (4 * self.vocab_size)) if batch == 1 else count
        found: list[torch.Tensor] = []
        for start in range(0, count, size):
            end = min(start + size, count)
            after = step.after if self._in_place or end == count else self._empty(1, past + end)
            ids, positions = step.ids[:, start:end], step.positions[:, start:end]
            logits = self._run(_Step(ids, step.mask[:, : past + end], positions, before, after, past + start))
            found = [logits[:, -1:]] if last_only else [*found, logits]
            before = after
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).float()

    def _run(self, step: _Step) -> torch.Tensor:
        logits = self.empty(*step.ids.shape, self.vocab_size)
        inputs: dict[str, Any] = {"input_ids": step.ids, "attention_mask": step.mask, "position_ids": step.positions}
        outputs: dict[str, Any] = {"logits": logits}
        for (read, written), old, new in zip(self._names, step.before, step.after, strict=True):
            # In place the tensors have room for more than they hold, and ONNX Runtime is told so by the mask's length.
            shape = old.shape if self._in_place else (old.shape[0], old.shape[1], step.past, old.shape[3])
            inputs[read] = (old, shape)
            outputs[written] = new
        self.sessions[0].run(inputs, outputs)
        return logits

    def _empty(self, batch: int, length: int) -> list[torch.Tensor]:
        room = -(-(length + _ROOM) // _ROOM) * _ROOM if self._in_place else length
        return self.empty_cache(self._cache_shapes, batch, room)

    def _reserve(self, cache: OnnxCache, length: int) -> None:
        """Room for `length` tokens; what is there is kept."""
        old = cache.tensors
        if old[0].shape[2] >= length:
            return
        cache.tensors = self._empty(old[0].shape[0], length)
        for new, tensor in zip(cache.tensors, old, strict=True):
            new[:, :, : cache.length] = tensor[:, :, : cache.length]


def load_onnx(export: Export, device: torch.device, options: EngineOptions) -> Any:
    """The engine of an ONNX export; called by `runtime.engines.choose.load_export`.

    Raises:
        RequestError: an option that ONNX exports do not take.
    """
    if options.max_memory is not None:
        raise RequestError(
            f"max_memory: ONNX Runtime holds all weights; load the artifact of {export.path} to stream them"
        )
    if options.dtype is not None and options.dtype != DTYPES.get(export.facts.get("dtype", "")):
        raise RequestError(f"dtype: {export.path} computes in {export.facts.get('dtype')}; export it again in another")
    kind = str(export.facts.get("kind"))
    if kind not in _ENGINES:
        raise ArtifactError(f"{export.path}: export.json has kind {kind!r}; known are {', '.join(_ENGINES)}")
    return _ENGINES[kind](export, device, options.kernels, options.threads)


_ENGINES = {"decoder": OnnxEngine, "encoder": OnnxEncoderEngine, "encoder-decoder": OnnxSeq2SeqEngine}
