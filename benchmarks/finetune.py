#!/usr/bin/env python
"""A LoRA step and decoding with the adapter: a packed 4-bit model against a dense bfloat16 one of the same weights.

    python benchmarks/finetune.py [--output FILE]

Each part runs in a process of its own, with one thread, in turns; medians. Needs the extra `finetune`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from make_random_llama import write

import compress
import runtime
from compress.run.record import machine

SHAPE = {"layers": 12, "hidden": 1024, "intermediate": 2816, "heads": 16, "kv_heads": 4, "vocabulary": 8000}
BATCH, LENGTH, WARM, STEPS, ROUNDS = 2, 128, 1, 4, 3
PROMPT, NEW = 32, 48
PARTS = ("packed", "dense", "decode", "decode with the adapter")


def train(path: Path, folder: Path, packed: bool) -> dict[str, Any]:
    """Steps of AdamW on the adapter; peak bytes are those of the process beyond what it took before the model was loaded."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    before = psutil.Process().memory_info().rss
    options: dict[str, Any] = {"quantization_config": runtime.CompressConfig()} if packed else {"dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    ids = torch.randint(2, 8000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if packed:
        model.save_pretrained(folder / "adapter")
    peak = max(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return {"seconds_a_step": statistics.median(seconds[WARM:]), "peak_bytes": peak * 1024 - before}


def decode(path: Path, adapter: Path | None) -> dict[str, Any]:
    """Tokens per second of the second call."""
    model = runtime.load(path, adapter=adapter, threads=1)
    prompt = torch.randint(2, 8000, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in range(2):
        model.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
    return {"tokens_per_second": model.stats["tokens_per_second"], "engine": model.stats["engine"]}


def run_part(part: str, folder: Path) -> dict[str, Any]:
    """One of `PARTS`, in this process."""
    torch.set_num_threads(1)
    if part in ("packed", "dense"):
        return train(folder / part, folder, part == "packed")
    return decode(folder / "packed", folder / "adapter" if "adapter" in part else None)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run_part(options.part[0], Path(options.part[1]))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "source", **SHAPE)
        stages = [{"quantize": {"method": "rtn", "bits": 4, "group_size": 128}}]
        recipe = {"name": "finetune", "model": str(folder / "source"), "stages": stages}
        compress.apply(recipe, output=folder / "packed", quiet=True, device="cpu")
        runtime.load(folder / "packed", device="cpu")  # measures the kernels, once for all parts
        from transformers import AutoModelForCausalLM

        packed = AutoModelForCausalLM.from_pretrained(folder / "packed", quantization_config=runtime.CompressConfig())
        parameters = sum(each.numel() for each in packed.dequantize().parameters())
        packed.to(torch.bfloat16).save_pretrained(folder / "dense")
        del packed
        rounds: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
        for _ in range(ROUNDS):
            for part in PARTS:
                command = [sys.executable, __file__, "--part", part, str(folder)]
                found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                rounds[part].append(json.loads(found.splitlines()[-1]))
    medians = {
        part: {
            key: value if isinstance(value, str) else statistics.median(one[key] for one in found)
            for key, value in found[0].items()
        }
        for part, found in rounds.items()
    }
    result = {
        "machine": machine("cpu"), "threads": 1, "shape": SHAPE, "parameters": parameters, "batch": [BATCH, LENGTH],
        "steps": STEPS, "new_tokens": NEW, "medians": medians, "rounds": rounds,
    }  # fmt: skip
    text = json.dumps(result, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
