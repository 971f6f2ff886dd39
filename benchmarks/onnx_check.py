"""ONNX exports of the bundled model beside the artifact: 64 prompts in batches, logits of the held-out text, sizes of the files.

    python benchmarks/onnx_check.py --output benchmarks/results/onnx_check.json

Each artifact is made by its recipe's solver, exported in the standard dialect and with --ort, and both are loaded by `runtime.load`
in exact mode. Greedy tokens are compared over 64 prompts of different lengths, in batches of 16 and for eight of them alone; KL is
over windows of the held-out text. `near_ties` counts prompts that part where the artifact's two best tokens are closer than `tie`.
Exits 1 where a prompt differs otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from where import commit, cpu_name, memory_gb

import compress
import export
import runtime
from compress.core.resources import recipes_directory
from export.run import tool_versions
from export.source import Source

CHECKPOINT = recipes_directory() / "checkpoints" / "stdlib-4m"
HELDOUT = recipes_directory() / "checkpoints" / "texts" / "heldout.txt"
PROMPTS, NEW, BATCH, WINDOWS, WINDOW = 64, 32, 16, 16, 256
# Logits that count as a tie. Where inputs are rounded to int8, a sum in another order may put one of them on the next code.
TIE, TIE_OF_ROUNDED_INPUTS = 0.02, 0.5
CASES: dict[str, list[dict[str, Any]]] = {
    "dense": [],
    "w4_g128": [{"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 128}}],
    "w4_g32_asymmetric": [{"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32, "symmetric": False}}],
    "sparse24_w4": [
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 128}},
    ],
    "w8a8": [{"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8"}}],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("onnx_check.json"))
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    text = AutoTokenizer.from_pretrained(CHECKPOINT)(HELDOUT.read_text(encoding="utf-8"))["input_ids"]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, stages in CASES.items():
            artifact = CHECKPOINT
            if stages:
                artifact = Path(folder) / name
                compress.apply({"name": name, "model": str(CHECKPOINT), "stages": stages}, output=artifact, quiet=True)
            tie = TIE_OF_ROUNDED_INPUTS if name == "w8a8" else TIE
            rows[name] = check(artifact, Path(folder) / "export", text, tie)
            print(json.dumps({name: rows[name]}), file=sys.stderr, flush=True)
    result = {
        "machine": {"cpu": cpu_name(), "memory_gb": memory_gb()},
        "commit": commit(),
        "tools": tool_versions(),
        "model": CHECKPOINT.name,
        "setting": {
            "prompts": PROMPTS, "new_tokens": NEW, "batch": BATCH, "windows": WINDOWS, "window_tokens": WINDOW,
        },
        "rows": rows,
    }  # fmt: skip
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["other_prompts"] == 0 for case in rows.values() for row in case.values()) else 1


def check(artifact: Path, place: Path, text: list[int], tie: float) -> dict[str, Any]:
    """{dialect: figures} of one artifact; `tie` in logits."""
    step = len(text) // PROMPTS
    prompts = [text[i * step : i * step + 1 + i % 40] for i in range(PROMPTS)]
    windows = torch.tensor(text[: WINDOWS * WINDOW]).view(WINDOWS, WINDOW)
    ours = runtime.load(artifact, device="cpu", dtype="float32")
    wanted = greedy(ours, prompts)
    logits = ours.logits(windows)
    found = {}
    for dialect in ("onnx", "onnx --ort"):
        exported = export.export(artifact, "onnx", place, ort=dialect != "onnx", quiet=True, overwrite=True)
        theirs = runtime.load(place, device="cpu")
        answers = greedy(theirs, prompts)
        gaps = [gap(ours, *row) for row in zip(prompts, wanted, answers, strict=True) if row[1] != row[2]]
        a, b = logits.log_softmax(-1), theirs.logits(windows).log_softmax(-1)
        files = [f for f in place.iterdir() if f.suffix in (".onnx", ".data") and "_fast" not in f.name]
        assert exported.verification is not None
        found[dialect] = {
            "same_prompts": PROMPTS - len(gaps),
            "near_ties": sum(g <= tie for g in gaps),
            "other_prompts": sum(g > tie for g in gaps),
            "tie": tie,
            "alone_as_in_batches": [greedy(theirs, [p])[0] for p in prompts[:8]] == answers[:8],
            "kl": float((a.exp() * (a - b)).sum(-1).mean()),
            "file_bytes": sum(f.stat().st_size for f in files),
            "artifact_tensor_bytes": Source(artifact).bytes,
            "fused": exported.verification.metrics["fused"],
        }
    return found


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """`NEW` tokens after each prompt, in batches."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        answers += model.generate(prompts[start : start + BATCH], max_new_tokens=NEW, ignore_eos=True)
    return answers


def gap(model: Any, prompt: list[int], wanted: list[int], found: list[int]) -> float:
    """How far apart the artifact's logits are where two continuations part."""
    first = next(i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
    logits = model.logits(torch.tensor([prompt + wanted[:first]]))[0, -1]
    return float(logits[wanted[first]] - logits[found[first]])


if __name__ == "__main__":
    sys.exit(main())
