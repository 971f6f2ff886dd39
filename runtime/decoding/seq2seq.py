"""Decoding of encoder-decoders: sources are encoded once, then the scheduler grows the outputs of a group over rows of their decoder.

Outputs begin together at the start token, so unlike prompts they need no padding; only sources of token ids are padded, on the right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.checkpoint.export_directory import Export
from runtime.config.messages import did_you_mean, listing
from runtime.decoding.request import GROUP_ROWS, Decoding, Request, room
from runtime.decoding.scheduler import Scheduler
from runtime.decoding.sequence import Call
from runtime.decoding.sequence import Sequence as Decoded
from runtime.decoding.turns import Caller
from runtime.engines.base import Seq2SeqEngine
from runtime.engines.rows import RowEngine
from runtime.errors import ArtifactError, RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.prompts import Prompts, pad_right
from runtime.sampling.sampling import REMOVED, generators
from runtime.sampling.stats import GenerationStats
from runtime.system.describe import is_integer, show


@dataclass(frozen=True)
class Beginning:
    """How decoding begins.

    Attributes:
        tokens: what the decoder is given first; the first is the start token.
        forced: the first new token of every output where the checkpoint asks for one (`forced_bos_token_id`), else None.
        languages: ids of languages; where there are any, the most likely of them follows the start token.
        suppressed: ids that are never generated. suppressed_first: ids that are no first new token.
    """

    tokens: tuple[int, ...]
    forced: int | None = None
    languages: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens before the first new one."""
        return len(self.tokens) + bool(self.languages)


def generation_config(path: Path) -> dict[str, Any]:
    """The content of a directory's generation_config.json; empty where there is none."""
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def decoder_start(artifact: Artifact | Export) -> tuple[int, int | None]:
    """The token that an encoder-decoder's outputs begin with, and the one that is forced after it (None: none is).

    Raises:
        ArtifactError: neither generation_config.json nor config.json says what decoders begin with.
    """
    sources = (generation_config(artifact.path), artifact.config)

    def find(*names: str) -> int | None:
        values = ((name, source.get(name)) for name in names for source in sources)
        name, value = next(((name, value) for name, value in values if value is not None), ("", None))
        if value is not None and (not is_integer(value) or value < 0):
            raise ArtifactError(f"{artifact.path}: {name} must be a token id, not {value!r}")
        return value

    start = find("decoder_start_token_id", "bos_token_id")
    if start is None:
        raise ArtifactError(f"{artifact.path}/config.json has no decoder_start_token_id, which decoding begins with")
    return start, find("forced_bos_token_id")


