"""GGUF beside the artifact: greedy tokens over 64 prompts and perplexity of the held-out text, in llama.cpp and in `runtime.load`.

    python benchmarks/gguf_check.py --output benchmarks/results/gguf_check.json

Needs llama-cpp-python. Each artifact is made from the bundled checkpoint, exported, and run three ways: `runtime` computes it in
float32 and exact mode; `file` is llama.cpp with the file as it is (it rounds the inputs of products to 8 bits, or to 16 for BF16);
`opened` is llama.cpp with the values of the artifact in float32 matrices, so that nothing is rounded. Perplexity is of windows of 256
tokens of the held-out text, the first token of each not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from where import commit, cpu_name, memory_gb

import compress
import export
import runtime
from compress.core.resources import recipes_directory
from export.gguf import plan, tokenizer, writer
from export.gguf.check import LlamaModel as Model
from export.gguf.options import GgufOptions
from export.source import Source
from export.target import Job
from runtime.system.progress import ProgressReporter

CHECKPOINT = recipes_directory() / "checkpoints" / "stdlib-4m"
HELDOUT = recipes_directory() / "checkpoints" / "texts" / "heldout.txt"
PROMPTS, PROMPT, NEW, WINDOW = 64, 32, 32, 256
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "bf16": (None, {}),
    "w4_g128 as Q4_0": ({"bits": 4, "group_size": 128}, {}),
    "w4_g32_asymmetric as Q5_0": ({"bits": 4, "group_size": 32, "symmetric": False}, {}),
    "w4_g32_asymmetric as Q4_1": ({"bits": 4, "group_size": 32, "symmetric": False}, {"asymmetric": "q4_1"}),
    "w8_g128 as Q8_0": ({"bits": 8, "group_size": 128}, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gguf_check.json"))
    parser.add_argument("--windows", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (grid, options) in CASES.items():
            rows[name] = _case(Path(folder), grid, options, arguments.windows)
            print(json.dumps({name: rows[name]}), flush=True)
    result = {
        "machine": {"cpu": cpu_name(), "memory_gb": memory_gb(), "threads": 1},
        "commit": commit(),
        "llama_cpp": f"llama-cpp-python {version('llama-cpp-python')}",
        "model": CHECKPOINT.name,
        "setting": {
            "prompts": PROMPTS, "prompt_tokens": PROMPT, "new_tokens": NEW, "windows": arguments.windows, "window_tokens": WINDOW,
        },
        "rows": rows,
    }  # fmt: skip
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def _case(folder: Path, grid: dict[str, Any] | None, options: dict[str, Any], windows: int) -> dict[str, Any]:
    artifact = _artifact(folder, grid)
    output = folder / "gguf"
    exported = export.export(artifact, "gguf", output, quiet=True, verify=False, overwrite=True, **options)
    source = Source(artifact)
    ids = tokenizer.load(source).encode(HELDOUT.read_text(encoding="utf-8"))
    texts = torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)
    step = len(ids) // PROMPTS
    prompts = [ids[i * step : i * step + PROMPT] for i in range(PROMPTS)]
    ours = runtime.load(artifact, device="cpu", dtype="float32")
    expected = [ours.generate([p], max_new_tokens=NEW, ignore_eos=True)[0] for p in prompts]
    row: dict[str, Any] = {
        "types": exported.facts["types"],
        "bytes": exported.bytes,
        "artifact_tensor_bytes": source.bytes,
        "losses": max(exported.losses.values(), default=0.0),
        "runtime": {"perplexity": _perplexity(ours.logits, texts)},
    }
    with Model(output / "model.gguf", WINDOW) as model:
        row["same_token_ids_of_the_text"] = model.tokenize(HELDOUT.read_text(encoding="utf-8")) == ids
        row["file"] = _compare(model, prompts, expected, texts, row["runtime"]["perplexity"])
    with Model(_opened(folder, source, options), WINDOW) as model:
        row["opened"] = _compare(model, prompts, expected, texts, row["runtime"]["perplexity"])
    return row


def _artifact(folder: Path, grid: dict[str, Any] | None) -> Path:
    if grid is None:
        return CHECKPOINT
    recipe = {
        "name": "gguf_check",
        "model": str(CHECKPOINT),
        "calibration": {"data": "bundled", "samples": 64, "sequence_length": 256, "seed": 0},
        "stages": [{"quantize": {"method": "gptq", **grid}}],
        "evaluate": {"data": "bundled", "samples": 4},
    }
    path = folder / "-".join(str(v) for v in grid.values())
    return path if path.exists() else compress.apply(recipe, output=path, quiet=True).path


def _opened(folder: Path, source: Source, given: dict[str, Any]) -> Path:
    """The same values in float32 matrices."""
    options = GgufOptions(**given)
    job = Job(source, options, folder, ProgressReporter(quiet=True))
    path = folder / "opened.gguf"
    tensors = [replace(t, type="F32", exact=True, anew=False) for t in plan.plan(source, options)]
    writer.write(path, job, tensors, tokenizer.read(source))
    return path


def _compare(
    model: Model, prompts: list[list[int]], expected: list[list[int]], texts: torch.Tensor, perplexity: float
) -> dict[str, Any]:
    found = [list(prompt) for prompt in prompts]
    for row in found:
        while len(row) < PROMPT + NEW:
            row.append(int(model.logits(torch.tensor([row]))[0, -1].argmax()))
    found = [row[PROMPT:] for row in found]
    up_to = [
        next((i for i, (a, b) in enumerate(zip(e, f, strict=True)) if a != b), NEW)
        for e, f in zip(expected, found, strict=True)
    ]
    theirs = _perplexity(model.logits, texts)
    return {
        "perplexity": theirs,
        "perplexity_change_percent": 100 * (theirs / perplexity - 1),
        "identical_continuations": sum(n == NEW for n in up_to),
        "tokens_before_a_difference": sum(up_to),
        "tokens": NEW * len(prompts),
    }


def _perplexity(logits: Any, texts: torch.Tensor) -> float:
    total = 0.0
    for row in texts:
        scores = logits(row[None])[0, :-1].float().log_softmax(-1)
        total -= float(scores.gather(1, row[1:, None]).double().sum())
    return math.exp(total / (texts.shape[0] * (texts.shape[1] - 1)))


if __name__ == "__main__":
    main()
