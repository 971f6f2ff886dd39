"""Encoder-decoder that `runtime.load` returns: a source in, the decoder's text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.request import GROUP_ROWS, room, seeds_of
from runtime.decoding.seq2seq import Beginning, decode
from runtime.decoding.turns import Caller, Turns
from runtime.engines.base import Seq2SeqEngine
from runtime.errors import RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.output import SequenceOutput
from runtime.sampling.progress import reporting
from runtime.sampling.prompts import PromptReader, read_ids, read_mask
from runtime.sampling.stats import GenerationStats
from runtime.sampling.text import StopStrings


class Seq2SeqModel:
    """A loaded encoder-decoder. Made by `runtime.load`. Threads may call everything at once: they take turns on the engine.

    Attributes:
        tokenizer: the transformers tokenizer of the directory; None when it has none (token ids still work).
        artifact: the directory it came from.
        engine: what computes.
        eos_token_ids: tokens that end an output.
        start_token_id: what the decoder begins with.
        forced_token_id: the first token of every output where the checkpoint asks for one (`forced_bos_token_id`), else None.
    """

    def __init__(
        self,
        engine: Seq2SeqEngine,
        tokenizer: Any,
        artifact: Artifact | Export,
        eos_token_ids: frozenset[int],
        start_token_id: int,
        forced_token_id: int | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.artifact = artifact
        self.eos_token_ids = eos_token_ids
        self.start_token_id = start_token_id
        self.forced_token_id = forced_token_id
        self._turns = Turns()
        self._reader = PromptReader(tokenizer, artifact.path, engine.vocab_size, engine.context_length)
        self._decoded = PromptReader(tokenizer, artifact.path, engine.vocab_size, engine.decoder_context_length)
        self._last = GenerationStats()

    # ---------------------------------------------------------------- generation
    @overload
    def generate(self, source: str, **options: Any) -> str: ...
    @overload
    def generate(self, source: list[str], **options: Any) -> list[str]: ...
    @overload
    def generate(self, source: list[int], **options: Any) -> list[int]: ...
    @overload
    def generate(self, source: list[list[int]], **options: Any) -> list[list[int]]: ...

    def generate(self, source: Any, **options: Any) -> Any:
        """What the decoder makes of a source, or of each of a batch of sources of any lengths. The source is encoded once.

        Args:
            source: a text gives a text, a list of texts a list of texts, a list of token ids the output's token ids (without the
                start token), a list of such lists a list of them.
            options: max_new_tokens, temperature (0, the default: greedy), top_k, top_p, min_p, repetition_penalty (of the output's
                tokens), stop, seed, ignore_eos, progress; see `runtime.sampling.options.GenerationOptions`.

        Raises:
            RequestError: an unknown option, a value out of range, an empty source or one that does not fit the context.
        """
        chosen = read_options(options)
        sources = self._reader.read(source, "source")
        outputs = self._outputs(len(sources.ids), sources.are_text, 1, chosen)
        beginning = Beginning((self.start_token_id,), self.forced_token_id)
        # Similar lengths together, so that little is padding.
        order = sorted(range(len(outputs)), key=lambda i: -len(sources.ids[i]))
        self._decode(grouped(order), lambda rows: [sources.ids[i] for i in rows], beginning, chosen, outputs)
        results = [output.text if sources.are_text else list(output.tokens) for output in outputs]
        return results if sources.are_batch else results[0]

    def _decode(
        self,
        groups: list[list[int]],
        sources: Callable[[list[int]], Sequence[Sequence[int]] | torch.Tensor],
        beginning: Beginning,
        chosen: GenerationOptions,
        outputs: list[SequenceOutput],
    ) -> None:
        """Fill `outputs`, a group of numbers at a time; `sources` gives those of a group."""
        seeds = seeds_of(chosen, len(outputs))
        stats, done = GenerationStats(), 0
        try:
            with reporting(chosen.progress, len(outputs)) as report:
                for rows in groups:
                    steps = decode(
                        self.engine,
                        sources(rows),
                        beginning,
                        chosen,
                        [outputs[i] for i in rows],
                        [seeds[i] for i in rows],
                        stats,
                        Caller(self._turns),
                    )
                    for ended in steps:
                        done += ended
                        report(done)
        finally:
            stats.finish_reasons = tuple(output.finish_reason or "stopped by the caller" for output in outputs)
            self._last = stats

    def _outputs(self, count: int, are_text: bool, begun: int, options: GenerationOptions) -> list[SequenceOutput]:
        """Empty ones, after `begun` tokens that the decoder is given."""
        if options.stop and self.tokenizer is None:
            raise RequestError(f"stop needs a tokenizer, and {self.artifact.path} has none")
        used = self.tokenizer if are_text or options.stop else None
        ends = frozenset() if options.ignore_eos else self.eos_token_ids
        stops = StopStrings(options.stop)
        # The start token takes one position; the last new token is never read.
        new = room(begun, options.max_new_tokens, self.engine.decoder_context_length, "the start")
        return [SequenceOutput([], new, ends, used, stops) for _ in range(count)]

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
        ids, target = read_ids(input_ids), read_ids(decoder_input_ids, "decoder_input_ids")
        if len(ids) != len(target):
            raise RequestError(
                f"input_ids has {len(ids)} rows and decoder_input_ids {len(target)}: they must be as many"
            )
        for number, row in enumerate(ids.tolist()):
            self._reader.check(row, f"row {number}")
        for number, row in enumerate(target.tolist()):
            self._decoded.check(row, f"row {number} of decoder_input_ids")
        mask = read_mask(attention_mask, ids)
        device, caller = self.engine.device, Caller(self._turns)
        mask = mask.to(device) if mask is not None else None
        states = caller.run(self.engine.encode, ids.to(device), mask)
        return caller.run(self.engine.decode, target.to(device), states, mask, None)

    # ---------------------------------------------------------------- facts
    @property
    def stats(self) -> dict[str, Any]:
        """Numbers of the last generate (see `GenerationStats`; the prompt is the source); `weight_bytes`; `engine`."""
        return {**self._last.as_dict(), "weight_bytes": self.engine.weight_bytes, "engine": self.engine.description}

    def explain(self) -> dict[str, str]:
        """{layer: the kernel that computes it}."""
        return self.engine.explain()


def grouped(order: list[int]) -> list[list[int]]:
    """Neighbours, as many as are decoded together."""
    return [order[start : start + GROUP_ROWS] for start in range(0, len(order), GROUP_ROWS)]


def read_options(options: Mapping[str, Any]) -> GenerationOptions:
    """Options of `generate`; RequestError for those that an encoder-decoder has no use for."""
    chosen = GenerationOptions.from_keywords(options, "generate")
    for name in ("cache_memory", "prefill_chunk"):
        if getattr(chosen, name) is not None:
            raise RequestError(f"{name} needs an engine with a paged KV cache, and an encoder-decoder has none")
    return chosen
