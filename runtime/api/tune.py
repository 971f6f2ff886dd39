"""Kernels that are measured ahead for one model on one machine, so that no request waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from runtime.api.load import load
from runtime.api.model import Model
from runtime.errors import RequestError
from runtime.kernels import tuning

_NEW = 2  # tokens after each prompt: a prefill and a step
_SHORT = 8  # tokens of the prompts of a batch


def tune(path: str | Path, *, prompt: int = 2048, batch: int = 64, **options: Any) -> dict[str, dict[str, Any]]:
    """Measure which kernels and launches are fastest for a model, and remember it for later loads on this machine.

    On CPUs every kind of layer is measured as at load, without the limit of half a second. On GPUs text is generated from random prompts
    of 1, 2, 4, ... tokens and batches of 1, 2, 4, ..., and every launch that is new is timed; nothing else times any, and what nobody has
    measured has defaults. Choices are kept under `$COMPRESS_CACHE` or `~/.cache/compress`, by device.

    Args:
        path: an artifact or checkpoint of a causal language model.
        prompt: tokens of the longest prompt, at most what the model's context holds.
        batch: sequences of the largest batch.
        options: of `runtime.load`, as the model will be loaded.

    Returns:
        {file of a device: {what was measured now: its choice}}.

    Raises:
        RequestError: the model generates no text; numbers that are not positive; what `runtime.load` refuses.
    """
    for name, value in (("prompt", prompt), ("batch", batch)):
        if value < 1:
            raise RequestError(f"{name} is {value}, expected a positive number")
    before = tuning.stored()
    with tuning.measuring(math.inf):
        model = load(path, **options)
        if not isinstance(model, Model):
            raise RequestError(f"{path} generates no text: only causal language models are tuned")
        if model.engine.device.type != "cpu":  # there all is decided at load
            for prompts in passes(model, prompt, batch):
                model.generate(prompts, max_new_tokens=_NEW, ignore_eos=True)
    found = {
        str(file): {key: choice for key, choice in now.items() if before.get(file, {}).get(key) != choice}
        for file, now in tuning.stored().items()
    }
    return {file: choices for file, choices in found.items() if choices}


def passes(model: Model, prompt: int, batch: int) -> Iterator[list[list[int]]]:
    """Prompts of one call each: single ones that double in length, up to the first of at least `prompt` tokens, then batches likewise."""
    generator, room = torch.Generator().manual_seed(0), model.engine.context_length or prompt + _NEW

    def text(tokens: int) -> list[int]:
        found: list[int] = torch.randint(model.engine.vocab_size, (tokens,), generator=generator).tolist()
        return found

    longest = max(1, min(prompt, room - _NEW))
    for power in range((longest - 1).bit_length() + 1):
        yield [text(min(1 << power, longest))]
    for power in range(1, (batch - 1).bit_length() + 1):
        yield [text(min(_SHORT, longest)) for _ in range(min(1 << power, batch))]
