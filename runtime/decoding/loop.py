"""Decoding for engines with a cache of their own: one forward pass over the prompts of a group, then one a token.

Prompts are padded on the left, so that every row's next token is in the last column; mask and positions make the padding
invisible. A finished row leaves the batch, and its part of the cache is freed. Many prompts are decoded group after group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from runtime.decoding.turns import Caller, Turns
from runtime.engines.base import Engine
from runtime.sampling.options import GenerationOptions
from runtime.sampling.output import SequenceOutput
from runtime.sampling.sampling import generators, next_tokens, seen_tokens
from runtime.sampling.stats import GenerationStats

GROUP_ROWS = 64
# Padding that a group may always hold, in tokens, and as a share of its own tokens.
FREE_PADDING = 1024
PADDING_SHARE = 0.25


def groups(
    lengths: Sequence[int], padding_is_exact: bool, needs: Sequence[int] | None = None, bound: int = 0
) -> list[list[int]]:
    """Which prompts (by index) are decoded together: few enough for memory, and of similar lengths, longest first.

    Args:
        lengths: tokens of each prompt.
        padding_is_exact: False: only prompts of equal length may share a group.
        needs: bytes that each prompt's cache takes; None: nobody knows.
        bound: bytes that all caches of a group may take, where that is known.
    """
    result: list[list[int]] = []
    longest = total = taken = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length, need = lengths[row], needs[row] if needs is not None else 0
        if result and len(result[-1]) < GROUP_ROWS and taken + need <= bound:
            padding = longest * (len(result[-1]) + 1) - (total + length)
            allowed = max(FREE_PADDING, PADDING_SHARE * total) if padding_is_exact else 0
            if padding <= allowed:
                result[-1].append(row)
                total += length
                taken += need
                continue
        result.append([row])
        longest = total = length
        taken = need
    return [sorted(group) for group in result]


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    outputs: Sequence[SequenceOutput],
    seeds: Sequence[int],
    stats: GenerationStats,
    caller: Caller | None = None,
) -> Iterator[int]:
    """Fill `outputs` until all are finished; yields after every step, so that a caller can stream, how many ended in it.

    Args:
        prompts: token ids of each sequence, at least one each.
        outputs: one a prompt; each says when its sequence is over.
        seeds: one a prompt; used when `options.temperature` is above 0.
        stats: times, token counts and cache size are added to it, also when the caller stops early.
        caller: whose turn it is, where threads share the engine.
    """
    caller = caller or Caller(Turns())
    started = time.perf_counter()
    sources = generators(options, seeds)
    rows = list(range(len(prompts)))
    cache = engine.new_cache()
    stats.sequences += len(prompts)
    first = True
    try:
        ids, mask, positions = pad_left(prompts, engine.device)
        logits = caller.run(engine.forward, ids, cache, mask, positions, True)[:, -1]
        stats.prompt_tokens += sum(len(p) for p in prompts)
        seen = None
        if options.repetition_penalty != 1.0:
            seen = torch.stack([seen_tokens(prompt, logits) for prompt in prompts])
        lengths = torch.tensor([len(p) for p in prompts], device=engine.device)
        while True:
            draws = [source for source in (sources[row] for row in rows) if source is not None]
            tokens = next_tokens(logits, seen, options, draws)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                outputs[row].push(token)
            stats.new_tokens += len(rows)
            stats.steps += 1
            if first:
                stats.first_tokens += len(rows)
                stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))
            alive = [i for i, row in enumerate(rows) if not outputs[row].finished]
            _book(stats, first, started)
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
                tokens, lengths = tokens[keep], lengths[keep]
                mask = mask[keep] if mask is not None else None
                seen = seen[keep] if seen is not None else None
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = caller.run(engine.forward, tokens[:, None], cache, mask, lengths[:, None], True)[:, -1]
            lengths = lengths + 1
    finally:
        # No turn is taken here: a stream may be thrown away anywhere, in the middle of somebody's step too.
        stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))
        reads = getattr(cache, "reads", None)  # of a compressed cache with a selection
        if reads is not None:
            read, held = reads.totals
            stats.read_tokens += read
            stats.held_tokens += held


def _book(stats: GenerationStats, first: bool, started: float) -> None:
    seconds = time.perf_counter() - started
    if first:
        stats.prefill_seconds += seconds
    else:
        stats.decode_seconds += seconds


def pad_left(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Token ids, mask (1 = token, 0 = padding; None when all prompts are equally long) and positions, int64 `[batch, longest]`.

    Positions count from 0 at each prompt's own first token; padding has position 0 and id 0, which nothing attends to.
    """
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    shift = torch.tensor([[longest - len(p)] for p in prompts])
    columns = torch.arange(longest)[None, :]
    positions = (columns - shift).clamp(min=0)
    mask = (columns >= shift).long() if bool((shift > 0).any()) else None
    return ids.to(device), mask.to(device) if mask is not None else None, positions.to(device)