class SpeechPrompts:
    """Tokens in front of a transcript, as a speech model's generation_config.json (and config.json) describes them.

    Args:
        artifact: the directory.
        vocab_size: token ids are below it.
    """

    def __init__(self, artifact: Artifact | Export, vocab_size: int) -> None:
        self._path, self._config = artifact.path, artifact.config
        self._vocab_size = vocab_size
        self._generation = generation_config(artifact.path)
        self._languages = self._table("lang_to_id")
        self._tasks = self._table("task_to_id")
        start, forced = decoder_start(artifact)
        self._base = Beginning(
            (start,),
            forced,
            suppressed=self._ids("suppress_tokens"),
            suppressed_first=self._ids("begin_suppress_tokens"),
        )

    def beginning(self, language: str | None = None, task: str | None = None) -> Beginning:
        """The start token, the language, the task, and the mark of a transcript without times, as far as the model has them.

        Args:
            language: a name ("english"), a code ("en") or a token ("<|en|>"); None: the checkpoint's, and where it leaves that open,
                the one that the model detects.
            task: "transcribe" or "translate"; None: the checkpoint's.

        Raises:
            RequestError: the model does not know it. ArtifactError: the checkpoint's settings are wrong.
        """
        for name, value in (("language", language), ("task", task)):
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"{name} must be a text that is not empty, not {show(value)}")
            if value is not None and self._generation.get("is_multilingual") is False:
                raise RequestError(f"{name}: {self._path} knows one language and no tasks; leave it out")
        language = language if language is not None else self._generation.get("language")
        task = task if task is not None else self._generation.get("task")
        tokens: list[int | None] = list(self._base.tokens)
        if language is None and task is None:
            tokens += self._forced_ids()
        open_language = len(tokens) == 1 or tokens[1] is None
        if language is not None:
            tokens[1:2] = [self._language(language)]
        detected = bool(self._languages) and language is None and open_language
        if detected:
            tokens[1:2] = [None]
        if task is not None:
            tokens.append(self._find("task", task, [task], self._tasks))
        elif language is not None and "transcribe" in self._tasks:
            tokens.append(self._tasks["transcribe"])
        untimed = self._generation.get("no_timestamps_token_id")
        if untimed is not None and tokens[-1] != untimed:
            tokens += self._checked([untimed], "no_timestamps_token_id")
        known = tuple(token for token in tokens if token is not None)
        return replace(self._base, tokens=known, languages=tuple(self._languages.values()) if detected else ())

    def _forced_ids(self) -> list[int | None]:
        """Tokens after the start token, by `forced_decoder_ids`: [[1, id], [2, id], ...]; None: the language is left open."""
        pairs = self._setting("forced_decoder_ids") or []
        try:
            places, found = [place for place, _ in pairs], [token for _, token in pairs]
        except (TypeError, ValueError):
            places, found = [], [None, None]
        if places != list(range(1, len(found) + 1)) or None in found[1:]:
            raise ArtifactError(
                f"{self._path}: forced_decoder_ids must be [[1, token], [2, token], ...], not {show(pairs)}"
            )
        self._checked([token for token in found if token is not None], "forced_decoder_ids")
        return found

    def _language(self, language: str) -> int:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        written = language.lower()
        tokens = [written, f"<|{written}|>", f"<|{TO_LANGUAGE_CODE.get(written)}|>"]
        return self._find("language", language, tokens, self._languages)

    def _find(self, what: str, given: str, tokens: Sequence[str], known: dict[str, int]) -> int:
        """The id of the first of `tokens` that is `known`."""
        if not known:
            raise RequestError(f"{what}: {self._path} says no {what}s in its generation_config.json")
        for token in tokens:
            if token in known:
                return known[token]
        names = [name.strip("<|>") for name in known]
        hint = did_you_mean(given, names) or f"; it knows {listing(names, 8)}"
        raise RequestError(f"{what} {show(given)} is unknown to {self._path}{hint}")

    def _setting(self, name: str) -> Any:
        value = self._generation.get(name)
        return self._config.get(name) if value is None else value

    def _table(self, name: str) -> dict[str, int]:
        table = self._generation.get(name) or {}
        if not isinstance(table, dict):
            raise ArtifactError(f"{self._path}: {name} must be a mapping of names to token ids, not {show(table)}")
        self._checked(list(table.values()), name)
        return table

    def _ids(self, name: str) -> tuple[int, ...]:
        # Some write -1 where nothing is suppressed, and configs of small vocabularies keep the family's own ids: both mean no token.
        values = self._setting(name) or ()
        inside = [value for value in values if not isinstance(value, int) or 0 <= value < self._vocab_size]
        return tuple(self._checked(inside, name))

    def _checked(self, ids: list[Any], name: str) -> list[Any]:
        for value in ids:
            if not is_integer(value) or not 0 <= value < self._vocab_size:
                raise ArtifactError(
                    f"{self._path}: {name} has {show(value)}, and token ids are 0 to {self._vocab_size - 1}"
                )
        return ids


