"""KL divergence and perplexity over windows of tokens, each read as one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def divergence(reference: Path, logits: Callable[[list[int]], np.ndarray]) -> dict[str, float]:
    """KL divergence from a reference in nats a token, and perplexity.

    Args:
        reference: holds `ids.npy` `[windows, length]` and `log_probabilities.npy` `[windows, length, vocabulary]`.
        logits: of all positions of one window, float32 `[length, vocabulary]`.
    """
    windows, wanted = np.load(reference / "ids.npy"), np.load(reference / "log_probabilities.npy", mmap_mode="r")
    distance, loss = 0.0, 0.0
    for ids, expected in zip(windows, wanted, strict=True):
        found = logits(ids.tolist()).astype(np.float64)
        found -= found.max(-1, keepdims=True)
        found -= np.log(np.exp(found).sum(-1, keepdims=True))
        exact = expected.astype(np.float64)
        distance += float((np.exp(exact) * (exact - found)).sum())
        loss -= float(np.take_along_axis(found[:-1], ids[1:, None], -1).sum())
    return {"kl": distance / windows.size, "perplexity": math.exp(loss / windows[:, 1:].size)}


def llama_divergence(request: dict[str, Any], llama: Any, decoder: Any, forget: Callable[[], None]) -> dict[str, float]:
    """`divergence` of llama.cpp or ik_llama.cpp, whose Python modules (`llama`) share these names. `forget` empties the decoder's cache."""
    reference = Path(request["reference"])
    vocabulary = np.load(reference / "log_probabilities.npy", mmap_mode="r").shape[-1]

    def logits(ids: list[int]) -> np.ndarray:
        forget()
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        code = llama.llama_decode(decoder.context, batch)
        llama.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        rows = [llama.llama_get_logits_ith(decoder.context, place) for place in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (vocabulary,)) for row in rows])

    return divergence(reference, logits)
