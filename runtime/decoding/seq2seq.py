"""Decoding with an encoder-decoder: the sources are encoded once, then all outputs of a group grow a token a step.

Outputs begin together at the start token, so unlike prompts they need no padding; only the sources are padded, on the right.
A finished row leaves the batch, and its part of the cache is freed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from runtime.decoding.options import GenerationOptions
from runtime.decoding.output import SequenceOutput
from runtime.decoding.prompts import pad_right
from runtime.decoding.sampling import generators, next_tokens, seen_tokens
from runtime.decoding.stats import GenerationStats
from runtime.decoding.turns import Caller
from runtime.engines.base import Seq2SeqEngine


def decode(
    engine: Seq2SeqEngine,
    sources: Sequence[Sequence[int]],
    start: tuple[int, int | None],
    options: GenerationOptions,
    outputs: Sequence[SequenceOutput],
    seeds: Sequence[int],
    stats: GenerationStats,
    caller: Caller,
) -> Iterator[int]:
    """Fill `outputs` until all are finished; yields after every step how many ended in it.

    Args:
        sources: token ids of each source, at least one each.
        start: the token the decoder begins with, and the first token of every output where one is forced.
        outputs: one a source; each says when its sequence is over.
        seeds: one a source; used when `options.temperature` is above 0.
        stats: times, token counts and cache size are added to it, also when the caller stops early.
        caller: whose turn it is, where threads share the engine.
    """
    started = time.perf_counter()
    begin, forced = start
    sources_of_chance = generators(options, seeds)
    rows = list(range(len(sources)))
    ids, mask = pad_right(sources)
    mask = mask.to(engine.device) if mask is not None else None
    cache = engine.new_cache()
    stats.sequences += len(sources)
    first = True
    try:
        states = caller.run(engine.encode, ids.to(engine.device), mask)
        stats.prompt_tokens += sum(len(source) for source in sources)
        tokens = torch.full((len(rows),), begin, dtype=torch.int64, device=engine.device)
        seen = None
        while True:
            logits = caller.run(engine.decode, tokens[:, None], states, mask, cache, True)[:, -1]
            if first and options.repetition_penalty != 1.0:
                seen = torch.stack([seen_tokens([begin], logits) for _ in rows])
            draws = [source for source in (sources_of_chance[row] for row in rows) if source is not None]
            tokens = next_tokens(logits, seen, options, draws)
            if first and forced is not None:
                tokens = torch.full_like(tokens, forced)
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
    finally:
        stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))
