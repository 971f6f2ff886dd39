#!/usr/bin/env python
"""The bundled checkpoint, taught to copy: large models do when they edit or summarize, and one of 4 million weights hardly does.

    python benchmarks/copying_core.py DIRECTORY [--steps 400]

It goes on from `recipes/checkpoints/stdlib-4m` with rows in which a passage comes again and again, with other text between and now and then
another token in it: two thirds are passages of the calibration text, one third random tokens, which only copying can predict. Of copies it
learns the tokens; everywhere else it is held to what the checkpoint says. What it learned is measured on held-out text: the share of the
tokens of a second copy that it predicts, and perplexity, before and after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, kl_div

CHECKPOINTS = Path(__file__).resolve().parent.parent / "recipes" / "checkpoints"
SOURCE = CHECKPOINTS / "stdlib-4m"
FACTS = "copying.json"  # what was measured, beside the checkpoint
WIDTH, ROWS = 384, 12  # of a step
SHORTEST, LONGEST = 24, 180  # passages
GAP = 24  # most tokens between copies
RANDOM, EDITED, EDITS = 0.33, 0.4, 0.03  # share of random passages, of copies with edits, of the tokens edited in those
STEPS, PEAK, WARM = 400, 1e-3, 50


def row(ids: torch.Tensor, vocabulary: int, numbers: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A passage of a text and its copies, `[WIDTH]`; which tokens are copies, bool `[WIDTH]`."""

    def upto(most: int, least: int = 0) -> int:
        return int(torch.randint(least, most, (), generator=numbers))

    def chance() -> float:
        return float(torch.rand((), generator=numbers))

    length = upto(LONGEST, SHORTEST)
    start = upto(len(ids) - length)
    passage = ids[start : start + length]
    if chance() < RANDOM:
        passage = torch.randint(2, vocabulary, (length,), generator=numbers)
    parts: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    while sum(map(len, parts)) < WIDTH:
        copy, right = passage.clone(), torch.full((length,), bool(parts))
        right[:1] = False  # that a copy begins cannot be known
        if parts and chance() < EDITED:
            wrong = torch.rand(length, generator=numbers) < EDITS
            copy[wrong] = torch.randint(2, vocabulary, (int(wrong.sum()),), generator=numbers)
            right &= ~wrong
        gap, place = upto(GAP), upto(len(ids) - GAP)
        parts += [copy, ids[place : place + gap]]
        copies += [right, torch.zeros(gap, dtype=torch.bool)]
    return torch.cat(parts)[:WIDTH], torch.cat(copies)[:WIDTH]


@torch.inference_mode()
def copied(model: Any, ids: torch.Tensor, rows: int = 32, length: int = 120) -> float:
    """The share of the tokens of a second copy that are predicted, its first eight left out."""
    starts = range(0, len(ids) - length, (len(ids) - length) // rows)
    twice = torch.stack([ids[at : at + length].repeat(2) for at in starts])
    guesses = model(input_ids=twice).logits[:, length + 7 : -1].argmax(-1)
    return float((guesses == twice[:, length + 8 :]).float().mean())


@torch.inference_mode()
def perplexity(model: Any, ids: torch.Tensor, rows: int = 64, length: int = 256) -> float:
    """Of windows of a text."""
    windows = ids[: rows * length].view(rows, length)
    losses = [
        cross_entropy(model(input_ids=each).logits[:, :-1].flatten(0, 1).float(), each[:, 1:].flatten())
        for each in windows.split(16)
    ]
    return float(torch.stack(losses).mean().exp())


def teach(out: Path, steps: int = STEPS, seed: int = 1) -> dict[str, float]:
    """Write the checkpoint; returns what it copies and its perplexity on held-out text, before and after."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(SOURCE)
    model: Any = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
    before: Any = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).eval()

    def read(name: str) -> torch.Tensor:
        text = (CHECKPOINTS / "texts" / name).read_text(encoding="utf-8")
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    train, heldout = read("calibration.txt"), read("heldout.txt")
    facts = {"copied_before": copied(model, heldout), "perplexity_before": perplexity(model, heldout)}
    numbers = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM, max(0.0, 1 - step / steps))
    )
    vocabulary, began = model.config.vocab_size, time.perf_counter()
    for step in range(steps):
        rows, copies = zip(*(row(train, vocabulary, numbers) for _ in range(ROWS)), strict=True)
        batch, learned = torch.stack(rows), torch.stack(copies)[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch).logits[:, :-1].float()
            with torch.no_grad():
                held = before(input_ids=batch).logits[:, :-1][~learned].float()
        copying = cross_entropy(logits[learned], batch[:, 1:][learned])
        holding = kl_div(logits[~learned].log_softmax(-1), held.log_softmax(-1), log_target=True, reduction="batchmean")
        (copying + holding).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            seconds = time.perf_counter() - began
            print(
                f"step {step + 1}: loss of copies {copying:.3f}, divergence {holding:.3f} ({seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    model.eval()
    facts |= {"copied": copied(model, heldout), "perplexity": perplexity(model, heldout)}
    facts = {key: round(value, 4) for key, value in facts.items()}
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SOURCE / name, out / name)
    (out / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return facts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(teach(options.out, options.steps, options.seed)))


if __name__ == "__main__":
    main()
