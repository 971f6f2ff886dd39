"""The plain decoding loop: one forward pass over the prompts, then one a token, for a batch of unequal prompts.

Prompts are padded on the left, so that every row's next token is in the last column; mask and positions make the padding
invisible. A finished row leaves the batch, and its part of the cache is freed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from runtime.decoding.options import GenerationOptions
from runtime.decoding.output import SequenceOutput
from runtime.decoding.sampling import next_tokens
from runtime.decoding.stats import GenerationStats
from runtime.engines.base import Engine


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    outputs: Sequence[SequenceOutput],
    seeds: Sequence[int],
    stats: GenerationStats,
) -> Iterator[None]:
    """Fill `outputs` until all are finished; yields after every step so that a caller can stream.

    Args:
        prompts: token ids of each sequence, at least one each.
        outputs: one a prompt; each says when its sequence is over.
        seeds: one a prompt; used when `options.temperature` is above 0.
        stats: times, token counts and cache size are added to it, also when the caller stops early.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = list(range(len(prompts)))
    cache = engine.new_cache()
    stats.prompt_tokens += sum(len(p) for p in prompts)
    stats.sequences += len(prompts)
    started = time.perf_counter()
    prefill_done = None
    try:
        ids, mask, positions = pad_left(prompts, engine.device)
        logits = engine.forward(ids, cache, mask, positions, last_only=True)[:, -1]
        seen = _seen(prompts, logits) if options.repetition_penalty != 1.0 else None
        lengths = torch.tensor([len(p) for p in prompts], device=engine.device)
        while True:
            tokens = next_tokens(logits, seen, options, [generators[row] for row in rows])
            for row, token in zip(rows, tokens.tolist(), strict=True):
                outputs[row].push(token)
            stats.new_tokens += len(rows)
            if prefill_done is None:
                prefill_done = time.perf_counter()
                stats.first_tokens += len(rows)
            yield
            alive = [i for i, row in enumerate(rows) if not outputs[row].finished]
            if not alive:
                return
            if seen is not None:
                seen[torch.arange(len(rows), device=seen.device), tokens] = True
            if len(alive) < len(rows):
                stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))
                keep = torch.tensor(alive, device=engine.device)
                engine.keep_rows(cache, keep)
                rows = [rows[i] for i in alive]
                tokens, lengths = tokens[keep], lengths[keep]
                mask = mask[keep] if mask is not None else None
                seen = seen[keep] if seen is not None else None
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = engine.forward(tokens[:, None], cache, mask, lengths[:, None], last_only=True)[:, -1]
            lengths = lengths + 1
    finally:
        ended = time.perf_counter()
        stats.prefill_seconds += (prefill_done or ended) - started
        stats.decode_seconds += ended - (prefill_done or ended)
        stats.cache_bytes = max(stats.cache_bytes, engine.cache_bytes(cache))


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


def _seen(prompts: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Bool, the shape of `logits`: which tokens each prompt holds (a model may read tokens that it never writes)."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, torch.tensor([token for token in prompt if token < logits.shape[-1]], dtype=torch.int64)] = True
    return seen.to(logits.device)
