"""One model with a cache policy on the native engine and on transformers' modules, and prompts for both."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from llama_engines import CPU, native
from speculation_cases import VOCABULARY, model_over

from runtime.api.model import Model
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu.attention import PAGE
from runtime.kv_cache.policy.policy import Policy


def native_model(module: Any, policy: dict[str, Any]) -> Model:
    engine = native(module)
    assert engine.hold(Policy.parse(policy)) is None
    return model_over(engine)


def torch_model(module: Any, policy: dict[str, Any]) -> Model:
    engine = TorchEngine(module, CPU)
    engine.compress_cache(Policy.parse(policy))
    return model_over(engine)


def texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, VOCABULARY) for _ in range(length)] for length in lengths]


def memory_changes_nothing(make: Callable[[], Model], new: int, spare: int) -> None:
    """In the least memory that the longest prompt needs, and `spare` pages, a batch gives what each prompt gives alone."""
    prompts = texts(300, 20, 129, 64, 280, seed=3)
    prompts += [prompts[0][:250], prompts[0] + prompts[1]]
    wanted = [make().generate(prompt, max_new_tokens=new) for prompt in prompts]
    model = make()
    longest = max(-(-model.engine.slots(len(prompt), new) // PAGE) for prompt in prompts)
    memory = (longest + sum(model.engine.overhead) + spare) * model.engine.page_bytes
    assert model.generate(prompts, max_new_tokens=new, cache_memory=memory) == wanted
    assert model.stats["cache_bytes"] <= memory
