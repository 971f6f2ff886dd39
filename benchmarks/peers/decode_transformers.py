"""transformers on the dense checkpoint: bfloat16 or float32, eager or with a compiled decode step (static cache)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from decode_common import Engine, main, measure
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache


class Transformers:
    """`compile`: prefill stays eager, as it would have to be compiled again for every length of prompt."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        dtype = getattr(torch, request.get("dtype", "bfloat16"))
        self.model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval()
        self.static = request.get("compile", False)
        self.context = request["context"]
        self.cache: Any = StaticCache(self.model.config, max_cache_len=self.context) if self.static else None
        self.decode = torch.compile(self.model.forward, dynamic=False) if self.static else self.model.forward
        self.length = 0

    @torch.no_grad()
    def run(self, forward: Any, ids: Sequence[int]) -> np.ndarray:
        positions = torch.arange(self.length, self.length + len(ids))
        out = forward(
            input_ids=torch.tensor([list(ids)]), past_key_values=self.cache, position_ids=positions[None],
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self.length += len(ids)
        return out.logits[0, -1].float().numpy()

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.length = 0
        if self.static:
            self.cache.reset()
        else:
            self.cache = DynamicCache(config=self.model.config)
        return self.run(self.model.forward, ids)

    def step(self, token: int) -> np.ndarray:
        return self.run(self.decode, [token])


def load(request: dict[str, Any]) -> Engine:
    return Transformers(request)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main({"measure": lambda request: measure(request, load)}, "torch", "transformers")
