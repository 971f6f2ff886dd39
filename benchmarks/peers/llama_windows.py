"""Logits of whole windows from llama.cpp and ik_llama.cpp, whose Python modules share these names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from decode_common import divergence


def window_quality(request: dict[str, Any], llama: Any, decoder: Any, forget: Callable[[], None]) -> dict[str, float]:
    """KL divergence and perplexity of what a decoder computes; its vocabulary is that of the reference. `forget` empties its cache."""
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
