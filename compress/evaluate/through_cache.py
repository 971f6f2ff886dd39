"""Quality cost of a compressed KV cache: predictions from it, beside predictions of the same tokens with a plain cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.evaluate.metrics import TokenMetrics, rows_at_once
from runtime.decoding.memory import cache_bound, pages_of
from runtime.engines.base import Chunk, Usage
from runtime.errors import RequestError
from runtime.kv_cache.estimate import full_bytes
from runtime.kv_cache.layer import STEP_TOKENS
from runtime.kv_cache.shape import Shape
from runtime.layers.unrounded import behind

if TYPE_CHECKING:
    from compress.core.progress import Progress
    from runtime.api.model import Model
    from runtime.engines.base import Engine
    from runtime.kv_cache.policy.policy import Policy

PROMPT_SHARE = 0.75
"""Part of a window that is read into the cache as a prompt; the rest is scored, when the cache is large."""
LEAST = 3
"""Tokens of a window: a prompt, a token that is read from the cache, and one that it predicts."""


def through_cache(
    model: Model, windows: torch.Tensor, batch_size: int = 8, progress: Progress | None = None
) -> dict[str, Any]:
    """Perplexity of the tokens after a prompt, from the model's compressed cache and, for the same tokens, without a cache.

    The first three quarters of a window are a prompt. The rest is read in chunks of at most 16 tokens, which a cache treats as steps of
    decoding, so that selections and evictions at intervals take effect too. The token after the prompt is not scored: the prompt's own
    pass predicts it. With a plain cache the window is computed in one pass by the same engine.

    Args:
        model: loaded with a policy.
        windows: token ids `[n, at least 3]`, int64.
        batch_size: windows at once; fewer where caches or logits would be too large.
        progress: who is told.

    Returns:
        `perplexity_with_cache`; `perplexity_increase_with_cache`, relative to a plain cache (0.05 is 5 %); `kv_cache`: the `policy` in
        words, `plain_perplexity`, `kl` (nats a token) and `top1_agreement` to the same model with a plain cache, `tokens` scored,
        `sequence_length` and `prompt_tokens` of a window, `cache_bytes` and `full_bytes` of one sequence at its end, as held and plain,
        with a selection `read_share`, and `warning`, a sentence, where windows are too short to show what the policy does.

    Raises:
        RequestError: the model has a plain cache; windows too short, or longer than the context; a cache that does not fit the memory.
        CompressError: the model gives NaN.
    """
    engine: Any = model.engine
    policy: Policy | None = engine.policy
    if policy is None:
        raise RequestError("the model has a plain cache; load it with kv_cache=... to measure a compressed one")
    length = int(windows.shape[1])
    prompt = _prompt_tokens(length)
    if engine.lockstep:
        need = engine.cache_factory.need(prompt, length - prompt)
    else:
        need = engine.page_bytes * (
            pages_of(engine, engine.slots(len(engine.prefix) + prompt, length - prompt)) + engine.overhead.step
        )
    rows = min(rows_at_once(windows, engine.vocab_size, batch_size), cache_bound(engine, [need], None) // max(need, 1))
    shape = Shape.of(engine.module.config, engine.module.dtype)
    plain, ours = TokenMetrics(), TokenMetrics()
    batches = windows.split(max(1, rows))
    if progress is not None:
        progress.phase("evaluate cache", len(batches))
    size, read, could = 0, 0, 0
    for number, ids in enumerate(batches, 1):
        expected = model.logits(ids[:, :-1])[:, prompt:].flatten(0, 1)
        targets = ids[:, prompt + 1 :].reshape(-1)
        logits, usage = (_of_rows if engine.lockstep else _of_pages)(engine, ids[:, :-1], prompt)
        ours.add(logits.flatten(0, 1), targets, expected)
        plain.add(expected, targets)
        size, read, could = size + usage.bytes, read + usage.read_tokens, could + usage.held_tokens
        if progress is not None:
            progress.step(f"batch {number}")
    measured, base = ours.result(), plain.result()["perplexity"]
    facts = {
        "policy": policy.describe(), "plain_perplexity": base, "kl": measured["kl"], "top1_agreement": measured["top1_agreement"],
        "tokens": measured["tokens"], "sequence_length": length, "prompt_tokens": prompt,
        "cache_bytes": size // len(windows), "full_bytes": full_bytes(shape, length - 1),
    }  # fmt: skip
    if could:
        facts["read_share"] = read / could
    short = _too_short(policy, facts)
    return {
        "perplexity_with_cache": measured["perplexity"],
        "perplexity_increase_with_cache": measured["perplexity"] / base - 1,
        "kv_cache": facts | ({"warning": short} if short else {}),
    }


def _of_rows(engine: Any, ids: torch.Tensor, prompt: int) -> tuple[torch.Tensor, Usage]:
    """Logits of what follows the prompts, float32 `[windows, tokens, vocab]`, and what the caches take at their end."""
    cache, ids = engine.new_cache(), ids.to(engine.device)
    engine.forward(ids[:, :prompt], cache, None, None, last_only=True)
    logits = [engine.forward(part, cache, None, None) for part in ids[:, prompt:].split(STEP_TOKENS, 1)]
    return torch.cat(logits, 1), Usage(engine.cache_bytes(cache), *(cache.reads.totals if cache.reads else ()))


def _of_pages(engine: Engine, ids: torch.Tensor, prompt: int) -> tuple[torch.Tensor, Usage]:
    """As `_of_rows`, on engines with pages, whose numbers depend on no chunks but where they evict."""
    ids, prompt = behind(engine.prefix, ids), len(engine.prefix) + prompt
    count, found, total = -(-ids.shape[1] // engine.page_size), [], Usage(0)
    width = engine.page_size  # larger steps would hold more of the cache plain than decoding does
    for row in ids.tolist():
        pool, retention = engine.new_pages(2 * count), engine.retention(prompt)
        pages, spare = [*range(count)], [*range(count, 2 * count)]
        start, logits = 0, []
        while start < len(row):
            boundary = None if retention is None else retention.boundary
            end = min(len(row), start + width, boundary or len(row))
            logits.append(engine.read(pool, [Chunk(row[start:end], start, pages, retention=retention)], every=True))
            start = end
            if retention is not None and boundary == end:
                same = retention.fixed // width
                into = pages[:same] + spare[same:] if retention.moves else pages
                if engine.evict(pool, retention, pages, into) and retention.moves:
                    pages, spare = into, spare[:same] + pages[same:]
        found.append(torch.cat(logits)[prompt:])
        held = len(row) - (0 if retention is None else retention.evicted)
        usage = engine.usage(pool, -(-held // engine.page_size))
        total = Usage(*(before + own for before, own in zip(total, usage, strict=True)))
    return torch.stack(found), total


def _prompt_tokens(length: int) -> int:
    if length < LEAST:
        raise RequestError(f"windows of {length} tokens are too short: a compressed cache needs {LEAST}")
    return max(1, min(int(PROMPT_SHARE * length), length - 2))


def _too_short(policy: Policy, facts: dict[str, Any]) -> str:
    """Why windows of this length do not show what the policy does to longer texts; empty: they do."""
    rest = facts["sequence_length"] - facts["prompt_tokens"]
    interval = None if policy.evict is None else policy.evict.interval
    lacks = []
    saves = (policy.evict, policy.tiers, policy.clusters, policy.offload)
    if any(saves) and policy.select is None and facts["cache_bytes"] >= facts["full_bytes"]:
        lacks.append("the compressed cache is no smaller than a plain one")
    if interval is not None and interval >= rest:
        lacks.append(f"the {rest} tokens that follow a prompt are no more than the interval of {interval}")
    if not lacks:
        return ""
    return f"in windows of {facts['sequence_length']} tokens {' and '.join(lacks)}: a longer sequence_length says more"
