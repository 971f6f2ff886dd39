#!/usr/bin/env python
"""Speculative decoding beside plain decoding of the same artifact, and beside transformers' assisted generation and prompt lookup.

    python benchmarks/speculative.py --work DIRECTORY --json benchmarks/results/speculative_cpu.json
    python benchmarks/speculative.py --work DIRECTORY --shape small --new-tokens 32 --rounds 1        a smoke test

What is measured on is made first, in DIRECTORY: the bundled checkpoint, quantized to 4 bits, with a draft distilled from it; and both
inside a model of 1.0 billion weights that computes the same (`expand_core.py`), so that texts and acceptance are those of trained models
while the time of a step is a large one's. The draft has layers of that size too.

Prompts: held-out text of the model's domain, prose, code, conversation, and code that is to be written again ("edit"). Every ratio is
within a round, in which plain decoding and the drafters take turns on the same prompts; medians over the rounds. Greedy texts are
compared token by token with plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from expand_core import SHAPES, expand
from where import commit, cpu_facts, cpu_name

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"
HELD_OUT = HERE.parent / "recipes" / "checkpoints" / "texts" / "heldout.txt"
PROMPT = 64
CONTINUATIONS = 8
SETTINGS = (
    "shape", "draft_layers", "draft_scheme", "prompts", "new_tokens", "rounds", "steps", "samples", "peer_prompts", "peer_tokens",
)  # fmt: skip
QUANTIZE = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128}}


# -------------------------------------------------------------------- what is measured on
def prepare(work: Path, shape: str, layers: int, steps: int, samples: int, draft_scheme: str) -> dict[str, Path]:
    """The artifact with its distilled draft, and both in the large shape; what is there already is used again."""
    import compress

    small = work / "small"
    draft = {
        "method": "distillspec", "layers": layers, "data": "teacher", "samples": samples, "continuations": CONTINUATIONS, "steps": steps,
        "learning_rate": 3e-3, "quantize": "none", "patience": None, "evaluate_every": 100,
    }  # fmt: skip
    if not (small / "compress.json").is_file():
        recipe = {"name": "small", "model": str(SOURCE), "stages": [QUANTIZE, {"draft": draft}]}
        compress.apply(recipe, output=str(small), resume=(small / ".compress").is_dir())
    if shape == "small":
        return {"target": small, "draft": small / "draft"}
    made = {}
    for name, source, deep, scheme in (
        ("target", SOURCE, None, "W4A16"),
        ("draft", small / "draft", layers, draft_scheme),
    ):
        path = work / f"{name}-{shape}{'-' + scheme if name == 'draft' else ''}"
        if not (path / "compress.json").is_file():
            dense = work / f"{name}-{shape}-dense"
            expand(source, dense, SHAPES[shape], deep)
            stage = {"quantize": {"method": "rtn", "scheme": scheme, "group_size": 128}}
            compress.apply({"name": name, "model": str(dense), "stages": [stage]}, output=str(path), quiet=True)
            shutil.rmtree(dense)
        made[name] = path
    return made


def prompts_of(tokenizer: Any, count: int) -> dict[str, list[list[int]]]:
    """{kind: prompts}, `count` of each."""
    from compress.distill.samples import sample_rows

    ids = tokenizer(HELD_OUT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    step = len(ids) // (count + 1)
    found = {"held-out": [ids[start : start + PROMPT] for start in range(step, step * (count + 1), step)]}
    samples = sample_rows(tokenizer)
    found |= {kind: rows[:count].tolist() for kind, rows in samples.items()}
    divide = tokenizer("\n\n# The same again:\n\n", add_special_tokens=False)["input_ids"]
    code = samples["code"].flatten().tolist()
    size = 3 * PROMPT
    starts = range(0, max(1, len(code) - size), max(1, (len(code) - size) // count))
    found["edit"] = [[*code[at : at + size], *divide, *code[at : at + PROMPT // 2]] for at in list(starts)[:count]]
    return found


# -------------------------------------------------------------------- ours
DRAFTERS: dict[str, Any] = {
    "lookup": "lookup", "suffix": "suffix", "recycling": "recycling", "trie": "trie", "draft": "DRAFT",
    "lookup, then draft": {"of": ["lookup", "DRAFT"]},
}  # fmt: skip


def ours(paths: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Rows of {drafter, kind, temperature, batch}: tokens a second and the ratio to plain decoding."""
    import runtime
    from runtime.decoding.drafters.choose import Target, choose_speculation
    from runtime.model import Model

    plain = runtime.load(paths["target"], drafter=False, threads=options.threads)
    prompts = prompts_of(plain.tokenizer, options.prompts)
    target = Target(plain.artifact, plain.engine)
    models = {}
    for name in options.drafters or DRAFTERS:
        value = json.loads(json.dumps(DRAFTERS[name]).replace("DRAFT", str(paths["draft"])))
        models[name] = Model(
            plain.engine, plain.tokenizer, plain.artifact, plain.eos_token_ids, choose_speculation(value, target)
        )
    rows = []
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            for kind, ids in prompts.items():
                row = {"temperature": temperature, "batch": batch, "kind": kind}
                rows += [row | found for found in _turns(plain, models, ids, temperature, batch, options)]
                for found in rows[-len(models) :]:
                    print(json.dumps(found), file=sys.stderr, flush=True)
    return {"engine": plain.stats["engine"], "weight_bytes": plain.stats["weight_bytes"], "rows": rows}


