"""Checks of the language models and the texts bundled under ``recipes/checkpoints``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

CHECKPOINTS = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints"
TEXTS = CHECKPOINTS / "texts"
EOS = "<|endoftext|>"
WINDOW = 256
SLICE_WINDOWS = 40
#: Perplexity of the first windows of the held-out text, evaluated in bf16: a little more than was recorded (15.98, 16.66).
SLICE_PPL_LIMIT = {"stdlib-4m": 16.4, "stdlib-qwen3-4m": 17.1}
#: What a model writes after the first lines of a test module.
CONTINUATION = {"stdlib-4m": "unittest.TestCase", "stdlib-qwen3-4m": "def test_"}
CLASSES = {"stdlib-4m": LlamaForCausalLM, "stdlib-qwen3-4m": Qwen3ForCausalLM}


@pytest.fixture(scope="module", params=list(CLASSES))
def directory(request: pytest.FixtureRequest) -> Path:
    """One of the bundled models."""
    return CHECKPOINTS / request.param


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    """The stored model, in the stored dtype."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    """The stored tokenizer."""
    return AutoTokenizer.from_pretrained(directory)


def read(name: str) -> str:
    """Return a bundled text."""
    return (TEXTS / f"{name}.txt").read_bytes().decode("utf-8")


def test_architecture(model: PreTrainedModel, directory: Path) -> None:
    assert isinstance(model, CLASSES[directory.name])
    assert 3_000_000 < sum(p.numel() for p in model.parameters()) < 6_000_000
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    config = model.config
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 1024
    for parameter in model.parameters():
        if parameter.ndim == 1:
            assert len(parameter) in (config.hidden_size, config.head_dim)
        else:  # groups of 128, super-blocks of 256 columns
            assert parameter.shape[0] % 128 == parameter.shape[1] % 256 == 0
        assert torch.isfinite(parameter).all()


def test_shards_are_small_and_indexed(directory: Path) -> None:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = {path.name for path in directory.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == shards
    assert len(shards) > 1
    for path in CHECKPOINTS.rglob("*"):
        assert path.stat().st_size < 2_900_000


def test_special_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    assert tokenizer.eos_token == tokenizer.bos_token == EOS
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    if x:\n\treturn  x \n\n\n        # done\n",
        "  leading and trailing  ",
        " ,  . don't 'quoted' n't a , b !",
        "naïve – ü 日本語 🙂\r\n\x00end",
        f"one\n{EOS}\ntwo",
    ],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", ["calibration", "heldout"])
def test_texts(tokenizer: Any, name: str) -> None:
    text = read(name)
    low, high = {"calibration": (350_000, 480_000), "heldout": (220_000, 300_000)}[name]
    assert low < len(text.encode("utf-8")) < high
    assert not any(ord(char) < 32 and char != "\n" and char != "\t" for char in text)
    assert "\ufffd" not in text
    assert text.endswith(f"\n{EOS}\n")
    assert text.count(f"\n{EOS}\n") > 20
    assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text


def test_texts_do_not_overlap() -> None:
    """No 200-character window of the held-out text occurs in the calibration text."""
    width = 200
    heldout, calibration = read("heldout"), read("calibration")
    windows = {hash(calibration[i : i + width]) for i in range(len(calibration) - width + 1)}
    found = [i for i in range(len(heldout) - width + 1) if hash(heldout[i : i + width]) in windows]
    assert not [i for i in found if heldout[i : i + width] in calibration]


def test_heldout_perplexity(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    ids = torch.tensor(tokenizer(read("heldout"), verbose=False)["input_ids"][: SLICE_WINDOWS * WINDOW])
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in ids.view(-1, WINDOW).split(8):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
            targets = batch[:, 1:].reshape(-1)
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
            count += targets.numel()
    assert math.exp(total / count) < SLICE_PPL_LIMIT[directory.name]


def test_generation(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    """Greedy continuations are finite, look like the training text, and do not repeat a single token."""
    inputs = tokenizer("import unittest\n\nclass Test", return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()
        out = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    assert CONTINUATION[directory.name] in tokenizer.decode(new)
    assert len(set(new.tolist())) >= 10
