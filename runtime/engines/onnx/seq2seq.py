"""Engine of encoder-decoders exported to ONNX; see `runtime.engines.base.Seq2SeqEngine`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines.onnx.session import DTYPES, Session, file_bytes, session_entries


@dataclass
class OnnxSeq2SeqCache:
    """Keys and values of the output so far and of the source, two tensors `[batch, heads, length, size]` a layer."""

    own: list[torch.Tensor] = field(default_factory=list)
    cross: list[torch.Tensor] = field(default_factory=list)


class OnnxSeq2SeqEngine:
    """Runs `encoder.onnx` and `cross.onnx` once for a source and `decoder.onnx` for every token."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        facts = export.facts
        self.device = device
        self.features = False
        self.vocab_size = int(facts["vocab_size"])
        limit = facts.get("context_length")
        self.context_length: int | None = None if limit is None else int(limit)
        self.decoder_context_length = self.context_length
        self._width = int(facts["hidden_size"])
        self._dtype = DTYPES[facts["dtype"]]
        self._cache: list[tuple[int, int]] = [(int(heads), int(size)) for heads, size in facts["cache"]]
        self._cross: list[tuple[int, int]] = [(int(heads), int(size)) for heads, size in facts["cross"]]
        self.weight_bytes = file_bytes(export)
        self._encoder, self._keys, self._decoder = (
            Session(export.path / f"{name}.onnx", device, kernels, threads, session_entries(facts))
            for name in ("encoder", "cross", "decoder")
        )
        self.description = self._decoder.description

    @torch.inference_mode()
    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = torch.empty(*input_ids.shape, self._width, dtype=self._dtype, device=self.device)
        self._encoder.run(
            {"input_ids": input_ids, "attention_mask": mask.to(torch.int64)}, {"last_hidden_state": states}
        )
        return states

    def new_cache(self) -> OnnxSeq2SeqCache:
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
        cache = OnnxSeq2SeqCache() if cache is None else cache
        batch, count = decoder_input_ids.shape
        source = states.shape[1]
        if not cache.cross:
            cache.cross = self._empty(self._cross, batch, source)
            self._keys.run(
                {"encoder_hidden_states": states}, dict(zip(_names("cross", self._cross), cache.cross, strict=True))
            )
            cache.own = self._empty(self._cache, batch, 0)
        past = cache.own[0].shape[2]
        mask = (
            torch.ones(batch, source, dtype=torch.int64, device=self.device)
            if attention_mask is None
            else attention_mask
        )
        grown = self._empty(self._cache, batch, past + count)
        logits = torch.empty(batch, count, self.vocab_size, dtype=self._dtype, device=self.device)
        inputs: dict[str, Any] = {
            "decoder_input_ids": decoder_input_ids,
            "encoder_hidden_states": states,
            "encoder_attention_mask": mask.to(torch.int64),
        }
        inputs |= dict(zip(_names("past_key_values", self._cache), cache.own, strict=True))
        inputs |= dict(zip(_names("cross", self._cross), cache.cross, strict=True))
        outputs: dict[str, Any] = {"logits": logits}
        outputs |= dict(zip(_names("present", self._cache), grown, strict=True))
        self._decoder.run(inputs, outputs)
        cache.own = grown
        return (logits[:, -1:] if last_only else logits).float()

    @torch.inference_mode()
    def keep_rows(self, cache: OnnxSeq2SeqCache, rows: torch.Tensor) -> None:
        cache.own = [tensor[rows] for tensor in cache.own]
        cache.cross = [tensor[rows] for tensor in cache.cross]

    def cache_bytes(self, cache: OnnxSeq2SeqCache) -> int:
        return sum(tensor.nbytes for tensor in [*cache.own, *cache.cross])

    def explain(self) -> dict[str, str]:
        """{graph: what computes it}; ONNX Runtime does not tell more."""
        return dict.fromkeys(("encoder.onnx", "cross.onnx", "decoder.onnx"), self.description)

    def _empty(self, shapes: list[tuple[int, int]], batch: int, length: int) -> list[torch.Tensor]:
        return [
            torch.empty(batch, heads, length, size, dtype=self._dtype, device=self.device)
            for heads, size in shapes
            for _ in range(2)
        ]


def _names(prefix: str, shapes: list[tuple[int, int]]) -> list[str]:
    return [f"{prefix}.{i}.{part}" for i in range(len(shapes)) for part in ("key", "value")]
