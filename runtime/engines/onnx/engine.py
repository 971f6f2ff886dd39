"""Engines of decoders and encoders exported to ONNX; keys and values lie in torch tensors that ONNX Runtime reads and writes in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines.onnx.seq2seq import OnnxSeq2SeqEngine
from runtime.engines.onnx.session import DTYPES, Session, file_bytes, session_entries
from runtime.engines.rows import RowEngine
from runtime.errors import ArtifactError, RequestError

# The engine of encoders exported to ONNX; see `runtime.engines.base.EncoderEngine`.


class OnnxEncoderEngine:
    """Runs `model.onnx`."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        facts = export.facts
        self.device = device
        self.vocab_size = int(facts["vocab_size"])
        self.hidden_size = int(facts["hidden_size"])
        limit = facts.get("context_length")
        self.context_length: int | None = None if limit is None else int(limit)
        self._dtype = DTYPES[facts["dtype"]]
        self.weight_bytes = file_bytes(export)
        self._session = Session(export.path / "model.onnx", device, kernels, threads, session_entries(facts))
        self.description = self._session.description

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = torch.empty(*input_ids.shape, self.hidden_size, dtype=self._dtype, device=self.device)
        inputs = {"input_ids": input_ids, "attention_mask": mask.to(torch.int64)}
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
        self._session.run(inputs, {"last_hidden_state": states})
        return states.float()

    def explain(self) -> dict[str, str]:
        """{graph: what computes it}; ONNX Runtime does not tell more."""
        return {"model.onnx": self.description}


MODEL = "model.onnx"
_LOGITS_BYTES = 256 << 20  # of one call; longer prompts and larger batches go through in parts
_ROOM = 128  # tokens that a cache in place grows by


