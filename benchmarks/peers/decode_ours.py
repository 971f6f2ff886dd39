"""This project: `runtime.load` of an artifact with the kernels asked for, and one `CompressedLinear` for `matvec`."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_common import (
    Generate,
    error_of,
    main,
    matvec_data,
    measure_prompts,
    memory,
    memory_result,
    time_matvec,
    turned,
)
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401  imported before the clock starts
from window_quality import divergence

import runtime
from runtime import formats
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """As `decode_common.measure`, through the interface that users have."""
    base = memory()
    start = time.perf_counter()
    model = runtime.load(request["path"], threads=request["threads"], kernels=request["kernels"])
    load_seconds = time.perf_counter() - start
    long, prompt, new = request["long_prompt"], request["prompt"], request["new_tokens"]
    if request.get("logits"):
        np.save(request["logits"], model.logits([prompt])[0, -5:].float().numpy())
        return {"logits": request["logits"]}
    loaded = memory()
    start = time.perf_counter()
    model.generate(long, max_new_tokens=1, ignore_eos=True)
    model.generate(prompt, max_new_tokens=4, ignore_eos=True)
    warm_seconds = time.perf_counter() - start
    prefills, decodes = [], []
    for turn in range(1, request["repeat"] + 1):
        model.generate(turned(long, turn), max_new_tokens=1, ignore_eos=True)
        prefills.append(model.stats["prefill_seconds"])
        # The first new token comes out of the prompt: one more makes `new` steps.
        model.generate(turned(prompt, turn), max_new_tokens=new + 1, ignore_eos=True)
        decodes.append(model.stats["decode_seconds"])
    return {
        "load_seconds": load_seconds,
        "warm_seconds": warm_seconds,
        "prefill_tokens_per_second": len(long) / statistics.median(prefills),
        "decode_tokens_per_second": new * len(decodes) / sum(decodes),
        "step_seconds_median": statistics.median(decodes) / new,
        **memory_result(base, loaded),
        "weight_bytes": model.stats["weight_bytes"],
        "kernels": dict(Counter(model.explain().values()).most_common()),
    }


def load(request: dict[str, Any]) -> Generate:
    """`generate` of the interface that users have; the clock is its own."""
    cache = request.get("kv_cache")
    model = runtime.load(request["path"], threads=request["threads"], kernels=request["kernels"], kv_cache=cache)

    def generate(ids: list[int], new: int) -> tuple[float, float]:
        model.generate(ids, max_new_tokens=new + 1, ignore_eos=True)  # the first new token comes out of the prompt
        return model.stats["prefill_seconds"], model.stats["decode_seconds"]

    return generate


def quality(request: dict[str, Any]) -> dict[str, Any]:
    """KL divergence and perplexity of an artifact."""
    model = runtime.load(request["path"], threads=request["threads"], kernels=request["kernels"])
    return divergence(Path(request["reference"]), lambda ids: model.logits([ids])[0].float().numpy())


def keep_two_of_four(codes: np.ndarray) -> np.ndarray:
    """Mask of the two largest of every four."""
    size = np.abs(codes.astype(np.int16) - 8).reshape(codes.shape[0], -1, 4)
    order = np.argsort(-size, axis=-1, kind="stable")
    mask = np.zeros(size.shape, bool)
    np.put_along_axis(mask, order[..., :2], True, -1)
    return mask.reshape(codes.shape)


def layer(codes: np.ndarray, scale: np.ndarray, sparse: bool, kernels: str) -> tuple[CompressedLinear, int, np.ndarray]:
    """A prepared layer, the bytes of its stored tensors, and the codes it has."""
    group = codes.shape[1] // scale.shape[1]
    scheme = Scheme(GridScheme(4, "int", True, "group", group), None, "2:4" if sparse else None)
    mask = None
    if sparse:
        kept = keep_two_of_four(codes)
        codes, mask = np.where(kept, codes, 8).astype(np.uint8), torch.from_numpy(kept)
    values = torch.from_numpy(codes.astype(np.int8) - 8)
    weight = CompressedWeight(values, torch.from_numpy(scale).bfloat16(), None, mask, scheme, torch.bfloat16)
    shape = (codes.shape[0], codes.shape[1])
    storage = formats.get("sparse24") if sparse else formats.choose(scheme, shape)
    tensors = storage.pack(weight)
    size = sum(t.numel() * t.element_size() for t in tensors.values() if t.numel() > 16)
    entry = ModuleEntry(scheme, storage.name, storage.stored_count(tensors))
    module = CompressedLinear.from_tensors(entry, shape, tensors, None, torch.bfloat16)
    module.prepare(kernels)
    return module, size, codes


def matvec(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    x = torch.randn(1, request["columns"], generator=torch.Generator().manual_seed(1)).bfloat16()
    copies, error, size = [], 0.0, 0
    with torch.inference_mode():
        for codes, scale in matvec_data(request):
            module, size, stored = layer(codes, scale, request["sparse"], request["kernels"])
            copies.append(module)
            if len(copies) == 1:
                error = error_of(module(x).float().numpy(), stored, scale, x.float().numpy())

        def run() -> None:
            for module in copies:
                module(x)

        timed = time_matvec(request, run, len(copies), size)
    return {**timed, "relative_error": error, "kernel": copies[0].kernel_name, "path": copies[0].explain(1)}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    actions = {
        "measure": measure,
        "matvec": matvec,
        "quality": quality,
        "depths": lambda request: measure_prompts(request, load),
    }
    main(actions, "torch", "transformers")
