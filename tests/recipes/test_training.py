"""Checks of the scripts that made the bundled checkpoints: a few steps of each, stopped and resumed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.layers.dense_products import products

CHECKPOINTS = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints"
sys.path.insert(0, str(CHECKPOINTS))

import train  # noqa: E402
import train_recall  # noqa: E402
import training  # noqa: E402

STEPS = 4


def stdlib_model(scratch: Path, *options: str, name: str = "stdlib-4m") -> Any:
    """A language model after a few steps on random tokens."""
    tokens = torch.randint(train.MODELS[name].sizes["vocab_size"], (4000,), generator=torch.Generator().manual_seed(0))
    common = ["--steps", str(STEPS), "--warmup", "2", "--batch", "2", "--micro-batch", "1", "--no-compile"]
    where = ["--model", name, "--scratch", str(scratch), "--checkpoint-every", "2"]
    args = train.parse_args([*where, *common, *options])
    with products(torch.device("cpu"), torch.bfloat16):  # Muon's take minutes where the CPU has none in bfloat16
        return train.train(args, tokens, tokens[:512])


def qwen3_model(scratch: Path, *options: str) -> Any:
    """The second language model, with the optimizer in float32."""
    return stdlib_model(scratch, "--precision", "fp32", *options, name="stdlib-qwen3-4m")


def recall_model(scratch: Path, *options: str) -> Any:
    """The retrieval model after a step of each length, with few tokens in each, and a few of all."""
    tokenizer = AutoTokenizer.from_pretrained(train_recall.SOURCE_DIR)
    text = train_recall.task.load_text(tokenizer)
    common = ["--tokens", "256", "--warmup", "2", "--cooldown", str(STEPS), "--mixture", "64:1,128:1"]
    stages = ["--threshold", "-1", "--stage-steps", "1", "--checkpoint-every", "2"]
    args = train_recall.parse_args(["--scratch", str(scratch), *common, *stages, *options])
    return train_recall.train(args, train_recall.task.Vocabulary.from_tokenizer(tokenizer), text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", [qwen3_model, stdlib_model, recall_model])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_recall, "STAGES", (64, 128))
    monkeypatch.setattr(train, "SEQ_LEN", 32)
    whole = run(tmp_path / "whole").state_dict()
    done = 0
    step = training.Trainer.step

    def until_stopped(trainer: training.Trainer, factor: float) -> None:
        nonlocal done
        step(trainer, factor)
        done += 1
        if done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "step", until_stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    monkeypatch.setattr(training.Trainer, "step", step)
    resumed = run(tmp_path / "parts", "--resume").state_dict()
    torch.manual_seed(1)
    untrained = {
        stdlib_model: train.MODELS["stdlib-4m"].make,
        qwen3_model: train.MODELS["stdlib-qwen3-4m"].make,
        recall_model: train_recall.make_model,
    }
    begun = untrained[run]().state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
        assert not torch.equal(weight, begun[name]), name


def test_muon_is_torchs_in_more_bits() -> None:
    """The float32 one against `torch.optim.Muon`, which rounds to bfloat16 on the way."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 16), (16, 24), (24, 16))]
    own, other = ([torch.nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    settings = {"lr": 0.05, "momentum": 0.95, "weight_decay": 0.02}
    optimizers = (
        train_recall.Muon(own, **settings), torch.optim.Muon(other, adjust_lr_fn="match_rms_adamw", **settings)
    )  # fmt: skip
    for _ in range(5):
        for mine, its in zip(own, other, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            its.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, its, before in zip(own, other, start, strict=True):
        moved = (its - before).norm()
        assert (mine - its).norm() < 0.03 * moved


def test_what_is_written_is_the_model_in_bfloat16(tmp_path: Path) -> None:
    model = train_recall.make_model().eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    train_recall.export(model, tmp_path / "made")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "made")) == stored.config.vocab_size == training.VOCAB_SIZE
    for name, weight in stored.state_dict().items():
        assert torch.equal(weight, before[name].to(torch.bfloat16))
        assert torch.equal(model.state_dict()[name], before[name])
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
