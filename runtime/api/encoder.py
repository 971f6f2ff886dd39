"""Encoder that `runtime.load` returns: texts in, embeddings out; token ids in, hidden states out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from runtime.api.pooling import Pooling, read_pooling
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.turns import Caller, Turns
from runtime.engines.base import EncoderEngine
from runtime.errors import RequestError
from runtime.sampling.prompts import PromptReader, pad_right, read_ids, read_mask
from runtime.system.describe import integer

_NO_LIMIT = 10**9  # tokenizers that know no limit say a number beyond this


class EncoderModel:
    """A loaded encoder. Made by `runtime.load`. Threads may call everything at once: they take turns on the engine.

    Attributes:
        tokenizer: the transformers tokenizer of the directory; None when it has none (token ids still work).
        artifact: the directory it came from.
        engine: what computes.
        pooling: how hidden states become an embedding.
        max_length: tokens that a text is cut to, special tokens included; None: texts are never cut.
    """

    def __init__(
        self, engine: EncoderEngine, tokenizer: Any, artifact: Artifact | Export, pooling: Pooling | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.artifact = artifact
        self.pooling = read_pooling(artifact.path) if pooling is None else pooling
        own = getattr(tokenizer, "model_max_length", None)
        limits = (
            self.pooling.max_length,
            engine.context_length,
            own if isinstance(own, int) and own < _NO_LIMIT else None,
        )
        self.max_length: int | None = min((limit for limit in limits if limit is not None), default=None)
        self._turns = Turns()
        self._reader = PromptReader(tokenizer, artifact.path, engine.vocab_size, engine.context_length)
        self._lock = threading.Lock()  # tokenizers change settings inside while they encode
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
        ids = read_ids(input_ids)
        for number, row in enumerate(ids.tolist()):
            self._reader.check(row, f"row {number}")
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
        rows = []
        for number, text in enumerate(texts):
            if not text:
                raise RequestError(f"text {number} is empty")
            full = self.pooling.prefix + (text.lower() if self.pooling.lower_case else text)
            cut = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
            try:
                text.encode()
                with self._lock:
                    ids = list(self.tokenizer(full, **cut)["input_ids"])
            except (TypeError, UnicodeError) as error:
                raise RequestError(f"text {number} is not valid Unicode text: {error}") from error
            rows.append(self._reader.check(ids, f"text {number}"))
        return rows

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

    def explain(self) -> dict[str, str]:
        """{layer: the kernel that computes it}."""
        return self.engine.explain()
