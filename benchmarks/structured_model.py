#!/usr/bin/env python
"""Other models to prune, with the bundled tokenizer, trained here on all of the text of which benchmarks/structured.py takes the first
part: a GPT-2 of 8 layers (learned positions, LayerNorm, a plain GELU network), or a Qwen3-MoE of 4 layers with 8 experts, 2 a token.

    python benchmarks/structured_model.py --work DIR --out DIR/gpt2
    python benchmarks/structured_model.py --work DIR --out DIR/moe --family moe --steps 360

What they are by themselves does not matter; that rankings are compared on two families does, and that there are experts to remove.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from structured import BUNDLED, training_text
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LENGTH, BATCH = 256, 16
BALANCE = 0.01  # weight of the loss by which experts are used alike, where there are experts


def gpt2() -> PreTrainedModel:
    """8 layers of it."""
    config = GPT2Config(
        vocab_size=4096, n_positions=512, n_embd=192, n_layer=8, n_head=6, n_inner=768, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def moe() -> PreTrainedModel:
    """4 layers of a Qwen3-MoE, all of them with experts."""
    config = Qwen3MoeConfig(
        vocab_size=4096, max_position_embeddings=512, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32, intermediate_size=768, moe_intermediate_size=192, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        output_router_logits=True, router_aux_loss_coef=BALANCE, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {"gpt2": gpt2, "moe": moe}


def train(family: str, text: Path, out: Path, steps: int, rate: float) -> None:
    """Train and write it."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokens = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    model = FAMILIES[family]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.08)
    began, running = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,)).tolist()
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = model(input_ids=rows, use_cache=False)
        loss = torch.nn.functional.cross_entropy(given.logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
        (loss + BALANCE * given.aux_loss if family == "moe" else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running += float(loss.detach())
        if step % 50 == 0:
            spent = time.perf_counter() - began
            print(f"step {step} perplexity of training text {math.exp(running / 50):.1f} ({spent:.0f} s)", flush=True)
            running = 0.0
    if family == "moe":
        model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, default="gpt2")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = arguments.text or training_text(arguments.work, None)
    train(arguments.family, text, arguments.out, arguments.steps, arguments.rate)


if __name__ == "__main__":
    main()
