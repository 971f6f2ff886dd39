"""Encoder-decoder that `runtime.load` returns: a source in, the decoder's text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runtime.api.base import GeneratingModel, Texts
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.seq2seq import Beginning, Seq2SeqRequest, decoder_start
from runtime.engines.base import Seq2SeqEngine
from runtime.errors import RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.prompts import PromptReader, read_mask


class Seq2SeqModel(GeneratingModel):
    """A loaded encoder-decoder. Made by `runtime.load`. Threads may call everything at once: they take turns on the engine.

    Attributes:
        tokenizer: the transformers tokenizer of the directory; None when it has none (token ids still work).
        artifact: the directory it came from.
        engine: what computes.
        eos_token_ids: tokens that end an output.
        start_token_id: what the decoder begins with.
        forced_token_id: the first token of every output where the checkpoint asks for one (`forced_bos_token_id`), else None.
    """

    engine: Seq2SeqEngine

    def __init__(
        self, engine: Seq2SeqEngine, tokenizer: Any, artifact: Artifact | Export, eos_token_ids: frozenset[int]
    ) -> None:
        super().__init__(engine, tokenizer, artifact, eos_token_ids)
        self.start_token_id, self.forced_token_id = decoder_start(artifact)
        self._targets = PromptReader(tokenizer, artifact.path, engine.vocab_size, engine.decoder_context_length)

    # ---------------------------------------------------------------- generation
    def generate(self, source: Texts = None, **options: Any) -> Texts:  # type: ignore[assignment]
        """What the decoder makes of a source, or of each of a batch of sources of any lengths. The source is encoded once.

        Args:
            source: a text gives a text, a list of texts a list of texts, a list of token ids the output's token ids (without the
                start token), a list of such lists a list of them.
            options: max_new_tokens, temperature (0, the default: greedy), top_k, top_p, min_p, repetition_penalty (of the output's
                tokens), stop, seed, ignore_eos, progress; see `runtime.sampling.options.GenerationOptions`.

        Raises:
            RequestError: an unknown option, a value out of range, an empty source or one that does not fit the context.
        """
        chosen = GenerationOptions.from_keywords(options, "generate", self.eos_token_ids)
        sources = self._reader.read(source, "source")
        beginning = Beginning((self.start_token_id,), self.forced_token_id)
        return Seq2SeqRequest(self._decoding(), sources, chosen, beginning).complete(self._store)

    # ---------------------------------------------------------------- logits
    def logits(
        self,
        input_ids: torch.Tensor | Sequence[Sequence[int]],
        decoder_input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: Any = None,
    ) -> torch.Tensor:
        """Logits of every position of an output that is given: float32 `[batch, target, vocab]` on the model's device.

        Args:
            input_ids: the sources, integers `[batch, seq]`.
            decoder_input_ids: the outputs, integers `[batch, target]`, each beginning with the start token.
            attention_mask: of the sources, `[batch, seq]`, 1 = token, 0 = padding; None: all are tokens.

        Raises:
            RequestError: wrong shapes, ids outside the vocabulary, rows longer than the context.
        """
        ids = self._reader.read_rows(input_ids)
        return self._logits("input_ids", ids, decoder_input_ids, read_mask(attention_mask, ids))

    def _logits(self, name: str, sources: torch.Tensor, outputs: Any, mask: torch.Tensor | None) -> torch.Tensor:
        """Logits of outputs as they are given, after checked sources that the user calls `name`."""
        target = self._targets.read_rows(outputs, "decoder_input_ids")
        if len(sources) != len(target):
            raise RequestError(
                f"{name} has {len(sources)} rows and decoder_input_ids {len(target)}: they must be as many"
            )
        device = self.engine.device
        mask = mask.to(device) if mask is not None else None
        states = self._run(self.engine.encode, sources.to(device), mask)
        return self._run(self.engine.decode, target.to(device), states, mask, None)