class Seq2SeqRequest(Request):
    """A call on an encoder-decoder.

    Args:
        prompts: the sources: token ids; or features of sounds, float32 `[a, b]` each, in place of ids.
        beginning: what the decoder begins with, and which tokens it may not generate.
        groups: numbers of the sources that are decoded together; features of a group have one shape. None: sources of similar lengths.
    """

    def __init__(
        self,
        decoding: Decoding,
        prompts: Prompts,
        options: GenerationOptions,
        beginning: Beginning,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        for name in ("cache_memory", "prefill_chunk"):
            if getattr(options, name) is not None:
                raise RequestError(f"{name} needs an engine with a paged KV cache, and an encoder-decoder has none")
        # The start token takes one position; the last new token is never read.
        limit = room(beginning.length, options.max_new_tokens, decoding.engine.decoder_context_length, "the start")
        count = len(prompts.ids)
        super().__init__(decoding, prompts, options, [()] * count, [limit] * count)
        self._beginning = beginning
        if groups is None:
            groups = [sorted(range(count), key=lambda i: -len(prompts.ids[i]))]
        self._groups = [
            rows[start : start + GROUP_ROWS] for rows in groups for start in range(0, len(rows), GROUP_ROWS)
        ]

    def _steps(self, stats: GenerationStats) -> Iterator[int]:
        engine: Seq2SeqEngine = self._decoding.engine
        sources_of_chance = generators(self._options, self._seeds)
        for rows in self._groups:
            started, caller = time.perf_counter(), Caller(self._decoding.turns)
            sources = [self.prompts.ids[i] for i in rows]
            inputs, mask = (torch.stack(sources), None) if engine.features else pad_right(sources)
            mask = mask.to(engine.device) if mask is not None else None
            states = caller.run(engine.encode, inputs.to(engine.device), mask)
            begun = self._begin(states, mask, caller)
            stats.prefill_seconds += time.perf_counter() - started
            # What was read is the source, tokens or the encoder's positions of a sound; the scheduler counts what decoders begin with.
            read = states.shape[0] * states.shape[1] if engine.features else sum(map(len, sources))
            stats.prompt_tokens += read - begun.numel()
            sequences = [
                Decoded(ids, self.outputs[i], sources_of_chance[i]) for ids, i in zip(begun.tolist(), rows, strict=True)
            ]
            decoder = _DecoderRows(engine, states, mask, self._beginning)
            scheduler = Scheduler(decoder, self._decoding.turns, len(rows))
            yield from scheduler.run(Call(sequences, self._options, stats))

    def _begin(self, states: torch.Tensor, mask: torch.Tensor | None, caller: Caller) -> torch.Tensor:
        """What the decoder is given first, int64 `[rows, n]`: the most likely language of each row where none is chosen."""
        engine, beginning = self._decoding.engine, self._beginning
        begun = torch.tensor([beginning.tokens] * len(states), dtype=torch.int64, device=engine.device)
        if not beginning.languages:
            return begun
        languages = torch.tensor(beginning.languages, device=engine.device)
        logits = caller.run(engine.decode, begun[:, :1], states, mask, None, True)[:, -1]
        detected = languages[logits[:, languages].argmax(-1)]
        return torch.cat([begun[:, :1], detected[:, None], begun[:, 1:]], dim=1)


class _DecoderRows(RowEngine):
    """The decoder of an encoder-decoder as an engine of rows, one for each of a group of encoded sources.

    Args:
        states: of the sources, from `engine.encode`. mask: of the sources.
        beginning: which tokens are suppressed, and which is forced first.
    """

    def __init__(
        self, engine: Seq2SeqEngine, states: torch.Tensor, mask: torch.Tensor | None, beginning: Beginning
    ) -> None:
        self._engine, self._states, self._mask, self._beginning = engine, states, mask, beginning
        self._first = True
        self.device, self.vocab_size = engine.device, engine.vocab_size
        self.context_length = engine.decoder_context_length

    def new_cache(self) -> Any:
        return self._engine.new_cache()

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        first, self._first = self._first, False
        logits = self._engine.decode(input_ids, self._states, self._mask, cache, last_only)
        if first and self._beginning.forced is not None:
            logits = torch.full_like(logits, REMOVED)
            logits[..., self._beginning.forced] = 0
            return logits
        removed = self._beginning.suppressed + (self._beginning.suppressed_first if first else ())
        if removed:
            logits = logits.index_fill(-1, torch.tensor(removed, device=self.device), REMOVED)
        return logits

    def keep_rows(self, cache: Any, rows: torch.Tensor) -> None:
        self._engine.keep_rows(cache, rows)
        self._states = self._states[rows]
        self._mask = self._mask[rows] if self._mask is not None else None

    def cache_bytes(self, cache: Any) -> int:
        return self._engine.cache_bytes(cache)

    def explain(self) -> dict[str, str]:
        return self._engine.explain()
