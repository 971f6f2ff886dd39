"""Seconds that one token takes, of a model as `runtime.load` runs it: at batch 1, the least of a few rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.errors import RequestError

PROMPT_TOKENS = 16
NEW_TOKENS = 9
TEXT_TOKENS = 128  # of an encoder, which takes a text at a time
# Rounds go on until there are so many and they took so long; tiny models need many to find a quiet moment.
ROUNDS = 5
SECONDS = 0.4
MOST_ROUNDS = 100


def token_time(path: Path, device: torch.device) -> float:
    """Seconds: of a causal language model a decoding step, of an encoder-decoder a step of its decoder, of an encoder the forward of a
    text of 128 tokens. Loading, prefill and the first round are not counted.

    Args:
        path: a plain checkpoint; its tokenizer is not used.
    """
    import runtime
    from runtime.encoder import EncoderModel

    model: Any = runtime.load(path, device=device, kv_cache=False, drafter=False, verify=False)
    limit = model.engine.context_length
    if isinstance(model, EncoderModel):
        text = torch.zeros(1, min(TEXT_TOKENS, limit or TEXT_TOKENS), dtype=torch.int64)
        return _least(lambda: _forward(model, text))
    limits = [n for n in (limit, getattr(model.engine, "decoder_context_length", None)) if n is not None]
    prompt = [0] * min([PROMPT_TOKENS, *(n // 2 for n in limits)])
    new = min([NEW_TOKENS, *(n - len(prompt) - 1 for n in limits)])
    if new < 2:
        raise RequestError(f"a context of {min(limits)} tokens is too short")
    return _least(lambda: _decode(model, prompt, new))


def _forward(model: Any, text: torch.Tensor) -> float:
    start = time.perf_counter()
    model.hidden_states(text).cpu()  # a GPU is done when its numbers are here
    return time.perf_counter() - start


def _decode(model: Any, prompt: list[int], new: int) -> float:
    model.generate(prompt, max_new_tokens=new, ignore_eos=True)
    return float(model.stats["decode_seconds"]) / (new - 1)


def _least(measure: Callable[[], float]) -> float:
    """The least of a few rounds after one that warms up: what disturbs only ever adds."""
    measure()
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < ROUNDS or (len(found) < MOST_ROUNDS and time.perf_counter() - start < SECONDS):
        found.append(measure())
    return min(found)