def _turns(
    plain: Any,
    models: dict[str, Any],
    ids: list[list[int]],
    temperature: float,
    batch: int,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    ratios: dict[str, list[float]] = {name: [] for name in models}
    speeds: dict[str, list[float]] = {name: [] for name in [*models, "plain"]}
    same = dict.fromkeys(models, True)
    last: dict[str, Any] = {}
    for number in range(options.rounds + 1):
        before, texts = _decode(plain, ids, temperature, batch, options.new_tokens)
        for name, model in models.items():
            rate, found = _decode(model, ids, temperature, batch, options.new_tokens)
            if temperature == 0:
                same[name] &= found == texts
            if number:  # the first round is for the drafters to learn what things cost
                ratios[name].append(rate / before)
                speeds[name].append(rate)
            last[name] = model.stats
        if number:
            speeds["plain"].append(before)
    return [
        {
            "drafter": name, "speedup": round(statistics.median(ratios[name]), 3), "speedups": [round(each, 3) for each in ratios[name]],
            "tokens_per_second": round(statistics.median(speeds[name]), 2),
            "plain_tokens_per_second": round(statistics.median(speeds["plain"]), 2),
            "same_text": same[name] if temperature == 0 else None, "acceptance_rate": last[name]["acceptance_rate"],
            "mean_accepted": last[name]["mean_accepted"], "acceptance_by_depth": [round(r, 3) for r in last[name]["acceptance_by_depth"]],
            "steps": last[name]["steps"],
        }
        for name in models
    ]  # fmt: skip


def _decode(
    model: Any, ids: list[list[int]], temperature: float, batch: int, new: int
) -> tuple[float, list[list[int]]]:
    """Tokens a second of decoding, and the texts."""
    seconds, texts, count = 0.0, [], 0
    for start in range(0, len(ids), batch):
        part = ids[start : start + batch]
        texts += model.generate(part, max_new_tokens=new, temperature=temperature, ignore_eos=True)
        seconds += model.stats["decode_seconds"]
        count += model.stats["new_tokens"] - len(part)
    return count / seconds, texts


# -------------------------------------------------------------------- the peer
def peers(paths: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """transformers' assisted generation and prompt lookup: the same artifact and draft in its own modules, batch 1."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import runtime  # noqa: F401  (teaches transformers the formats)

    torch.set_num_threads(options.threads or torch.get_num_threads())
    load = {"dtype": torch.bfloat16}
    model: Any = AutoModelForCausalLM.from_pretrained(paths["target"], **load).eval()
    assistant: Any = AutoModelForCausalLM.from_pretrained(paths["draft"], **load).eval()
    prompts = prompts_of(AutoTokenizer.from_pretrained(paths["target"]), options.prompts)
    ways: dict[str, dict[str, Any]] = {
        "lookup": {"prompt_lookup_num_tokens": 8},
        "draft": {"assistant_model": assistant},
    }
    rows = []

    def decode(ids: list[int], temperature: float, more: dict[str, Any]) -> float:
        inputs = torch.tensor([ids])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        new = options.peer_tokens
        # Prefill is taken off, as in our numbers.
        seconds = []
        for count in (1, new):
            started = time.perf_counter()
            model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                eos_token_id=None, **sampling, **(more if count > 1 else {}),
            )  # fmt: skip
            seconds.append(time.perf_counter() - started)
        return (new - 1) / (seconds[1] - seconds[0])

    for temperature in (0.0, 1.0):
        for kind, ids in prompts.items():
            ratios: dict[str, list[float]] = {name: [] for name in ways}
            speeds: dict[str, list[float]] = {name: [] for name in [*ways, "plain"]}
            for prompt in ids[: options.peer_prompts]:
                plain = decode(prompt, temperature, {})
                speeds["plain"].append(plain)
                for name, more in ways.items():
                    rate = decode(prompt, temperature, more)
                    ratios[name].append(rate / plain)
                    speeds[name].append(rate)
            for name in ways:
                row = {
                    "temperature": temperature, "batch": 1, "kind": kind, "drafter": name,
                    "speedup": round(statistics.median(ratios[name]), 3),
                    "tokens_per_second": round(statistics.median(speeds[name]), 2),
                    "plain_tokens_per_second": round(statistics.median(speeds["plain"]), 2),
                }  # fmt: skip
                rows.append(row)
                print("transformers", json.dumps(row), file=sys.stderr, flush=True)
    return {"version": transformers.__version__, "rows": rows}


def machine() -> dict[str, Any]:
    """The processor, as far as it decides times."""
    facts = cpu_facts()
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
    flags = [flag for flag in facts.get("flags", "").split() if flag in known]
    return {
        "cpu": cpu_name(),
        "family": facts.get("cpu family"),
        "model": facts.get("model"),
        "flags": flags,
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=["small", *SHAPES], default="1.1b")
    parser.add_argument("--draft-scheme", choices=["W4A16", "W8A16"], default="W4A16")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=1600, help="of the draft's training")
    parser.add_argument("--samples", type=int, default=448, help="rows that it is trained on")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peer-prompts", type=int, default=4)
    parser.add_argument("--peer-tokens", type=int, default=64)
    options = parser.parse_args()
    paths = prepare(
        options.work, options.shape, options.draft_layers, options.steps, options.samples, options.draft_scheme
    )
    result: dict[str, Any] = {
        "machine": machine(), "commit": commit(), "threads": options.threads or torch.get_num_threads(), "torch": torch.__version__,
        "settings": {
            key: getattr(options, key)
            for key in SETTINGS
        },
    }  # fmt: skip
    result["ours"] = ours(paths, options)
    if not options.no_peers:
        result["transformers"] = peers(paths, options)
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
