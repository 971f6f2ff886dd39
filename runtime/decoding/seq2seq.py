"""Decoding loop of encoder-decoders: the sources are encoded once, then all outputs of a group grow a token a step.

Outputs begin together at the start token, so unlike prompts they need no padding; only sources of token ids are padded, on the right.
A finished row leaves the batch, and its part of the cache is freed.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.checkpoint import read_json
from runtime.decoding.turns import Caller
from runtime.engines.base import Seq2SeqEngine
from runtime.errors import ArtifactError, RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.output import SequenceOutput
from runtime.sampling.prompts import pad_right
from runtime.sampling.sampling import REMOVED, generators, next_tokens, seen_tokens
from runtime.sampling.stats import GenerationStats
from runtime.system.describe import show

# What the outputs of an encoder-decoder begin with, and which tokens they may not take.


@dataclass(frozen=True)
class Beginning:
    """How decoding begins.

    Attributes:
        tokens: what the decoder is given first; the first is the start token.
        forced: the first new token of every output where the checkpoint asks for one (`forced_bos_token_id`), else None.
        languages: ids of languages; where there are any, the most likely of them follows the start token.
        suppressed: ids that are never said. suppressed_first: ids that are no first new token.
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


class SpeechPrompts:
    """What a speech model's generation_config.json (and config.json) says of the tokens in front of a transcript.

    Args:
        path: the directory. config: its config.json. start, forced: the start token and the forced first one.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], start: int, forced: int | None, vocab_size: int) -> None:
        file = path / "generation_config.json"
        self._path = path
        self._vocab_size = vocab_size
        self._said: dict[str, Any] = read_json(file) if file.is_file() else {}
        self._config = config
        self._start = start
        self._languages = self._table("lang_to_id")
        self._tasks = self._table("task_to_id")
        self._base = Beginning(
            (start,),
            forced,
            suppressed=self._ids("suppress_tokens"),
            suppressed_first=self._ids("begin_suppress_tokens"),
        )

    def beginning(self, language: str | None = None, task: str | None = None) -> Beginning:
        """The start token, the language, the task, and the mark of a transcript without times, as far as the model has them.

        Args:
            language: a name ("english"), a code ("en") or a token ("<|en|>"); None: what the checkpoint says, and where it leaves
                that open, what the model hears.
            task: "transcribe" or "translate"; None: what the checkpoint says.

        Raises:
            RequestError: the model does not know it. ArtifactError: the checkpoint's settings are wrong.
        """
        language, task = _name(language, "language"), _name(task, "task")
        if self._said.get("is_multilingual") is False and (language or task):
            what = "language" if language else "task"
            raise RequestError(f"{what}: {self._path} knows one language and no tasks; leave it out")
        said_language, said_task = self._said.get("language"), self._said.get("task")
        language = language if language is not None else said_language
        task = task if task is not None else said_task
        tokens: list[int | None] = [self._start]
        if language is None and task is None:
            tokens += self._forced_ids()
        open_language = len(tokens) == 1 or tokens[1] is None
        if language is not None:
            tokens[1:2] = [self._language(language)]
        detected = bool(self._languages) and language is None and open_language
        if detected:
            tokens[1:2] = [None]
        if task is not None:
            tokens.append(self._task(task))
        elif language is not None and self._tasks and "transcribe" in self._tasks:
            tokens.append(self._tasks["transcribe"])
        untimed = self._said.get("no_timestamps_token_id")
        if untimed is not None and tokens[-1] != untimed:
            tokens += self._checked([untimed], "no_timestamps_token_id")
        known = tuple(token for token in tokens if token is not None)
        return replace(self._base, tokens=known, languages=tuple(self._languages.values()) if detected else ())

    def _forced_ids(self) -> list[int | None]:
        """Tokens after the start token, by `forced_decoder_ids`: [[1, id], [2, id], ...]; None: the language is left open."""
        pairs = self._said.get("forced_decoder_ids")
        pairs = self._config.get("forced_decoder_ids") if pairs is None else pairs
        if not pairs:
            return []
        wrong = f"{self._path}: forced_decoder_ids must be [[1, token], [2, token], ...], not {show(pairs)}"
        found: list[int | None] = []
        for place, pair in enumerate(pairs if isinstance(pairs, list) else [None], 1):
            if not isinstance(pair, list) or len(pair) != 2 or pair[0] != place:
                raise ArtifactError(wrong)
            if pair[1] is not None:
                self._checked([pair[1]], "forced_decoder_ids")
            elif place > 1:
                raise ArtifactError(wrong)
            found.append(pair[1])
        return found

    def _language(self, language: str) -> int:
        if not self._languages:
            raise RequestError(f"language: {self._path} says no languages (lang_to_id in generation_config.json)")
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        written = language.lower()
        for token in (written, f"<|{written}|>", f"<|{TO_LANGUAGE_CODE.get(written)}|>"):
            if token in self._languages:
                return self._languages[token]
        codes = [token.strip("<|>") for token in self._languages]
        raise RequestError(f"language {show(language)} is unknown to {self._path}{_hint(written, codes)}")

    def _task(self, task: str) -> int:
        if not self._tasks:
            raise RequestError(f"task: {self._path} says no tasks (task_to_id in generation_config.json)")
        if task not in self._tasks:
            raise RequestError(f"task {show(task)} is unknown to {self._path}{_hint(task, list(self._tasks))}")
        return self._tasks[task]

    def _table(self, name: str) -> dict[str, int]:
        table = self._said.get(name)
        if table is None:
            return {}
        if not isinstance(table, dict):
            raise ArtifactError(f"{self._path}: {name} must be a mapping of names to token ids, not {show(table)}")
        self._checked(list(table.values()), name)
        return table

    def _ids(self, name: str) -> tuple[int, ...]:
        values = self._said.get(name)
        values = self._config.get(name) if values is None else values
        # Some write -1 where nothing is suppressed, and configs of small vocabularies keep the family's own ids: both mean no token.
        inside = (value for value in values or () if not isinstance(value, int) or 0 <= value < self._vocab_size)
        return tuple(self._checked(list(inside), name))

    def _checked(self, ids: list[Any], name: str) -> list[Any]:
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self._vocab_size:
                raise ArtifactError(
                    f"{self._path}: {name} has {show(value)}, and token ids are 0 to {self._vocab_size - 1}"
                )
        return ids


def _name(value: Any, what: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise RequestError(
            f"{what} must be a text such as {'en' if what == 'language' else 'transcribe'}, not {show(value)}"
        )
    return value


def _hint(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return (
        f": did you mean {close[0]!r}?"
        if close
        else f"; it knows {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
    )


def decode(
    engine: Seq2SeqEngine,
    sources: Sequence[Sequence[int]] | torch.Tensor,
    beginning: Beginning,
    options: GenerationOptions,
    outputs: Sequence[SequenceOutput],
    seeds: Sequence[int],
    stats: GenerationStats,
    caller: Caller,
) -> Iterator[int]:
    """Fill `outputs` until all are finished; yields after every step how many ended in it.

    Args:
        sources: token ids of each source, at least one each; or features of sounds, float32 `[rows, a, b]`.
        beginning: what the decoder begins with, and what it may not say.
        outputs: one a source; each says when its sequence is over.
        seeds: one a source; used when `options.temperature` is above 0.
        stats: times, token counts and cache size are added to it, also when the caller stops early.
        caller: whose turn it is, where threads share the engine.
    """
    started = time.perf_counter()
    sources_of_chance = generators(options, seeds)
    rows = list(range(len(sources)))
    inputs, mask = (sources, None) if isinstance(sources, torch.Tensor) else pad_right(sources)
    mask = mask.to(engine.device) if mask is not None else None
    cache = engine.new_cache()
    stats.sequences += len(sources)
    first = True
    try:
        states = caller.run(engine.encode, inputs.to(engine.device), mask)
        # What was read: tokens, or the encoder's positions of a sound.
        sounds = isinstance(sources, torch.Tensor)
        stats.prompt_tokens += states.shape[0] * states.shape[1] if sounds else sum(len(source) for source in sources)
        begun = _begin(engine, beginning, states, mask, caller)
        given, seen = begun, None
        suppressed = torch.tensor(beginning.suppressed, dtype=torch.int64, device=engine.device)
        while True:
            logits = caller.run(engine.decode, given, states, mask, cache, True)[:, -1]
            logits = logits.index_fill(-1, suppressed, REMOVED) if len(suppressed) else logits
            if first and beginning.suppressed_first:
                unwanted = torch.tensor(beginning.suppressed_first, device=engine.device)
                logits = logits.index_fill(-1, unwanted, REMOVED)
            if first and options.repetition_penalty != 1.0:
                seen = torch.stack([seen_tokens(row, logits) for row in begun.tolist()])
            draws = [source for source in (sources_of_chance[row] for row in rows) if source is not None]
            tokens = next_tokens(logits, seen, options, draws)
            if first and beginning.forced is not None:
                tokens = torch.full_like(tokens, beginning.forced)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                outputs[row].push(token)
            stats.new_tokens += len(rows)
            stats.steps += 1
            alive = [i for i, row in enumerate(rows) if not outputs[row].finished]
            seconds = time.perf_counter() - started
            if first:
                stats.first_tokens += len(rows)
                stats.prefill_seconds += seconds
            else:
                stats.decode_seconds += seconds
            first = False
            yield len(rows) - len(alive)
            started = time.perf_counter()
            if not alive:
                return
            if seen is not None:
                seen[torch.arange(len(rows), device=seen.device), tokens] = True
            if len(alive) < len(rows):
                stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))
                keep = torch.tensor(alive, device=engine.device)
                caller.run(engine.keep_rows, cache, keep)
                rows = [rows[i] for i in alive]
                tokens, states = tokens[keep], states[keep]
                mask = mask[keep] if mask is not None else None
                seen = seen[keep] if seen is not None else None
            given = tokens[:, None]
    finally:
        stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))


def _begin(
    engine: Seq2SeqEngine, beginning: Beginning, states: torch.Tensor, mask: torch.Tensor | None, caller: Caller
) -> torch.Tensor:
    """What the decoder is given first, int64 `[rows, n]`: the language that is most likely for each where none is settled."""
    begun = torch.tensor([beginning.tokens] * len(states), dtype=torch.int64, device=engine.device)
    if not beginning.languages:
        return begun
    languages = torch.tensor(beginning.languages, device=engine.device)
    logits = caller.run(engine.decode, begun[:, :1], states, mask, None, True)[:, -1]
    heard = languages[logits[:, languages].argmax(-1)]
    return torch.cat([begun[:, :1], heard[:, None], begun[:, 1:]], dim=1)
