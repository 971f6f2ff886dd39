"""Tiny random checkpoints of several families, with a tokenizer of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, VOCABULARY, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress.model.checkpoint_writer import PlainWriter


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`make_checkpoint(family, **config)` writes a random checkpoint (weights large enough that outputs differ) and returns it."""

    def make(
        family: str = "llama",
        dtype: torch.dtype = torch.bfloat16,
        name: str = "model",
        shards: str = "5GB",
        **changes: Any,
    ) -> Path:
        torch.manual_seed(len(family))
        settings = {**SMALL[family], "vocab_size": VOCABULARY, "max_position_embeddings": 128, **changes}
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
        path = tmp_path / name
        model.save_pretrained(path, max_shard_size=shards)
        byte_tokenizer().save_pretrained(path)
        return path

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A few kilobytes of text with some structure in it."""
    path = tmp_path / "text.txt"
    lines = [f"line {i}: the square of {i} is {i * i}, and its double is {2 * i}.\n" for i in range(400)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def recipe(text: Path) -> Callable[..., dict[str, Any]]:
    """A small recipe as a dictionary; keywords replace whole sections."""

    def make(model: Path, *stages: dict[str, Any], **sections: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "name": "test",
            "model": str(model),
            "calibration": {"data": str(text), "samples": 8, "sequence_length": 32, "batch_size": 4},
            "stages": list(stages),
        }
        return {**base, **sections}

    return make


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any], int], Path]:
    """`interrupted(recipe, parts)`: runs a recipe until so many parts of plain checkpoints are written; where to go on from there. Who
    goes on and writes one of them again fails."""

    def run(recipe: dict[str, Any], parts: int) -> Path:
        real, written, going_on = PlainWriter.write, set(), False

        def write(self: PlainWriter, part: int, *arguments: Any) -> None:
            if len(written) == parts and not going_on:
                raise KeyboardInterrupt
            assert (self.directory, part) not in written, f"part {part} was there"
            real(self, part, *arguments)
            written.add((self.directory, part))

        monkeypatch.setattr(PlainWriter, "write", write)
        with pytest.raises(KeyboardInterrupt):
            compress.apply(recipe, output=tmp_path / "out", quiet=True)
        going_on = True
        return tmp_path / "out"

    return run