@dataclass
class OnnxCache:
    """Keys and values of a batch: for each layer two tensors `[batch, heads, length or capacity, size]`."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    length: int = 0


class OnnxEngine(RowEngine):
    """Runs `model.onnx`; see `runtime.engines.rows.RowEngine`.

    Args:
        export: the directory.
        device: CPU, or a GPU that ONNX Runtime has a provider for.
        kernels: "auto" and "reference" sum products with weights in float32; "fast" rounds activations to int8.
        threads: of ONNX Runtime; None: as many as torch has.
    """

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        facts = export.facts
        self.device = device
        self.vocab_size = int(facts["vocab_size"])
        limit = facts.get("context_length")
        self.context_length: int | None = None if limit is None else int(limit)
        self._cache_shapes: list[tuple[int, int]] = [(int(heads), int(size)) for heads, size in facts["cache"]]
        self._dtype = DTYPES[facts["dtype"]]
        self._in_place = bool(facts["shared_cache"])
        self._inputs = frozenset(facts["inputs"])
        self.padding_is_exact = "position_ids" in self._inputs
        self.weight_bytes = file_bytes(export)
        self.session = Session(export.path / MODEL, device, kernels, threads, session_entries(facts))
        self._names = [f"{i}.{part}" for i in range(len(self._cache_shapes)) for part in ("key", "value")]
        self.description = self.session.description

    def explain(self) -> dict[str, str]:
        """{graph: what computes it}; ONNX Runtime does not tell more."""
        return {MODEL: self.description}

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
        grown = [] if self._in_place else self._empty(batch, past + count)
        before, after = cache.tensors, cache.tensors if self._in_place else grown
        parts = self._parts(batch, count, past)
        if len(parts) == 1:  # slices of every layer's cache cost more than a small model's step
            result = self._rows(input_ids, attention_mask, position_ids, before, after, past, last_only)
        else:
            rows = []
            for part in (slice(start, end) for start, end in parts):
                inputs = (input_ids[part], attention_mask[part], position_ids[part])
                old, new = ([tensor[part] for tensor in tensors] for tensors in (before, after))
                rows.append(self._rows(*inputs, old, new, past, last_only))
            result = torch.cat(rows)
        cache.tensors, cache.length = after, past + count
        return result

    def _parts(self, batch: int, count: int, past: int) -> list[tuple[int, int]]:
        """Rows that go through together. ONNX Runtime's attention in place takes several tokens after a past for one row only."""
        if self._in_place and count > 1 and past > 0:
            size = 1
        else:
            size = max(1, min(batch, _LOGITS_BYTES // (4 * self.vocab_size * count)))
        return [(start, min(start + size, batch)) for start in range(0, batch, size)]

    def _rows(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        before: list[torch.Tensor],
        after: list[torch.Tensor],
        past: int,
        last_only: bool,
    ) -> torch.Tensor:
        """Some rows of a step, in as many calls as their logits need; a single row's long prompt goes through in chunks."""
        count = ids.shape[1]
        step = max(1, _LOGITS_BYTES // (4 * self.vocab_size)) if ids.shape[0] == 1 else count
        pieces = []
        for start in range(0, count, step):
            end = min(start + step, count)
            whole = end == count
            target = after if self._in_place or whole else self._empty(1, past + end)
            piece = self._run(
                ids[:, start:end], mask[:, : past + end], positions[:, start:end], before, target, past + start
            )
            before = target
            if last_only:
                pieces = [piece[:, -1:]]
            else:
                pieces.append(piece)
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).float()

    def _run(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        before: list[torch.Tensor],
        after: list[torch.Tensor],
        past: int,
    ) -> torch.Tensor:
        logits = torch.empty(*ids.shape, self.vocab_size, dtype=self._dtype, device=self.device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        outputs: dict[str, Any] = {"logits": logits}
        for name, old, new in zip(self._names, before, after, strict=True):
            # In place the tensors have room for more than they hold, and ONNX Runtime is told so by the mask's length.
            shape = old.shape if self._in_place else (old.shape[0], old.shape[1], past, old.shape[3])
            inputs[f"past_key_values.{name}"] = (old, shape)
            outputs[f"present.{name}"] = new
        self.session.run(inputs, outputs)
        return logits

    def _empty(self, batch: int, length: int) -> list[torch.Tensor]:
        length = self._rounded(length) if self._in_place else length
        return [
            torch.empty(batch, heads, length, size, dtype=self._dtype, device=self.device)
            for heads, size in self._cache_shapes
            for _ in range(2)
        ]

    def _reserve(self, cache: OnnxCache, length: int) -> None:
        """Room for `length` tokens; what is there is kept."""
        old = cache.tensors
        if old[0].shape[2] >= length:
            return
        cache.tensors = self._empty(old[0].shape[0], length)
        for new, tensor in zip(cache.tensors, old, strict=True):
            new[:, :, : cache.length] = tensor[:, :, : cache.length]

    def _rounded(self, length: int) -> int:
        return -(-(length + _ROOM) // _ROOM) * _ROOM


def load_onnx(export: Export, device: torch.device, options: dict[str, Any]) -> Any:
    """The engine of an ONNX export; called by `runtime.engines.choose.load_export`.

    Raises:
        RequestError: an option that ONNX exports do not take.
    """
    if options.get("max_memory") is not None:
        raise RequestError(
            f"max_memory: ONNX Runtime holds all weights of {export.path} in memory; load the artifact to stream them"
        )
    dtype = options.get("dtype")
    if dtype is not None and dtype != DTYPES.get(export.facts.get("dtype", "")):
        raise RequestError(
            f"dtype: {export.path} was exported to compute in {export.facts.get('dtype')}; export it again with --set dtype=..."
        )
    kind = str(export.facts.get("kind"))
    if kind not in _ENGINES:
        raise ArtifactError(
            f"{export.path}: export.json describes a graph of kind {kind!r}, which this runtime does not know"
        )
    return _ENGINES[kind](export, device, options.get("kernels", "auto"), options.get("threads"))


_ENGINES: dict[str, Any] = {
    "decoder": OnnxEngine,
    "encoder": OnnxEncoderEngine,
    "encoder-decoder": OnnxSeq2SeqEngine,
}
