#!/usr/bin/env python
"""Greedy texts with every drafter, compared token by token with plain decoding: thousands of prompts, several models.

    python benchmarks/speculative_identity.py --work DIRECTORY --json benchmarks/results/speculative_identity.json

Models: the bundled checkpoint with 4 and with 8 bits and a draft of its own (the decoder in C), the same uncompressed in float32 and
random models of other families (transformers' modules). Prompts are pieces of held-out text of 8 to 96 tokens, in batches, so that texts
end up at different places of their pages and accept different numbers of tokens in the same step. Lengths are fixed: drafts are verified
whether or not that pays. Exit code 1 where any token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from where import commit, cpu_name

from compress.evaluate.drafters import decode

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"
HELD_OUT = HERE.parent / "recipes" / "checkpoints" / "texts" / "heldout.txt"
SHORTEST, LONGEST = 8, 96
FREE = ("lookup", "suffix", "trie", "recycling", "hierarchy", "adaptive-ngram")
LENGTHS = {"fixed": {"depth": 5, "nodes": 12}}
#: Of random weights: hidden 64, 2 layers.
FAMILIES = ("qwen3", "mistral", "gpt_neox", "phi3")


def pieces(ids: list[int], count: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths from anywhere in a text."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        size = source.randint(SHORTEST, LONGEST)
        start = source.randrange(len(ids) - size)
        found.append(ids[start : start + size])
    return found


# -------------------------------------------------------------------- models
def artifacts(work: Path) -> Iterator[tuple[str, Path]]:
    """The bundled checkpoint in 4 and 8 bits, with a short-trained draft each."""
    import compress

    for scheme in ("W4A16", "W8A16"):
        path = work / f"identity-{scheme}"
        if not (path / "compress.json").is_file():
            draft = {"method": "distillspec", "layers": 1, "data": "given", "samples": 128, "steps": 100}
            stages = [{"quantize": {"method": "rtn", "scheme": scheme, "group_size": 128}}, {"draft": draft}]
            compress.apply({"name": scheme, "model": str(SOURCE), "stages": stages}, output=str(path), quiet=True)
        yield f"stdlib-4m {scheme}", path


def families(work: Path) -> Iterator[tuple[str, Path]]:
    """Random checkpoints of other architectures, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in FAMILIES:
        path = work / f"identity-{family}"
        if not (path / "config.json").is_file():
            torch.manual_seed(0)
            config = AutoConfig.for_model(
                family, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=16, vocab_size=503, max_position_embeddings=512, sliding_window=None, pad_token_id=0, bos_token_id=None,
                eos_token_id=None,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim == 2:
                        weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
            model.save_pretrained(path)
        yield f"random {family}", path


# -------------------------------------------------------------------- comparing
def compare(
    name: str, path: Path, drafters: dict[str, Any], prompts: list[list[int]], options: argparse.Namespace, **load: Any
) -> Any:
    """A row a drafter and batch: how many texts differ."""
    import runtime
    from runtime.api.model import Model
    from runtime.drafting.config.build import Target, choose_speculation

    plain = runtime.load(path, drafter=False, threads=options.threads, **load)
    target = Target(plain.artifact, plain.engine)
    wanted = decode(plain, prompts, options.new_tokens, 8)[0]
    for label, value in drafters.items():
        settings = value if isinstance(value, dict) else {"method": value}
        speculation = choose_speculation({**settings, "lengths": LENGTHS}, target)
        model = Model(plain.engine, plain.tokenizer, plain.artifact, plain.eos_token_ids, speculation)
        for batch in options.batches:
            # One at a time takes long and shows little more: an eighth of the prompts.
            part = prompts if batch > 1 else prompts[: len(prompts) // 8]
            started = time.perf_counter()
            found, taken = decode(model, part, options.new_tokens, batch)
            differing = [index for index, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other]
            row = {
                "model": name, "engine": model.stats["engine"], "drafter": label, "batch": batch, "prompts": len(part),
                "tokens": sum(map(len, found)), "drafted": taken.drafted_tokens, "accepted": taken.accepted_tokens,
                "differing": len(differing),
                "switched_off": speculation.off if speculation else "none",
            }  # fmt: skip
            print(
                json.dumps({**row, "seconds": round(time.perf_counter() - started, 1), "first": differing[:3]}),
                file=sys.stderr,
                flush=True,
            )
            yield row


def main() -> None:
    """Command line."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--module-prompts", type=int, default=256, help="for transformers' modules")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    ids = AutoTokenizer.from_pretrained(SOURCE)(HELD_OUT.read_text(encoding="utf-8"), add_special_tokens=False)[
        "input_ids"
    ]
    prompts = pieces(ids, options.prompts, 0)
    free = {name: name for name in FREE}
    rows: list[dict[str, Any]] = []
    for name, path in artifacts(options.work):
        draft = str(path / "draft")
        drafters: dict[str, Any] = {
            **free, "draft": {"model": draft}, "dynamic-tree": {"model": draft, "method": "dynamic-tree"},
            "large-tree": {"model": draft, "method": "large-tree"}, "staged": {"model": draft, "method": "staged"},
            "skip": {"method": "skip", "skip_attention": [2], "skip_mlp": [1, 2]},
            "early-exit": {"method": "early-exit", "layer": 2}, "lookup, then draft": {"of": ["lookup", draft]},
        }  # fmt: skip
        rows += compare(name, path, drafters, prompts, options)
    own = {**free, "the same in 4 bits": {"model": str(options.work / "identity-W4A16")}}
    few = prompts[: options.module_prompts]
    rows += compare("stdlib-4m float32", SOURCE, own, few, options, dtype="float32")
    for name, path in families(options.work):
        rows += compare(name, path, free, [[token % 503 for token in each] for each in few], options, dtype="float32")
    result = {
        "cpu": cpu_name(), "commit": commit(), "torch": torch.__version__, "new_tokens": options.new_tokens,
        "compared": sum(row["prompts"] for row in rows), "tokens": sum(row["tokens"] for row in rows),
        "differing": sum(row["differing"] for row in rows), "rows": rows,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    raise SystemExit(1 if result["differing"] else 0)


if __name__ == "__main__":
    main()
