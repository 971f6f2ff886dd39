"""Encoder that `runtime.load` returns: texts in, embeddings out; token ids in, hidden states out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from runtime.api.base import LoadedModel
from runtime.api.pooling import read_pooling
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.turns import Caller
from runtime.engines.base import EncoderEngine
from runtime.errors import RequestError
from runtime.sampling.prompts import pad_right, read_mask
from runtime.system.describe import integer

_NO_LIMIT = 10**9  # tokenizers that know no limit say a number beyond this


class EncoderModel(LoadedModel):
    """A loaded encoder. Made by `runtime.load`. Threads may call everything at once: they take turns on the engine.

    Attributes:
        tokenizer: the transformers tokenizer of the directory; None when it has none (token ids still work).
        artifact: the directory it came from.
        engine: what computes.
        pooling: how hidden states become an embedding.
        max_length: tokens that a text is cut to, special tokens included; None: texts are never cut.
    """

    engine: EncoderEngine

    def __init__(self, engine: EncoderEngine, tokenizer: Any, artifact: Artifact | Export) -> None:
        super().__init__(engine, tokenizer, artifact)
        self.pooling = read_pooling(artifact.path)
        own = getattr(tokenizer, "model_max_length", None)
        limits = (
            self.pooling.max_length,
            engine.context_length,
            own if isinstance(own, int) and own < _NO_LIMIT else None,
        )
        self.max_length: int | None = min((limit for limit in limits if limit is not None), default=None)
        self._last: dict[str, Any] = {}

    def hidden_states(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: Any = None
    ) -> torch.Tensor:
        """What the last block gives for every token: float32 `[batch, seq, hidden]` on the model's device.

        Args:
            input_ids: integers `[batch, seq]`.
            attention_mask: `[batch, seq]`, 1 = token, 0 = padding, on either side; None: all are tokens. What is returned for
                padding means nothing.

        Raises:
            RequestError: a wrong shape, ids outside the vocabulary, a row longer than the context or without a token.
        """
        ids = self._reader.read_rows(input_ids)
        mask = read_mask(attention_mask, ids)
        started = time.perf_counter()
        states = self._forward(ids, mask, Caller(self._turns))
        self._book(len(ids), int(mask.sum()) if mask is not None else ids.numel(), started)
        return states

    def embed(self, texts: str | Sequence[str], normalize: bool = True, batch_size: int = 32) -> torch.Tensor:
        """One vector a text, float32 `[n, hidden]` on the CPU (`[1, hidden]` for a single text), in the order of the texts.

        A text is cut to `max_length` tokens. What a text gives does not depend on the others, up to rounding.

        Args:
            texts: a text, or a list of them.
            normalize: vectors of length 1, whose products are cosine similarities.
            batch_size: texts in one forward pass; similar lengths go together.

        Raises:
            RequestError: no tokenizer, an empty or wrong text, a checkpoint whose pooling is not supported.
        """
        if self.pooling.refusal:
            raise RequestError(self.pooling.refusal)
        if not isinstance(normalize, bool):
            raise RequestError(f"normalize must be True or False, not {normalize!r}")
        size = integer(1)("batch_size", batch_size)
        rows = self._tokens(texts)
        started, caller = time.perf_counter(), Caller(self._turns)
        result = torch.empty(len(rows), self.engine.hidden_size)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            ids, mask = pad_right([rows[i] for i in chosen])
            states = self._forward(ids, mask, caller)
            pooled = self.pooling(states, mask.to(states.device) if mask is not None else None)
            result[chosen] = pooled.cpu()
        self._book(len(rows), sum(map(len, rows)), started)
        return torch.nn.functional.normalize(result, dim=1) if normalize else result

    def _tokens(self, texts: Any) -> list[list[int]]:
        if self.tokenizer is None:
            raise RequestError(f"{self.artifact.path} has no tokenizer: use hidden_states with token ids")
        if isinstance(texts, str):
            texts = [texts]
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"texts must be a text or a list of texts, not {type(texts).__name__}")
        if not texts:
            raise RequestError("texts is empty")
        cut = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        return [
            self._reader.encode(
                text.lower() if self.pooling.lower_case else text, f"text {i}", self.pooling.prefix, **cut
            )
            for i, text in enumerate(texts)
        ]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, caller: Caller) -> torch.Tensor:
        device = self.engine.device
        return caller.run(self.engine.forward, ids.to(device), mask.to(device) if mask is not None else None)

    def _book(self, sequences: int, tokens: int, started: float) -> None:
        seconds = time.perf_counter() - started
        rate = tokens / seconds if seconds > 0 else 0.0
        self._last = {"sequences": sequences, "tokens": tokens, "seconds": seconds, "tokens_per_second": rate}

    # ---------------------------------------------------------------- facts
    @property
    def stats(self) -> dict[str, Any]:
        """Numbers of the last call (sequences, tokens without padding, seconds, tokens_per_second), `weight_bytes`, `engine`."""
        return {**self._last, "weight_bytes": self.engine.weight_bytes, "engine": self.engine.description}
