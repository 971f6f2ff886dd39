"""Engine of encoder-decoders exported to ONNX; see `runtime.engines.base.Seq2SeqEngine`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines.onnx.session import OnnxGraphs, cache_names


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
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.int64)
        states = self.empty(*input_ids.shape, self._width)
        self._encoder.run({"input_ids": input_ids, "attention_mask": mask}, {"last_hidden_state": states})
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
        cache.own = [tensor[rows] for tensor in cache.own]
        cache.cross = [tensor[rows] for tensor in cache.cross]

    def cache_bytes(self, cache: OnnxSeq2SeqCache) -> int:
        return sum(tensor.nbytes for tensor in [*cache.own, *cache.cross])


def _named(prefix: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(cache_names(prefix, len(tensors) // 2), tensors, strict=True))
