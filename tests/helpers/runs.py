"""Runs small enough to be interrupted hundreds of times: a model, a text, and recipes that use every kind of stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_TEXT = "".join(f"line {i}: the square of {i} is {i * i}, and its double is {2 * i}.\n" for i in range(80))
_GRID = {"bits": 4, "group_size": 16}
_SMALL = {"samples": 8, "sequence_length": 16}
STAGES: dict[str, list[dict[str, Any]]] = {
    "compress": [
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        {"quantize": {"method": "gptq", **_GRID}},
    ],
    "structure": [
        {"structure": {"remove": "ffn", "method": "obs", "keep": 24}},
        {"quantize": {"method": "rtn", **_GRID}},
    ],
    "hidden": [{"structure": {"remove": "hidden", "method": "magnitude", "keep": 16}}],
    "recover": [
        {"prune": {"method": "magnitude", "sparsity": 0.5}},
        {"recover": {"method": "finetune", **_SMALL, "steps": 4, "batch_size": 2, "evaluate_every": 1}},
    ],
    "draft": [
        {"quantize": {"method": "rtn", **_GRID}},
        {
            "draft": {
                "method": "distillspec", "layers": 1, **_SMALL, "steps": 2, "batch_size": 4, "evaluate_every": 1, "tokens": 2,
                "data": "given", "quantize": "none",
            }
        },
    ],
}  # fmt: skip


def make_request(directory: Path, kind: str, spill: bool = False) -> dict[str, Any]:
    """A recipe of these stages for a model of three blocks, which is written to `directory` with its tokenizer and text."""
    from random_models import random_llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = directory / "model"
    if not model.is_dir():
        settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
        random_llama(**settings).to(torch.bfloat16).save_pretrained(model)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(letters)}, "<eos>": 256}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(model)
        (directory / "text.txt").write_text(_TEXT, encoding="utf-8")
    return {
        "name": kind,
        "model": str(model),
        "calibration": {"data": str(directory / "text.txt"), **_SMALL, "batch_size": 4},
        "stages": STAGES[kind],
    }


TIMED = ("compress.log", "run.json", "report.html")
"""Files with times in them, which differ between equal runs: the log, the run record, and the report, which shows the record."""


def contents(directory: Path) -> dict[str, bytes]:
    """All that a run has written; of what has times in it only that it is there."""
    return {
        file.relative_to(directory).as_posix(): b"" if file.name in TIMED else file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file() and file.name != "compress.log"
    }


def same_bytes(a: Path, b: Path) -> None:
    """Two artifacts are the same, but for how long they took."""
    names = sorted(f.name for f in a.iterdir() if f.name not in TIMED)
    assert names == sorted(f.name for f in b.iterdir() if f.name not in TIMED)
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
