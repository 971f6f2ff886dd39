"""Decoding with an encoder-decoder: the sources are encoded once, then all outputs of a group grow a token a step.

Outputs begin together at the start token, so unlike prompts they need no padding; only sources of token ids are padded, on the right.
A finished row leaves the batch, and its part of the cache is freed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from runtime.decoding.beginning import Beginning
from runtime.decoding.options import GenerationOptions
from runtime.decoding.output import SequenceOutput
from runtime.decoding.prompts import pad_right
from runtime.decoding.sampling import REMOVED, generators, next_tokens, seen_tokens
from runtime.decoding.stats import GenerationStats
from runtime.decoding.turns import Caller
from runtime.engines.base import Seq2SeqEngine


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
