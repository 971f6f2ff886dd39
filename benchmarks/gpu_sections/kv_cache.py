"""Policies of the KV cache: what they do to logits, then whole decode steps of `kv_speed.py` beside transformers' own caches."""

from __future__ import annotations

import argparse
import random

import kv_speed
import torch

from gpu_sections.bench import Bench
from gpu_sections.llama import SHAPES, dense_model, engine_logits
from runtime.engines.torch.engine import TorchEngine
from runtime.kv_cache.policy.policy import Policy

#: {policy: largest relative error of logits}. Of random weights, whose attention is even: evicting a token costs little.
LIMITS = {"ours plain": 0.05, "ours int8": 0.05, "ours fp8": 0.1, "ours int4": 0.2}
CELLS = ((8192, 1), (1024, 16), (32768, 4))  # tokens, sequences


def check(bench: Bench) -> None:
    """Logits over compressed caches, a token at a time after a prompt, against the same model with a plain cache."""
    shape = SHAPES[bench.pick("1b", "tiny")] | bench.pick({"num_hidden_layers": 2}, {})
    ids = random.Random(1).choices(range(512), k=bench.pick(600, 150))
    ends = (
        0,
        len(ids) - bench.pick(40, 3),
    )  # some tokens become old while they are generated, and are stored in few bits
    wanted = engine_logits(TorchEngine(dense_model(shape, bench.device), bench.device), ids, ends)
    for name, limit in LIMITS.items():
        engine = TorchEngine(dense_model(shape, bench.device), bench.device)
        engine.compress_cache(Policy.parse(kv_speed.STORED[name], name))
        found = engine_logits(engine, ids, ends)
        bench.case(f"{name}, logits", float((found - wanted).norm() / wanted.norm()), limit)
        bench.fact(kernels=sorted({value for key, value in engine.explain().items() if key.startswith("kv_cache.")}))


@torch.inference_mode()
def timing(bench: Bench) -> None:
    """Tokens a second and bytes of each cache."""
    arguments = argparse.Namespace(
        device=str(bench.device), rounds=bench.pick(3, 1), steps=bench.pick(16, 1), layers=bench.pick(16, 1),
        most_bytes=0.8 * bench.free_bytes(), peaks=False,
    )  # fmt: skip
    bench.fact(layers=arguments.layers, shape="layers of the 1.1B shape")
    for length, batch in bench.pick(CELLS, ((128, 1),)):
        if bench.enough(f"{length} tokens, batch {batch}", bench.pick(20, 1)):
            bench.add({"tokens": length, "batch": batch, **kv_speed.decode(arguments, length, batch)})
